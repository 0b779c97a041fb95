"""Input of the draft layers, and how confident they are.

A request drafts a block of tokens at once: its newest token and placeholders behind it, at the
positions after the last accepted one. The keys of the draft layers live in rings of slots, one ring
per request, addressed by position modulo the ring's length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_neuron.ops.arithmetic import Order

KEY_COLUMNS = 64
"""Key lists of drafts are padded to a multiple of this."""

_LARGEST_LOGIT = 60.0


@dataclass(frozen=True)
class DraftBlocks:
    """Draft blocks of ``R`` requests with ``K`` tokens each.

    Attributes:
        positions: int32 ``[R, K]``.
        slots: int32 ``[R, K]``, where the keys of the block are stored; -1 for none.
        valid: bool ``[R, K]``, false for padding requests.
        keys: int32 ``[R, width]``, slots that every token of the block reads; -1 for none.
    """

    positions: Tensor
    slots: Tensor
    valid: Tensor
    keys: Tensor


def draft_blocks(
    slots: Tensor,
    positions: Tensor,
    first_rows: Tensor,
    accepted: Tensor,
    *,
    block: int,
    ring: int,
    window: int,
    width: int | None = None,
) -> DraftBlocks:
    """Positions and slots of the next draft blocks.

    With ``a`` the position of the last accepted token, a block takes positions ``a + 1`` to ``a +
    block`` and all its tokens see the keys of positions ``a - window + 1`` to ``a + block``, later
    ones of the block included. Positions before the sequence have no key.

    Args:
        slots: int32 ``[Q]``, ring slots of the main rows.
        positions: int32 ``[Q]``, positions of the main rows.
        first_rows: int32 ``[R]``, first main row of each request; negative for padding, which gets
            position 0 and no slots.
        accepted: int32 ``[R]``, accepted drafts of each request.
        block: tokens of a block.
        ring: slots of a request's ring.
        window: main tokens that a draft sees.
        width: columns of the key lists, by default the least multiple of 64 that holds them.
    """
    if width is None:
        width = -(-(window + block) // KEY_COLUMNS) * KEY_COLUMNS
    valid = (first_rows >= 0)[:, None]
    row = first_rows.clamp_min(0)
    first = positions.index_select(0, row)
    base = (slots.index_select(0, row) - first.remainder(ring))[:, None]
    last = (first + accepted)[:, None]
    column = torch.arange(max(width, block), dtype=torch.int32, device=slots.device)

    own = last + (column[:block] + 1)
    key = last + (column[:width] - (window - 1))
    present = (column[:width] < window + block) & (key >= 0) & valid
    return DraftBlocks(
        own.where(valid, 0),
        (base + own.remainder(ring)).where(valid, -1),
        valid.expand(-1, block),
        (base + key.remainder(ring)).where(present, -1),
    )


def confidence(
    hidden: Tensor,
    weight: Tensor,
    temperature: float | Tensor,
    order: Order,
    markov: Tensor | None = None,
) -> Tensor:
    """Predicted probability that a draft is accepted if those before it are.

    ``sigmoid(clamp((hidden . w_h + markov . w_m) / T, -60, 60))`` in fp32.

    Args:
        hidden: bf16 ``[n, H]``, what the last draft layer puts out, before the norm of the head.
        weight: bf16 ``[H + M]``, the part of the Markov embedding behind that of ``hidden``.
        temperature: ``T``, positive.
        order: who orders the sums.
        markov: bf16 ``[n, M]``, Markov embedding of the token before the draft.

    Returns:
        fp32 ``[n]``.
    """
    size = hidden.shape[1]
    logit = order.matmul(hidden, weight[None, :size])
    if markov is not None:
        logit = logit + order.matmul(markov, weight[None, size:])
    return order.sigmoid((logit[:, 0] / temperature).clamp_(-_LARGEST_LOGIT, _LARGEST_LOGIT))


def survival(rates: Tensor) -> Tensor:
    """Probability that a draft and all before it are accepted.

    Products are fp32, from the first draft to the last.

    Args:
        rates: fp32 ``[R, K]``, :func:`confidence` of the drafts.

    Returns:
        fp32 ``[R, K]``.
    """
    if rates.shape[1] == 0:
        return rates
    products = [rates[:, 0]]
    for rate in rates.unbind(1)[1:]:
        products.append(products[-1] * rate)
    return torch.stack(products, 1)


def split_rows_by_confidence(total_rows: int, survival: Tensor) -> Tensor:
    """Divide the rows of the next step among requests.

    Every request gets a row; the others go to the drafts that are most likely to survive, the
    earlier request and then the earlier draft first among equals. As survival never grows along a
    request, its chosen drafts are its first ones.

    Args:
        total_rows: rows of the step, ``R`` to ``R * (K + 1)``; fewer count as ``R``.
        survival: fp32 ``[R, K]``, see :func:`survival`.

    Returns:
        int32 ``[R]``, rows of each request.
    """
    requests, drafts = survival.shape
    order = survival.flatten().sort(descending=True, stable=True).indices
    ranks = torch.empty_like(order).scatter_(0, order, torch.arange(requests * drafts))
    chosen = (ranks < total_rows - requests).view(requests, drafts)
    return chosen.sum(1, dtype=torch.int32) + 1

"""Verification of drafts: which proposed tokens the target distribution accepts, and what follows.

A step forwards several rows of a request: its newest token, then drafts. The distribution of row
``j`` judges draft ``j``; the last row has none to judge and is the *fresh* row. A draft ``x`` drawn
from ``d`` is accepted with probability ``min(1, p(x) / d(x))`` under the target ``p``; in place of
the first rejected one a token is drawn from the residual ``max(p - d, 0)``. Tokens so emitted
follow ``p`` whatever ``d`` is.

Shapes depend on nothing but the shapes of the arguments, and no row influences a row of another
request. Rows of a request are consecutive, requests are in order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_neuron.ops.arithmetic import Order
from deepinfer_neuron.ops.philox import draw_words
from deepinfer_neuron.ops.sample import (
    WEIGHT_BITS,
    Distribution,
    argmax,
    exponential,
    fixed_point_draw,
    fixed_point_weights,
)

ROW_POSITION_STEP = 10_000_019
"""Distance of the random positions of consecutive rows of a request."""

DRAFT_PENALTY = 5e-5
"""Subtracted from draft log-probabilities in the residual, so that equal distributions that differ
by rounding leave one."""

_FRESH, _RESIDUAL, _TEST = range(3)
_TEST_BITS = 33


@dataclass(frozen=True)
class VerificationRows:
    """Where the rows of a step belong, one entry per row.

    Attributes:
        requests: int32 ``[Q]``, number of the request.
        steps: int32 ``[Q]``, place among the rows of the request.
        verifies: bool ``[Q]``, whether the row judges a draft; false for a request's last row.
    """

    requests: Tensor
    steps: Tensor
    verifies: Tensor


@dataclass(frozen=True)
class Decisions:
    """What each row says by itself, before the rows in front of it count.

    Attributes:
        accept: bool ``[Q]``; true for fresh rows.
        candidates: int64 ``[Q]``, the draft if accepted, else the token to emit instead; -1 for a
            fresh row without a probability of at least ``2^-31``.
        accept_probs: fp32 ``[Q]``, probability that a draft from ``d`` is accepted; 1 for fresh
            rows.
        draft_logprobs: fp32 ``[Q]``, log-probability of the draft in its own distribution.
    """

    accept: Tensor
    candidates: Tensor
    accept_probs: Tensor
    draft_logprobs: Tensor


@dataclass(frozen=True)
class Accepted:
    """What each row contributes to its request.

    Attributes:
        tokens: ``[Q]``, dtype of the candidates; without meaning behind the final row.
        accept: bool ``[Q]``, the row's draft is emitted.
        final: bool ``[Q]``, the row's token is emitted and is the last one: once per request.
    """

    tokens: Tensor
    accept: Tensor
    final: Tensor


def verification_rows(first_rows: Tensor, lengths: Tensor, total: int) -> VerificationRows:
    """Assign packed rows to their requests.

    Args:
        first_rows: int32 ``[R]``, the exclusive prefix sums of ``lengths``.
        lengths: int32 ``[R]``, rows of each request, 0 allowed.
        total: number of rows, the sum of ``lengths``.
    """
    row = torch.arange(total, dtype=torch.int32, device=first_rows.device)
    # Of requests that share a first row, all but the last have no rows.
    requests = torch.searchsorted(first_rows, row, right=True, out_int32=True) - 1
    steps = row - first_rows.index_select(0, requests)
    return VerificationRows(requests, steps, steps + 1 < lengths.index_select(0, requests))


def row_positions(positions: Tensor, requests: Tensor, steps: Tensor) -> Tensor:
    """Random position of each row.

    Args:
        positions: int32 ``[R]``, index of the token that the first row of a request predicts.
        requests: int32 ``[Q]``.
        steps: int32 ``[Q]``, see :class:`VerificationRows`.

    Returns:
        int32 ``[Q]``, ``position + step * 10000019``, wrapping.
    """
    return positions.index_select(0, requests) + steps * ROW_POSITION_STEP


def accept_drafts(
    target: Distribution,
    draft_logprobs: Tensor,
    drafts: Tensor,
    verifies: Tensor,
    seeds: Tensor,
    positions: Tensor,
    order: Order,
) -> Decisions:
    """Judge the drafts by rejection sampling, and draw the tokens that replace rejected ones.

    Tensors are on the host.

    With the first random word ``x`` of a row's test draw, a draft is accepted if ``2 x + 1`` is
    below ``trunc(exp(min(ln p - ln d, 0)) * 2^33)``, which always holds for ``p >= d``. Else the
    candidate is drawn in proportion to ``trunc(max(p - exp(ln d - 5e-5), 0) * 2^31)``; where all
    of these are 0 it is the most probable token. The penalty is not part of the test.

    Args:
        target: processed distributions of the ``Q`` rows, ``[Q, V]``.
        draft_logprobs: fp32 ``[Q, V]``, processed log-probabilities the drafts were drawn from;
            fresh rows may hold anything.
        drafts: int32 or int64 ``[Q]``, the drafts; a negative one is rejected. That is exact only
            if its row of ``draft_logprobs`` is ``-inf`` or ``p`` of the draft is 0.
        verifies: bool ``[Q]``; other rows draw from the target.
        seeds: int64 ``[Q]``, bits of the unsigned seeds.
        positions: int32 or int64 ``[Q]``, see :func:`row_positions`.
        order: how exponentials are evaluated.
    """
    ids = drafts.to(torch.int64)
    column = ids.clamp_min(0)[:, None]
    real = ids >= 0
    theirs = draft_logprobs.gather(-1, column)[:, 0].where(real, -math.inf)
    ours = target.logprobs.gather(-1, column)[:, 0].where(real, -math.inf)
    # A removed draft must not meet a draft distribution without it: -inf + inf has no value.
    ratio = (ours - theirs).clamp_max(0.0).where(ours > -math.inf, -math.inf)
    limit = (exponential(order, ratio) * 2.0**_TEST_BITS).to(torch.int64)
    draw = torch.where(verifies, _RESIDUAL, _FRESH)
    words, test = draw_words(seeds, positions, torch.stack((draw, torch.full_like(draw, _TEST))))
    passed = (test[:, 0] << 1 | 1) < limit

    penalised = exponential(order, draft_logprobs - DRAFT_PENALTY)
    residual = (target.probabilities - penalised).clamp_min_(0.0)
    weights = fixed_point_weights(residual.where(verifies[:, None], target.probabilities))
    drawn = fixed_point_draw(weights, words)
    empty = verifies & (drawn < 0)
    drawn = drawn.where(~empty, argmax(target.logprobs))
    rejected = weights.sum(-1).to(torch.float32) * 2.0**-WEIGHT_BITS
    return Decisions(
        passed | ~verifies,
        ids.where(verifies & passed, drawn),
        (1.0 - rejected).clamp_min_(0.0).where(verifies, 1.0),
        theirs,
    )


def accept_greedy(best: Tensor, drafts: Tensor, verifies: Tensor) -> Decisions:
    """:func:`accept_drafts` for rows whose target and draft distributions are single tokens.

    A draft is accepted if it is the best token, and that one is the candidate in any case. The
    draft's log-probability is 0.

    Args:
        best: int64 ``[Q]``, lowest id among the largest logits of each row.
        drafts: int32 or int64 ``[Q]``; a negative one is rejected.
        verifies: bool ``[Q]``.
    """
    equal = best == drafts
    probability = torch.where(equal, math.exp(-DRAFT_PENALTY), 0.0).where(verifies, 1.0)
    logprob = torch.where(drafts >= 0, 0.0, -math.inf)
    return Decisions(equal | ~verifies, best, probability, logprob)


def accept_result(
    accept: Tensor,
    candidates: Tensor,
    drafts: Tensor,
    verifies: Tensor,
    first_rows: Tensor,
    requests: Tensor,
    golden: Tensor | None = None,
) -> Accepted:
    """Join the decisions of the rows: the drafts before the first rejected one are emitted.

    Args:
        accept: bool ``[Q]``, decision of each row.
        candidates: int32 or int64 ``[Q]``, vocabulary ids.
        drafts: ``[Q]`` of any integer dtype, the draft that each row judges; only compared with
            ``golden``.
        verifies: bool ``[Q]``.
        first_rows: int32 ``[R]``.
        requests: int32 ``[Q]``, request of each row.
        golden: ``[Q]`` forced tokens, -1 for none; a draft is then accepted if it is that token.
    """
    tokens = candidates
    if golden is not None:
        forced = golden != -1
        tokens = torch.where(forced, golden, candidates)
        accept = torch.where(forced, golden == drafts, accept)
    emits = verifies & accept
    before = (~emits).cumsum(0) - (~emits).to(torch.int64)
    alive = before == before.index_select(0, first_rows.index_select(0, requests))
    return Accepted(tokens, alive & emits, alive & ~emits)


def accepted_counts(accept: Tensor, first_rows: Tensor, lengths: Tensor) -> Tensor:
    """Accepted drafts per request, which is also the place of its final row.

    Args:
        accept: bool ``[Q]``, of :class:`Accepted`.
        first_rows: int32 ``[R]``.
        lengths: int32 ``[R]``.

    Returns:
        int32 ``[R]``.
    """
    sums = F.pad(accept.cumsum(0), (1, 0))
    ends = sums.index_select(0, first_rows + lengths)
    return (ends - sums.index_select(0, first_rows)).to(torch.int32)


def step_counts(of: Tensor, steps: Tensor, count: int, *, fold: bool = False) -> Tensor:
    """How many of the marked rows are at each place of their request.

    Args:
        of: bool ``[Q]``, the mark.
        steps: int32 ``[Q]``.
        count: number of places; later rows are left out, or with ``fold`` belong to the last one.

    Returns:
        int32 ``[count]``.
    """
    places = steps.clamp_max(count - 1) if fold else steps
    place = torch.arange(count, dtype=steps.dtype, device=steps.device)
    return ((places[:, None] == place) & of[:, None]).sum(0, dtype=torch.int32)


def emitted_stop(
    accepted: Accepted, stops: Tensor, requests: Tensor, first_rows: Tensor, lengths: Tensor
) -> Tensor:
    """Whether a request emits one of its stop tokens.

    Args:
        accepted: of the ``Q`` rows.
        stops: integer ``[R, n]``, stop tokens of each request, -1 for none.
        requests: int32 ``[Q]``.
        first_rows: int32 ``[R]``.
        lengths: int32 ``[R]``.

    Returns:
        bool ``[R]``.
    """
    own = stops.index_select(0, requests)
    hits = ((own == accepted.tokens[:, None]) & (own != -1)).any(-1)
    emitted = accepted.accept | accepted.final
    return accepted_counts(hits & emitted, first_rows, lengths) > 0


def final_rows(first_rows: Tensor, counts: Tensor, total: int) -> Tensor:
    """Final row of each request, int32 ``[R]``; ``counts`` are accepted drafts.

    A request without rows gets an arbitrary one of the ``total`` rows.
    """
    return (first_rows + counts).clamp_max(total - 1)


def accepted_values(values: Tensor, accept: Tensor, fill: float) -> Tensor:
    """Entries of the rows whose draft is emitted, ``fill`` elsewhere: ``[Q, ...]``."""
    mask = accept.view(-1, *[1] * (values.dim() - 1))
    return values.where(mask, fill)


def confidence_error(
    accept_probs: Tensor, confidence: Tensor, verifies: Tensor, order: Order
) -> Tensor:
    """Sum over judged drafts of the distance from predicted to actual acceptance probability.

    Args:
        accept_probs: fp32 ``[Q]``.
        confidence: fp32 ``[Q]``, prediction for the draft of each row.
        verifies: bool ``[Q]``.
        order: who orders the sum.

    Returns:
        fp32 scalar tensor.
    """
    return order.sum((accept_probs - confidence).abs().where(verifies, 0.0))

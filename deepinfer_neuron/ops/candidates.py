"""Candidate blocks: their scores, how many entries they hold, and the way back from them."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def block_scores(logits: Tensor, visible: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Scores of blocks of entries: the largest logit, at most the largest finite number.

    The last block that holds a visible entry scores +inf, so that it is always chosen.

    Args:
        logits: bf16 ``[n, L]``, any row stride.
        visible: int32 ``[n]``, visible entries, the first ones of a row.
        size: entries per block.

    Returns:
        bf16 ``[n, ceil(L/size)]``, meaningless behind the visible blocks, and int32 ``[n]``: the
        number of visible blocks.
    """
    whole = logits.shape[1] // size * size
    # A block that is cut short by the visible length is the last one: no need to mask entries.
    best = logits[:, :whole].unflatten(1, (whole // size, size)).amax(2)
    if whole < logits.shape[1]:
        best = torch.cat((best, logits[:, whole:].amax(1, keepdim=True)), dim=1)
    best = best.clamp_(max=torch.finfo(logits.dtype).max)
    count = visible.add(size - 1).div(size, rounding_mode="floor").clamp(0, best.shape[1])
    block = torch.arange(best.shape[1], device=logits.device)
    return best.masked_fill_(block == count[:, None] - 1, math.inf), count


def candidate_entries(blocks: Tensor, visible: Tensor, size: int) -> Tensor:
    """Visible entries inside the chosen blocks.

    Args:
        blocks: int32 ``[n, b]`` block numbers, negative for none.
        visible: int32 ``[n]``.
        size: entries per block.

    Returns:
        int32 ``[n]``.
    """
    inside = (visible[:, None] - blocks * size).clamp_(0, size)
    return inside.masked_fill_(blocks < 0, 0).sum(1, dtype=torch.int32)


def expand_candidates(compact: Tensor, blocks: Tensor, size: int) -> Tensor:
    """Positions inside the concatenated candidate blocks to entries.

    Args:
        compact: int32 ``[n, t]``; anything outside the blocks gives -1.
        blocks: int32 ``[n, b]`` block numbers, negative for none.
        size: entries per block.

    Returns:
        int32 ``[n, t]``: ``block * size + compact % size``, or -1.
    """
    count = blocks.shape[1] * size
    if count == 0:
        return torch.full_like(compact, -1)
    place = compact.clamp(0, count - 1)
    number = place.div(size, rounding_mode="floor")
    block = blocks.gather(1, number.to(torch.int64))
    entry = (block - number).mul_(size).add_(place)
    return entry.masked_fill_((place != compact) | (block < 0), -1)

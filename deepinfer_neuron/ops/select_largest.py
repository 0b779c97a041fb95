"""The largest entries of every row, lowest index first among equals."""

from __future__ import annotations

import torch
from torch import Tensor

_LAST = 0x7FFFFFFF
_EXCLUDED = -(1 << 63)


def _keys(scores: Tensor) -> Tensor:
    """Distinct int64 keys in the order of ``(score, -index)``; NaN above all, -0 equal to +0."""
    bits = (scores.to(torch.float32) + 0.0).view(torch.int32).to(torch.int64)
    ordered = torch.where(bits < 0, -(bits & _LAST), bits)
    ordered = torch.where(scores.isnan(), _LAST, ordered)
    index = torch.arange(scores.shape[1], device=scores.device)
    return (ordered << 32) + (_LAST - index)


def largest_before(scores: Tensor, ends: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest entries of row ``r`` among its first ``ends[r]``.

    Args:
        scores: bf16 or fp32 ``[n, m]``; what lies at or behind ``ends`` is not looked at.
        ends: integers ``[n]``.
        count: entries wanted.

    Returns:
        int64 ``[n, count]``, ascending, -1 behind the chosen ones.
    """
    rows, width = scores.shape
    index = torch.arange(width, device=scores.device)
    keys = _keys(scores).masked_fill(index >= ends[:, None].to(torch.int64), _EXCLUDED)
    best = keys.topk(min(count, width), dim=1, sorted=False)
    chosen = best.indices.masked_fill(best.values == _EXCLUDED, width).sort(dim=1).values
    found = torch.full((rows, count), -1, dtype=torch.int64, device=scores.device)
    found[:, : chosen.shape[1]] = chosen.masked_fill(chosen == width, -1)
    return found


def largest(scores: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest entries of every row, largest first.

    Args:
        scores: bf16 or fp32 ``[n, m]``, ``m >= count``.
        count: entries wanted.

    Returns:
        int64 ``[n, count]``.
    """
    return _keys(scores).topk(count, dim=1, sorted=True).indices

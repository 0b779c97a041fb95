"""Choosing compressed entries: index scores, top-k, and candidate blocks.

Everywhere a lower index wins among equal scores, and results are ascending with -1 behind them.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_neuron.ops.arithmetic import Arithmetic

_LANES = 4
_WORKSPACE_ELEMENTS = 1 << 24


def index_scores(
    query: Tensor, keys: Tensor, head_weight: Tensor, arithmetic: Arithmetic
) -> Tensor:
    """``sum_h relu(q_h . k) * w_h`` with the rounding recipe that fixes ties.

    Every dot product is rounded to bf16 after the ReLU; head ``h`` adds to the bf16 accumulator
    ``h mod 4`` in ascending order by a fused multiply-add; the accumulators are joined as
    ``(0 + 2) + (1 + 3)``, each sum rounded.

    Args:
        query: ``q4_index`` values ``[..., n, H, D]``.
        keys: ``q4_index`` values ``[..., m, D]``.
        head_weight: activations ``[..., n, H]``.
        arithmetic: order and rounding.

    Returns:
        fp32 ``[..., n, m]`` holding values of the activation dtype.
    """
    heads, per_row = query.shape[-2], math.prod(query.shape[:-3]) * query.shape[-2]
    step = max(1, _WORKSPACE_ELEMENTS // max(1, per_row * keys.shape[-2]))
    if query.shape[-3] > step:
        parts = zip(query.split(step, dim=-3), head_weight.split(step, dim=-2), strict=True)
        return torch.cat([index_scores(q, keys, w, arithmetic) for q, w in parts], dim=-2)
    missing = -heads % _LANES
    dot = arithmetic.order.matmul(query.flatten(-3, -2), keys).relu()
    dot = arithmetic.round(dot).unflatten(-2, (-1, heads))
    # A head of weight zero leaves its accumulator as it is.
    dot, head_weight = F.pad(dot, (0, 0, 0, missing)), F.pad(head_weight, (0, missing))
    lanes = torch.zeros_like(dot[..., :_LANES, :])
    for start in range(0, heads, _LANES):
        part = slice(start, start + _LANES)
        weight = head_weight[..., part, None].to(torch.float32)
        product = dot[..., part, :].to(torch.float32) * weight
        lanes = arithmetic.round(lanes.to(torch.float32) + product)
    wide = lanes.to(torch.float32)
    pairs = arithmetic.round(wide[..., :2, :] + wide[..., 2:, :]).to(torch.float32)
    return arithmetic.round(pairs[..., 0, :] + pairs[..., 1, :]).to(torch.float32)


def top_entries(scores: Tensor, limit: int) -> Tensor:
    """Indices of the largest finite scores per row.

    Args:
        scores: fp32 ``[n, m]``; -inf marks entries that must not be chosen.
        limit: how many at most.

    Returns:
        int64 ``[n, min(limit, m)]``, ascending, -1 behind the chosen ones.
    """
    width = min(limit, scores.shape[1])
    # Unique sortable keys: the score's order-preserving bits above, the reversed index below.
    bits = (scores + 0.0).view(torch.int32).to(torch.int64)
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    index = torch.arange(scores.shape[1], device=scores.device)
    keys = (ordered << 32) + (0x7FFFFFFF - index)
    chosen = keys.topk(width, dim=1, sorted=False).indices
    absent = scores.gather(1, chosen) == -math.inf
    chosen = chosen.masked_fill(absent, scores.shape[1]).sort(dim=1).values
    return chosen.masked_fill(chosen == scores.shape[1], -1)


def first_entries(counts: Tensor, width: int) -> Tensor:
    """All of the first ``counts`` entries: int64 ``[n]`` to ``[n, width]``, -1 behind."""
    index = torch.arange(width, device=counts.device)
    return torch.where(index < counts[:, None], index, -1)


def candidate_blocks(scores: Tensor, visible: Tensor, size: int, limit: int) -> Tensor:
    """The blocks of entries inside which later layers select.

    A block scores as the largest score of its visible entries, at most the largest finite bf16;
    the last visible block always stays.

    Args:
        scores: fp32 ``[n, m]``, -inf where invisible.
        visible: int64 ``[n]``, visible entries per row.
        size: entries per block.
        limit: blocks kept at most.

    Returns:
        int64 block ids ``[n, min(limit, ceil(m/size))]``, ascending, -1 behind.
    """
    padded = F.pad(scores, (0, -scores.shape[1] % size), value=-math.inf)
    best = padded.unflatten(1, (-1, size)).amax(dim=2)
    best = best.clamp(max=torch.finfo(torch.bfloat16).max)
    block = torch.arange(best.shape[1], device=scores.device)
    last = (visible - 1) // size
    return top_entries(best.masked_fill(block == last[:, None], math.inf), limit)


def candidate_mask(blocks: Tensor, size: int, entries: int) -> Tensor:
    """Entries inside the kept blocks: int64 ``[n, b]`` block ids to bool ``[n, entries]``."""
    count = -(-entries // size)
    kept = torch.zeros(blocks.shape[0], count + 1, dtype=torch.bool, device=blocks.device)
    kept.scatter_(1, torch.where(blocks < 0, count, blocks), True)
    return kept[:, :count].repeat_interleave(size, dim=1)[:, :entries]

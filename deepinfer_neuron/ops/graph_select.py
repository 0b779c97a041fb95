"""Selections in the forms a graph compiler takes: fp32 keys, int32 results, no integer sort.

A compiler sorts floating-point numbers only, promises no order among equals, and may compute
integers through fp32. So ranks are found on the scores, ties are broken on keys that are distinct
whole numbers below 2^24, and every index is an fp32 number until it leaves as int32.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_neuron.errors import ConfigError

MOST_ENTRIES = 1 << 23
"""Entries of a row that :func:`top_entries` can tell apart."""

_LARGEST_BF16 = float(torch.finfo(torch.bfloat16).max)


def top_entries(scores: Tensor, limit: int) -> Tensor:
    """Indices of the largest finite scores per row, lower index first among equals.

    The same entries as :func:`deepinfer_neuron.ops.index.top_entries`.

    Args:
        scores: fp32 ``[n, m]`` without NaN; -inf marks entries that must not be chosen.
        limit: how many at most.

    Returns:
        int32 ``[n, min(limit, m)]``, ascending, -1 behind the chosen ones.

    Raises:
        ConfigError: a row has more than ``2^23`` entries.
    """
    entries = scores.shape[1]
    if entries > MOST_ENTRIES:
        raise ConfigError(
            f"rows of {entries} entries cannot be told apart by fp32 keys; use at most "
            f"{MOST_ENTRIES}."
        )
    width = min(limit, entries)
    threshold = scores.topk(width, dim=1).values[:, width - 1 :]
    reversed_index = entries - _numbers(scores)
    # What lies above the threshold outranks every tie; both rank by index among themselves.
    tied = torch.where((scores == threshold) & (scores > -math.inf), reversed_index, 0.0)
    keys = torch.where(scores > threshold, reversed_index + entries, tied)
    best = keys.topk(width, dim=1).values
    lowest_first = torch.where(best > entries, best - entries, best).topk(width, dim=1).values
    return torch.where(lowest_first > 0.0, entries - lowest_first, -1.0).to(torch.int32)


def first_entries(counts: Tensor, width: int) -> Tensor:
    """All of the first ``counts`` entries: int32 ``[n]`` to ``[n, width]``, -1 behind."""
    index = torch.arange(width, dtype=torch.int32, device=counts.device)
    return torch.where(index < counts[:, None], index, -1)


def candidate_blocks(scores: Tensor, visible: Tensor, size: int, limit: int) -> Tensor:
    """The blocks of entries inside which later layers select.

    A block scores as the largest score of its visible entries, at most the largest finite bf16;
    the last visible block always stays.

    Args:
        scores: fp32 ``[n, m]``, -inf where invisible.
        visible: int32 ``[n]``, visible entries per row.
        size: entries per block.
        limit: blocks kept at most.

    Returns:
        int32 block ids ``[n, min(limit, ceil(m/size))]``, ascending, -1 behind.
    """
    padded = F.pad(scores, (0, -scores.shape[1] % size), value=-math.inf)
    best = padded.unflatten(1, (-1, size)).amax(dim=2).clamp(max=_LARGEST_BF16)
    start = torch.arange(best.shape[1], dtype=torch.int32, device=scores.device) * size
    shown = visible[:, None]
    last = (start < shown) & (start + size >= shown)
    return top_entries(torch.where(last, math.inf, best), limit)


def candidate_mask(blocks: Tensor, size: int, entries: int) -> Tensor:
    """Entries inside the kept blocks: int32 ``[n, b]`` block ids to bool ``[n, entries]``."""
    count = -(-entries // size)
    kept = torch.zeros(blocks.shape[0], count + 1, dtype=torch.float32, device=blocks.device)
    # Absent blocks mark a column of their own.
    column = torch.where(blocks < 0, count, blocks).to(torch.int64)
    kept = kept.scatter(1, column, torch.ones_like(blocks, dtype=torch.float32))
    spread = kept[:, :count, None].expand(-1, -1, size)
    return spread.reshape(-1, count * size)[:, :entries] > 0.0


def choose(scores: Tensor, bias: Tensor | None, count: int) -> Tensor:
    """The ``count`` largest ``score + bias`` of every row in descending order.

    Args:
        scores: fp32 ``[n, E]``, finite.
        bias: fp32 ``[E]`` or ``[n, E]``, finite, or ``None``.
        count: experts per row, at most ``E``.

    Returns:
        int32 ``[n, count]``; the lower index first among equals.
    """
    left = scores if bias is None else scores + bias
    index = _numbers(left)
    chosen = []
    for _ in range(count):
        best = _first_largest(left, index)
        chosen.append(best)
        left = torch.where(index == best, -math.inf, left)
    return torch.cat(chosen, dim=1).to(torch.int32)


def shares(scores: Tensor, chosen: Tensor, scaling: float) -> Tensor:
    """``score / (sum of the chosen scores + 1e-20) * scaling``, each step rounded.

    Args:
        scores: fp32 ``[n, E]``, without bias.
        chosen: int32 ``[n, k]``.
        scaling: sum of the result.

    Returns:
        fp32 ``[n, k]``.
    """
    own = selected(scores, chosen)
    return own / (_butterfly(own) + 1e-20)[:, None] * scaling


def selected(values: Tensor, chosen: Tensor) -> Tensor:
    """Values at the chosen columns, by comparison instead of a gather.

    Args:
        values: fp32 ``[n, E]`` without NaN, ``E`` small.
        chosen: int32 ``[n, k]``, each in ``[0, E)``.

    Returns:
        fp32 ``[n, k]``.
    """
    index = torch.arange(values.shape[1], dtype=torch.int32, device=values.device)
    match = chosen[:, :, None] == index
    return torch.where(match, values[:, None, :], -math.inf).amax(dim=2)


def argmax(logits: Tensor) -> Tensor:
    """Lowest id among the largest values of a row: fp32 ``[n, V]`` without NaN to int32 ``[n]``."""
    return _first_largest(logits, _numbers(logits))[:, 0].to(torch.int32)


def _numbers(like: Tensor) -> Tensor:
    """``0 .. m - 1`` as fp32, exact below 2^24."""
    return torch.arange(like.shape[1], dtype=torch.float32, device=like.device)


def _first_largest(values: Tensor, index: Tensor) -> Tensor:
    """fp32 index ``[n, 1]`` of the first of the largest values of ``[n, m]``."""
    largest = values.amax(dim=1, keepdim=True)
    place = torch.where(values == largest, index, float(values.shape[1] - 1))
    return place.amin(dim=1, keepdim=True)


def _butterfly(x: Tensor) -> Tensor:
    """Sum of ``[n, k]`` over ``k``, upper half onto lower half until one column is left."""
    width = 1 << (x.shape[1] - 1).bit_length()
    x = F.pad(x, (0, width - x.shape[1]))
    while width > 1:
        width //= 2
        x = x[:, :width] + x[:, width:]
    return x[:, 0]

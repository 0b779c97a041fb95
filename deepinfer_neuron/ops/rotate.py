"""Rotary embedding of whole vectors, halves or neighbouring pairs, written in place."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_neuron.ops.rope import turn_pairs

_CHUNK_ELEMENTS = 1 << 20
"""Elements turned at once: 8 MiB for each fp64 intermediate."""


def rotate_(x: Tensor, turns: Tensor, *, interleaved: bool, inverse: bool) -> None:
    """Turn every vector: ``y0 = fma(x0, c, -(x1 s))``, ``y1 = fma(x0, s, x1 c)``, one rounding.

    Args:
        x: bf16 or fp32 ``[n, heads, R]``, any strides; written in place.
        turns: fp32 ``[n, R]``: ``R/2`` cosines, then ``R/2`` sines.
        interleaved: a pair is two neighbours; else an element of each half.
        inverse: turn back.
    """
    half = turns.shape[1] // 2
    step = max(1, _CHUNK_ELEMENTS // max(1, x.shape[1] * x.shape[2]))
    for start in range(0, x.shape[0], step):
        rows = slice(start, start + step)
        part = x[rows]
        cos, sin = turns[rows, None, :half], turns[rows, None, half:]
        if inverse:
            sin = -sin
        first = part[..., 0::2] if interleaved else part[..., :half]
        second = part[..., 1::2] if interleaved else part[..., half:]
        turned = turn_pairs(first.to(torch.float32), second.to(torch.float32), cos, sin)
        first.copy_(turned[0])
        second.copy_(turned[1])

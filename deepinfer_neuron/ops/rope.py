"""Rotary position embedding on the last channels, interleaved pairs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_neuron.ops import graph_math
from deepinfer_neuron.ops.arithmetic import Arithmetic

_TABLE_ROWS = 1 << 14
"""Positions computed at once, so that a long table needs little more than itself."""


@dataclass(frozen=True)
class Yarn:
    """Static YaRN interpolation without a magnitude factor."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


def rope_table(length: int, width: int, theta: float, yarn: Yarn | None) -> Tensor:
    """Cosines and sines of every position.

    The angle is the fp32 product of position and frequency: at long contexts its rounding is part
    of the model, so a more precise angle is a wrong one.

    Args:
        length: number of positions.
        width: rotated channels ``R``, even.
        theta: frequency base.
        yarn: interpolation, or ``None`` for plain RoPE.

    Returns:
        fp32 ``[length, R]``: ``R/2`` cosines, then ``R/2`` sines.
    """
    frequency = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    if yarn is not None:
        frequency = _interpolated(frequency, width, theta, yarn)
    table = torch.empty(length, width, dtype=torch.float32)
    for start in range(0, length, _TABLE_ROWS):
        position = torch.arange(start, min(start + _TABLE_ROWS, length), dtype=torch.float32)
        # fp64 functions rounded once do not depend on where an element stands in a vector loop.
        angle = (position[:, None] * frequency).to(torch.float64)
        table[start : start + _TABLE_ROWS] = torch.cat((angle.cos(), angle.sin()), dim=1)
    return table


def _interpolated(frequency: Tensor, width: int, theta: float, yarn: Yarn) -> Tensor:
    def pair(rotations: float) -> float:
        turns = yarn.original_max_position_embeddings / (rotations * 2.0 * math.pi)
        return width * math.log(turns) / (2.0 * math.log(theta))

    low = float(max(math.floor(pair(yarn.beta_fast)), 0))
    high = float(min(math.ceil(pair(yarn.beta_slow)), width - 1))
    if low == high:
        high += 0.001
    index = torch.arange(frequency.numel(), dtype=torch.float32)
    ramp = ((index - low) / (high - low)).clamp(0.0, 1.0)
    return (frequency / yarn.factor) * ramp + frequency * (1.0 - ramp)


def rope(x: Tensor, turns: Tensor, arithmetic: Arithmetic, *, inverse: bool = False) -> Tensor:
    """Rotate the last ``R`` channels, one fused multiply-add per output, one rounding.

    ``y0 = fma(x0, c, -(x1 s))``, ``y1 = fma(x0, s, x1 c)``; ``s`` changes sign for the inverse.

    Args:
        x: activations ``[n, D]`` or ``[n, heads, D]``.
        turns: fp32 ``[n, R]``, rows of :func:`rope_table` at the positions of ``x``.
        arithmetic: rounding of the result.
        inverse: rotate back.

    Returns:
        activation dtype, same shape.
    """
    width = turns.shape[-1]
    cos, sin = turns.split(width // 2, dim=-1)
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    if inverse:
        sin = -sin
    pairs = x[..., -width:].to(torch.float32).unflatten(-1, (-1, 2))
    turn = turn_pairs if arithmetic.wide else graph_math.turn_pairs
    turned = torch.stack(turn(pairs[..., 0], pairs[..., 1], cos, sin), dim=-1).flatten(-2)
    return torch.cat((x[..., :-width], arithmetic.round(turned)), dim=-1)


def turn_pairs(x0: Tensor, x1: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """``fma(x0, c, -(x1 s))`` and ``fma(x0, s, x1 c)`` of fp32 tensors that broadcast, in fp32."""
    # A product of two fp32 numbers is exact in fp64, which makes the sum the fused operation.
    x0, c, s = x0.to(torch.float64), cos.to(torch.float64), sin.to(torch.float64)
    y0 = torch.addcmul((x1 * -sin).to(torch.float64), x0, c)
    y1 = torch.addcmul((x1 * cos).to(torch.float64), x0, s)
    return y0.to(torch.float32), y1.to(torch.float32)

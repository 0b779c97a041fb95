"""Rotations of any channel range, and the Walsh-Hadamard transform."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_neuron.ops.arithmetic import free_arithmetic
from deepinfer_neuron.ops.rope import rope


def rotate(x: Tensor, turns: Tensor, *, start: int, halves: bool, inverse: bool) -> Tensor:
    """Rotate channels ``start`` to ``start + R`` as :func:`deepinfer_neuron.ops.rope.rope` does.

    Args:
        x: bf16 ``[n, D]`` or ``[n, heads, D]``.
        turns: fp32 ``[n, R]``, ``R/2`` cosines and ``R/2`` sines per row.
        start: first rotated channel.
        halves: channel ``i`` turns with channel ``i + R/2`` instead of its neighbour.
        inverse: rotate back.

    Returns:
        bf16, same shape.
    """
    width = turns.shape[-1]
    if not halves and start + width == x.shape[-1]:
        return rope(x, turns, free_arithmetic(), inverse=inverse)
    part = x[..., start : start + width]
    if halves:
        part = part.unflatten(-1, (2, -1)).mT.flatten(-2)
    turned = rope(part, turns, free_arithmetic(), inverse=inverse)
    if halves:
        turned = turned.unflatten(-1, (-1, 2)).mT.flatten(-2)
    return torch.cat((x[..., :start], turned, x[..., start + width :]), dim=-1)


def hadamard(x: Tensor, scale: float) -> Tensor:
    """Walsh-Hadamard transform of the last axis, scaled, rounded once.

    Sums and differences of channels at distance 1, 2, 4, ... in fp32, then one product.

    Args:
        x: bf16 ``[..., D]``, ``D`` a power of two.
        scale: factor of the result.

    Returns:
        bf16, same shape.
    """
    # Channels first, so that every step adds contiguous rows.
    y = x.flatten(0, -2).to(torch.float32).t().contiguous()
    distance = 1
    while distance < y.shape[0]:
        a, b = y.unflatten(0, (-1, 2, distance)).unbind(1)
        y = torch.stack((a + b, a - b), dim=1).flatten(0, 2)
        distance *= 2
    return y.mul_(scale).to(torch.bfloat16).t().reshape(x.shape)

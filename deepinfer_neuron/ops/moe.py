"""Mixture of experts: routing, the experts' activation, and the sum of their outputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_neuron.ops.arithmetic import Arithmetic
from deepinfer_neuron.ops.linear import linear_fp32
from deepinfer_neuron.ops.norm import square_root
from deepinfer_neuron.ops.quant import q8


def route(
    y: Tensor,
    weight: Tensor,
    bias: Tensor,
    top_k: int,
    scaling: float,
    arithmetic: Arithmetic,
) -> tuple[Tensor, Tensor]:
    """Choose experts and their weights.

    ``score = sqrt(softplus(y . w))``; the ``top_k`` largest ``score + bias`` win, ties to the
    smaller index; weights are the unbiased scores over their sum, times ``scaling``.

    Args:
        y: activations ``[n, D]``.
        weight: ``[E, D]``.
        bias: fp32 ``[E]``, selection only.
        top_k: experts per token.
        scaling: factor of the weights.
        arithmetic: order of the reductions.

    Returns:
        int64 experts ``[n, top_k]`` in descending rank, fp32 weights ``[n, top_k]``.
    """
    score = square_root(arithmetic.order.softplus(linear_fp32(y, weight, arithmetic)))
    ranked = torch.sort(score + bias, dim=1, descending=True, stable=True)
    chosen = ranked.indices[:, :top_k]
    share = score.gather(1, chosen)
    return chosen, share / (_butterfly(share) + 1e-20)[:, None] * scaling


def _butterfly(x: Tensor) -> Tensor:
    """Sum of ``[n, k]`` over ``k``, upper half onto lower half until one column is left."""
    width = 1 << (x.shape[1] - 1).bit_length()
    x = F.pad(x, (0, width - x.shape[1]))
    while width > 1:
        width //= 2
        x = x[:, :width] + x[:, width:]
    return x[:, 0]


def swiglu(gate: Tensor, up: Tensor, share: Tensor, limit: float, arithmetic: Arithmetic) -> Tensor:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit) * share``, quantized from fp32.

    Args:
        gate: activations ``[n, F]``.
        up: activations ``[n, F]``.
        share: fp32 ``[n, 1]``, the routing weight: it enters before the quantization.
        limit: clamp; only the upper side of ``gate`` is cut.
        arithmetic: exponential and rounding.

    Returns:
        ``q8`` values ``[n, F]``.
    """
    g = gate.to(torch.float32).clamp(max=limit)
    u = up.to(torch.float32).clamp(-limit, limit)
    return q8(g / (1.0 + arithmetic.order.exp(-g)) * u * share, arithmetic)


def combine(shared: Tensor, routed: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Shared output plus the routed ones in slot order, fp32, one rounding at the end.

    Args:
        shared: activations ``[n, D]``.
        routed: activations ``[n, k, D]``, zeros for absent slots.
        arithmetic: rounding of the sum.

    Returns:
        activation dtype ``[n, D]``.
    """
    total = shared.to(torch.float32)
    for slot in range(routed.shape[1]):
        total = total + routed[:, slot].to(torch.float32)
    return arithmetic.round(total)

"""Mixture of experts: routing, the experts' activation, and the sum of their outputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_neuron.ops import graph_select
from deepinfer_neuron.ops.arithmetic import Arithmetic
from deepinfer_neuron.ops.linear import linear_fp32
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
        experts ``[n, top_k]`` in descending rank, int64 (int32 in graph form), and fp32 weights
        ``[n, top_k]``.
    """
    score = arithmetic.square_root(arithmetic.order.softplus(linear_fp32(y, weight, arithmetic)))
    if arithmetic.graph:
        chosen = graph_select.choose(score, bias, top_k)
        return chosen, graph_select.shares(score, chosen, scaling)
    chosen = choose(score, bias, top_k)
    return chosen, shares(score, chosen, scaling)


def choose(scores: Tensor, bias: Tensor | None, count: int) -> Tensor:
    """The ``count`` largest ``score + bias`` of every row in descending order.

    Args:
        scores: fp32 ``[n, E]``.
        bias: fp32 ``[E]`` or ``[n, E]``, or ``None``.
        count: experts per row.

    Returns:
        int64 ``[n, count]``; the lower index first among equals.
    """
    ranked = scores if bias is None else scores + bias
    return torch.sort(ranked, dim=1, descending=True, stable=True).indices[:, :count]


def shares(scores: Tensor, chosen: Tensor, scaling: float) -> Tensor:
    """``score / (sum of the chosen scores + 1e-20) * scaling``, each step rounded.

    Args:
        scores: fp32 ``[n, E]``, without bias.
        chosen: int64 ``[n, k]``.
        scaling: sum of the result.

    Returns:
        fp32 ``[n, k]``.
    """
    own = scores.gather(1, chosen)
    return own / (_butterfly(own) + 1e-20)[:, None] * scaling


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
    return q8(gated(gate, up, share, limit, arithmetic), arithmetic)


def gated(
    gate: Tensor, up: Tensor, share: Tensor | None, limit: float | None, arithmetic: Arithmetic
) -> Tensor:
    """``g / (1 + e^-g) * u * share`` with ``g`` and ``u`` clamped first, nothing rounded.

    Args:
        gate: ``[n, F]``.
        up: ``[n, F]``.
        share: fp32 ``[n, 1]``, a factor per row, or ``None``.
        limit: cuts gates above and ups on both sides, or ``None``.
        arithmetic: exponential.

    Returns:
        fp32 ``[n, F]``.
    """
    g, u = gate.to(torch.float32), up.to(torch.float32)
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    out = g / (1.0 + arithmetic.order.exp(-g)) * u
    return out if share is None else out * share


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

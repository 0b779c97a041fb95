"""Engram: a gated memory read added to every residual stream."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_neuron.ops.arithmetic import Arithmetic
from deepinfer_neuron.ops.norm import inverse_rms

_SMALLEST_DOT = 1e-6


def engram_update(
    trunk: Tensor,
    kv: Tensor,
    weight: Tensor,
    eps: float,
    arithmetic: Arithmetic,
    floor: float = _SMALLEST_DOT,
) -> Tensor:
    """Add the memory's value to each stream through a gate.

    ``d = <R_m * weight_m, k_m> / (rms(R_m) rms(k_m) sqrt(D))``,
    ``R_m += sigmoid(copysign(sqrt(max(|d|, floor)), d)) * v``.

    Args:
        trunk: activations ``[n, M, D]``.
        kv: activations ``[n, M + 1, D]``: one key per stream, then the shared value.
        weight: fp32 ``[M, D]``, product of the query and key norm weights.
        eps: epsilon of both norms.
        arithmetic: order and rounding.
        floor: least magnitude under the root; the model's is 1e-6.

    Returns:
        activation dtype ``[n, M, D]``.
    """
    streams, width = trunk.shape[1:]
    wide = trunk.to(torch.float32)
    key, value = kv[:, :streams].to(torch.float32), kv[:, streams:].to(torch.float32)
    dot = arithmetic.order.sum(wide * weight * key)
    dot = dot * inverse_rms(wide, eps, arithmetic) * inverse_rms(key, eps, arithmetic)
    dot = dot * width**-0.5
    root = arithmetic.square_root(dot.abs().clamp(min=floor))
    gate = arithmetic.order.sigmoid(torch.copysign(root, dot))
    return arithmetic.round(wide + gate[..., None] * value)

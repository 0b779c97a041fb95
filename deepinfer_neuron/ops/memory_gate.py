"""Adding a memory's value to every stream, with the gate's floor as a parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_neuron.ops.arithmetic import Arithmetic
from deepinfer_neuron.ops.norm import inverse_rms, square_root


def gated_read(
    hidden: Tensor, kv: Tensor, weight: Tensor, eps: float, floor: float, arithmetic: Arithmetic
) -> Tensor:
    """``x + sigmoid(sign(d) sqrt(max(|d|, floor))) v``, a zero ``d`` counting as positive.

    ``d = <x weight, k> / (rms(x) rms(k) sqrt(H))``.

    Args:
        hidden: bf16 ``[n, M, H]``.
        kv: bf16 ``[n, M + 1, H]``: a key per stream, then the value.
        weight: fp32 ``[M, H]``.
        eps: of both norms.
        floor: least magnitude under the root.
        arithmetic: order and rounding.

    Returns:
        activation dtype ``[n, M, H]``.
    """
    streams, width = hidden.shape[1:]
    wide = hidden.to(torch.float32)
    key, value = kv[:, :streams].to(torch.float32), kv[:, streams:].to(torch.float32)
    dot = arithmetic.order.sum(wide * weight * key)
    dot = dot * inverse_rms(wide, eps, arithmetic) * inverse_rms(key, eps, arithmetic)
    dot = dot * width**-0.5
    root = square_root(dot.abs().clamp(min=floor))
    gate = arithmetic.order.sigmoid(torch.where(dot < 0, -root, root))
    return arithmetic.round(wide + gate[..., None] * value)

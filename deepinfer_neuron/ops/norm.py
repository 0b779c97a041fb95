"""RMS normalization."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_neuron.ops.arithmetic import Arithmetic


def inverse_rms(x: Tensor, eps: float, arithmetic: Arithmetic) -> Tensor:
    """``1 / sqrt(mean(x^2) + eps)`` along the last axis: fp32 ``[..., d]`` to fp32 ``[...]``."""
    mean_square = arithmetic.order.sum(x * x) / x.shape[-1]
    return arithmetic.square_root(mean_square + eps).reciprocal()


def rms_norm(x: Tensor, weight: Tensor, eps: float, arithmetic: Arithmetic) -> Tensor:
    """``x * inverse_rms(x) * weight`` in fp32, rounded once after the weight.

    Args:
        x: activations ``[..., d]``.
        weight: bf16 or fp32 ``[d]``.
        eps: 1e-20 in the released models; it must reach the square root unchanged.

    Returns:
        activation dtype ``[..., d]``.
    """
    wide = x.to(torch.float32)
    scaled = wide * inverse_rms(wide, eps, arithmetic)[..., None]
    return arithmetic.round(scaled * weight.to(torch.float32))

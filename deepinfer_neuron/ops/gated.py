"""The gated activation of an expert, in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_neuron.ops.arithmetic import Arithmetic


def gated(x: Tensor, share: Tensor | None, limit: float | None, arithmetic: Arithmetic) -> Tensor:
    """``g / (1 + e^-g) * u * share`` with ``g`` and ``u`` clamped first.

    Args:
        x: bf16 or fp32 ``[n, 2F]``: gates, then ups.
        share: fp32 ``[n]``, a factor per row, or ``None``.
        limit: cuts gates above and ups on both sides, or ``None``.
        arithmetic: exponential.

    Returns:
        fp32 ``[n, F]``.
    """
    gate, up = x.to(torch.float32).chunk(2, dim=1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    out = gate / (1.0 + arithmetic.order.exp(-gate)) * up
    return out if share is None else out * share[:, None]

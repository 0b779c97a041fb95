"""Multi-query attention over gathered keys, with a sink."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_neuron.ops.arithmetic import Arithmetic

_WORKSPACE_ELEMENTS = 1 << 20
"""Gathered keys and logits alive at once on a host: 4 MiB of fp32, which stays in cache."""


def sink_attention(
    query: Tensor,
    near: Tensor,
    near_index: Tensor,
    far: Tensor,
    far_index: Tensor,
    sink: Tensor,
    scale: float,
    arithmetic: Arithmetic,
) -> Tensor:
    """Softmax attention of each row over its window keys and its selected compressed keys.

    With ``m`` the largest of all logits and the sink, ``out = sum exp(l - m) k /
    (sum exp(l - m) + exp(sink - m))``: keys are the values, the sink has no value and no scale.
    A row without keys gives zeros.

    Args:
        query: activations ``[n, H, D]``.
        near: window keys ``[p, D]``.
        near_index: int64 ``[n, W]`` rows of ``near``, valid ones first, -1 behind.
        far: compressed keys ``[q, D]``.
        far_index: int64 ``[n, k]`` rows of ``far``, likewise; ``k`` may be 0.
        sink: fp32 ``[H]``.
        scale: softmax scale.
        arithmetic: order and rounding.

    Returns:
        activation dtype ``[n, H, D]``.
    """
    width = near_index.shape[1] + far_index.shape[1]
    workspace = arithmetic.elements_at_once if arithmetic.graph else _WORKSPACE_ELEMENTS
    step = max(1, workspace // (width * max(query.shape[1], query.shape[2])))
    if query.shape[0] > step:
        parts = zip(query.split(step), near_index.split(step), far_index.split(step), strict=True)
        return torch.cat(
            [sink_attention(q, near, n, far, f, sink, scale, arithmetic) for q, n, f in parts]
        )
    order = arithmetic.order
    sides = []
    top = sink[None, :, None].expand(query.shape[0], -1, 1)
    for keys, index in ((near, near_index), (far, far_index)):
        if index.shape[1] == 0 or keys.shape[0] == 0:
            continue
        # Absent keys borrow row 0: their logit is -inf, so they take no share of it.
        rows = F.embedding(index.clamp(min=0), keys).to(torch.float32)
        logits = order.matmul(query, rows).mul_(scale)
        logits = logits.masked_fill_((index < 0)[:, None, :], -math.inf)
        sides.append((logits, rows))
        top = torch.maximum(top, logits.amax(dim=2, keepdim=True))
    total = torch.zeros_like(top[..., 0])
    value = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    for logits, rows in sides:
        share = order.exp(logits - top)
        total = total + order.sum(share)
        value = value + order.weighted_sum(share, rows)
    total = total + order.exp(sink[None, :] - top[..., 0])
    return arithmetic.round(value / total[..., None])

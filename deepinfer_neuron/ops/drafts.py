"""What the draft heads compute besides matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_neuron.ops.arithmetic import Arithmetic

SATURATION = 60.0
"""Bound of the scaled confidence logit."""


def confidence(
    hidden: Tensor, markov: Tensor, weight: Tensor, temperature: Tensor, arithmetic: Arithmetic
) -> Tensor:
    """Estimated probability that a draft is accepted if all drafts before it are.

    ``1 / (1 + exp(-clamp((hidden . w[:D] + markov . w[D:]) / T, -60, 60)))`` in fp32.

    Args:
        hidden: states before the post norm ``[n, D]``.
        markov: Markov embeddings of the tokens before the drafts ``[n, r]``.
        weight: ``[D + r]``.
        temperature: fp32 scalar of at least 1e-5.
        arithmetic: who orders the sum.

    Returns:
        fp32 ``[n]``.
    """
    joined = torch.cat((hidden, markov), dim=-1).to(torch.float32)
    logit = arithmetic.order.sum(joined * weight.to(torch.float32)) / temperature
    return arithmetic.order.sigmoid(logit.clamp(-SATURATION, SATURATION))

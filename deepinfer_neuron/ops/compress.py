"""Pooling of two neighbouring tokens into one compressed entry."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_neuron.ops.arithmetic import Arithmetic


def pool_pairs(first: Tensor, second: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Mix the values of two tokens by a channel-wise softmax of their scores.

    Args:
        first: fp32 ``[e, 2, D]``: score and value of the earlier token.
        second: the same of the later token.
        arithmetic: exponential and rounding.

    Returns:
        activation dtype ``[e, D]``.
    """
    scores = torch.stack((first[:, 0], second[:, 0]))
    share = arithmetic.order.exp(scores - scores.amax(dim=0))
    total = share[0] + share[1]
    return arithmetic.round(first[:, 1] * (share[0] / total) + second[:, 1] * (share[1] / total))

"""The few operations whose result depends on how a machine orders its arithmetic.

Everything else in the network is element by element and therefore has one result. The plain
version below lets torch choose the order; a caller who needs bitwise comparisons passes an
object with the same methods and a fixed order.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Primitives(Protocol):
    """Reductions and transcendental functions on fp32 tensors, with fp32 results."""

    def matmul(self, x: Tensor, w: Tensor) -> Tensor:
        """``[..., M, K] x [..., N, K] -> [..., M, N]``, contracting the last axes."""

    def matmul_wide(self, x: Tensor, w: Tensor) -> Tensor:
        """``[M, K] x [N, K] -> [M, N]`` for operands that use all bits of an fp32."""

    def sum(self, x: Tensor) -> Tensor:
        """``[..., K] -> [...]``."""

    def weighted_sum(self, weights: Tensor, values: Tensor) -> Tensor:
        """``[..., H, L] x [..., L, D] -> [..., H, D]``, summed over the ``L`` keys."""

    def exp(self, x: Tensor) -> Tensor:
        """Exponential."""

    def sigmoid(self, x: Tensor) -> Tensor:
        """``1 / (1 + exp(-x))``."""

    def softplus(self, x: Tensor) -> Tensor:
        """``log(1 + exp(x))``, and ``x`` itself above 20."""


class PlainPrimitives:
    """Whatever torch does. See :class:`Primitives` for the shapes."""

    def matmul(self, x: Tensor, w: Tensor) -> Tensor:
        """Matrix product with torch's summation order."""
        return x @ w.transpose(-1, -2)

    def matmul_wide(self, x: Tensor, w: Tensor) -> Tensor:
        """The same."""
        return x @ w.t()

    def sum(self, x: Tensor) -> Tensor:
        """Sum of the last axis with torch's summation order."""
        return x.sum(-1)

    def weighted_sum(self, weights: Tensor, values: Tensor) -> Tensor:
        """Weighted sum of the keys with torch's summation order."""
        return weights @ values

    def exp(self, x: Tensor) -> Tensor:
        """Torch's exponential."""
        return torch.exp(x)

    def sigmoid(self, x: Tensor) -> Tensor:
        """Torch's sigmoid."""
        return torch.sigmoid(x)

    def softplus(self, x: Tensor) -> Tensor:
        """Torch's softplus with threshold 20."""
        return torch.where(x > 20, x, torch.log1p(torch.exp(x)))

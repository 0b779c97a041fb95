"""The two choices every operator shares: who orders a reduction, and whether values round.

*Free order* hands matrix products and sums to torch, which is fast and whose last bit may depend
on how many rows share the call. *Fixed order* computes every row by the same sequence of
correctly rounded operations, whatever else is in the batch, so a request's result does not
depend on its neighbours, on chunking, on the number of threads or on the BLAS in use:

* a product is cut into blocks of 32 along the contracted axis; a block is summed in fp64, where
  products of e4m3 and e2m1 values are exact in any order (bf16 operands too, unless the non-zero
  products of one block span more than 2^32), and the blocks are joined pairwise;
* a product with an fp32 factor (the hyper-connection mixers, the attention probabilities) is
  formed element by element and joined pairwise;
* a sum joins neighbours pairwise: ``(x0 + x1) + (x2 + x3)``. Zeros appended at the end change
  nothing, so padded and exact lists agree;
* exponentials, logarithms and square roots are evaluated in fp64 and rounded once, so that the
  last bit of a library function, which may differ between the body and the tail of a vector loop,
  cannot be seen (except with a probability around 2^-29 for each evaluation).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 32
"""Width of a block that a fixed-order product sums exactly."""

_WORKSPACE_BYTES = 1 << 26
"""Upper bound of the fp64 partial sums alive at once in a fixed-order product."""

_FEW = 8
"""Rows that are added one by one instead of in slices."""


class Order(Protocol):
    """Reductions and transcendental functions; fp32 results, see the two implementations."""

    def matmul(self, x: Tensor, w: Tensor) -> Tensor:
        """``[..., M, K] x [..., N, K] -> [..., M, N]`` fp32, contracting the last axes."""

    def matmul_wide(self, x: Tensor, w: Tensor) -> Tensor:
        """``[M, K] x [N, K] -> [M, N]`` fp32 for operands that use all 24 bits of an fp32."""

    def linear(self, x: Tensor, w: Tensor) -> Tensor:
        """``[M, K] x [N, K] -> [M, N]`` rounded once to the dtype of ``x``."""

    def sum(self, x: Tensor) -> Tensor:
        """Sum of the last axis: fp32 ``[..., K] -> [...]``."""

    def weighted_sum(self, weights: Tensor, values: Tensor) -> Tensor:
        """fp32 ``[..., H, L] x [..., L, D] -> [..., H, D]``, summed over ``L``."""

    def exp(self, x: Tensor) -> Tensor:
        """Exponential of fp32 values."""

    def sigmoid(self, x: Tensor) -> Tensor:
        """``1 / (1 + exp(-x))`` of fp32 values."""

    def softplus(self, x: Tensor) -> Tensor:
        """``log(1 + exp(x))`` of fp32 values, and ``x`` itself above 20."""


class FreeOrder:
    """Torch's own kernels."""

    def matmul(self, x: Tensor, w: Tensor) -> Tensor:
        """fp32 product of bf16 or fp32 operands."""
        return torch.matmul(x.to(torch.float32), w.to(torch.float32).transpose(-1, -2))

    def matmul_wide(self, x: Tensor, w: Tensor) -> Tensor:
        """fp32 product."""
        return torch.matmul(x, w.t())

    def linear(self, x: Tensor, w: Tensor) -> Tensor:
        """bf16 x bf16 products are accumulated in fp32 and rounded once by the kernel."""
        return F.linear(x, w.to(x.dtype))

    def sum(self, x: Tensor) -> Tensor:
        """Sum of the last axis."""
        return x.sum(-1)

    def weighted_sum(self, weights: Tensor, values: Tensor) -> Tensor:
        """Matrix product over the keys."""
        return torch.matmul(weights, values)

    def exp(self, x: Tensor) -> Tensor:
        """Torch's exponential."""
        return torch.exp(x)

    def sigmoid(self, x: Tensor) -> Tensor:
        """Torch's sigmoid."""
        return torch.sigmoid(x)

    def softplus(self, x: Tensor) -> Tensor:
        """Torch's softplus, threshold 20."""
        return F.softplus(x, threshold=20.0)


class FixedOrder:
    """Row-independent arithmetic; the module's docstring gives the order."""

    def matmul(self, x: Tensor, w: Tensor) -> Tensor:
        """fp32 product of bf16 or fp32 operands, blocks of 32 exact in fp64."""
        contracted = x.shape[-1]
        blocks = max(1, -(-contracted // BLOCK))
        tall, wide = x.shape[-2], w.shape[-2]
        batch = torch.broadcast_shapes(x.shape[:-2], w.shape[:-2])
        per_row = blocks * wide * 8
        if not batch and tall * per_row > _WORKSPACE_BYTES:
            step = max(1, _WORKSPACE_BYTES // per_row)
            return torch.cat([self.matmul(part, w) for part in x.split(step)])
        if batch and math.prod(batch) > 1 and math.prod(batch) * tall * per_row > _WORKSPACE_BYTES:
            x, w = x.expand(*batch, *x.shape[-2:]), w.expand(*batch, *w.shape[-2:])
            return torch.stack([self.matmul(a, b) for a, b in zip(x, w, strict=True)])
        left, right = _blocks(x, blocks), _blocks(w, blocks)
        partial = torch.matmul(left, right.transpose(-1, -2))
        return pairwise_sum(partial.movedim(-3, 0)).to(torch.float32)

    def matmul_wide(self, x: Tensor, w: Tensor) -> Tensor:
        """Products element by element in fp32, joined pairwise: too wide for exact blocks."""
        step = max(1, _WORKSPACE_BYTES // max(1, 4 * w.numel()))
        columns = w.t()[:, None, :]
        return torch.cat([pairwise_sum(rows.t()[:, :, None] * columns) for rows in x.split(step)])

    def linear(self, x: Tensor, w: Tensor) -> Tensor:
        """The block product, rounded to the dtype of ``x``."""
        return self.matmul(x, w).to(x.dtype)

    def sum(self, x: Tensor) -> Tensor:
        """Pairwise sum of neighbours."""
        return pairwise_sum(x.movedim(-1, 0))

    def weighted_sum(self, weights: Tensor, values: Tensor) -> Tensor:
        """fp32 products joined pairwise over the keys; bounded batch rows at a time."""
        if weights.dim() > 2:
            per_row = 4 * weights.shape[-1] * weights.shape[-2] * values.shape[-1]
            step = max(1, _WORKSPACE_BYTES // max(1, per_row))
            if weights.shape[0] > step:
                pairs = zip(weights.split(step), values.split(step), strict=True)
                return torch.cat([self.weighted_sum(w, v) for w, v in pairs])
        keys = values.movedim(-2, 0)
        return pairwise_sum(weights.movedim(-1, 0)[..., None] * keys[..., None, :])

    def exp(self, x: Tensor) -> Tensor:
        """Exponential in fp64, rounded once."""
        return x.to(torch.float64).exp().to(torch.float32)

    def sigmoid(self, x: Tensor) -> Tensor:
        """``1 / (1 + exp(-x))`` in fp64, rounded once."""
        return (1.0 + (-x.to(torch.float64)).exp()).reciprocal().to(torch.float32)

    def softplus(self, x: Tensor) -> Tensor:
        """``log(1 + exp(x))`` in fp64, rounded once; ``x`` itself above 20."""
        return torch.where(x > 20, x, x.to(torch.float64).exp().log1p().to(torch.float32))


def _blocks(x: Tensor, blocks: int) -> Tensor:
    """``[..., M, K]`` to fp64 ``[..., blocks, M, 32]``, zeros behind ``K``."""
    wide = x.to(torch.float64)
    if x.shape[-1] != blocks * BLOCK:
        wide = F.pad(wide, (0, blocks * BLOCK - x.shape[-1]))
    blocked: Tensor = wide.unflatten(-1, (blocks, BLOCK))
    return blocked.transpose(-2, -3)


def pairwise_sum(x: Tensor) -> Tensor:
    """Sum of the first axis, neighbours first: ``(x0 + x1) + (x2 + x3)``.

    Zeros behind the last row do not change the result. Works on any dtype; an empty axis gives 0.
    """
    if x.shape[0] == 0:
        return x.new_zeros(x.shape[1:])
    while x.shape[0] > _FEW:
        paired = x[: x.shape[0] // 2 * 2]
        last = x[paired.shape[0] :]
        x = paired[0::2] + paired[1::2]
        if last.shape[0]:
            x = torch.cat((x, last))
    rows = list(x.unbind())
    while len(rows) > 1:
        last_row = rows[len(rows) // 2 * 2 :]
        rows = [a + b for a, b in zip(rows[0::2], rows[1::2], strict=False)] + last_row
    # A single -0 would differ from -0 + 0 of a padded list.
    return rows[0] + 0.0


def square_root(x: Tensor) -> Tensor:
    """Correctly rounded fp32 square root; torch's own may be off by the last bit."""
    return x.to(torch.float64).sqrt().to(torch.float32)


def fused_multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` of fp32 tensors with one rounding (their product is exact in fp64)."""
    wide = torch.addcmul(c.to(torch.float64), a.to(torch.float64), b.to(torch.float64))
    return wide.to(torch.float32)


@dataclass(frozen=True)
class Arithmetic:
    """How the engine computes.

    Attributes:
        order: who orders the reductions.
        rounding: ``False`` leaves out every bf16, fp8 and fp4 rounding (caches hold fp32 then);
            it exists to compare meaning without rounding noise and is no way to serve.
        graph: use the forms of selections and number formats that a graph compiler takes; they are
            bit-identical.
        wide: 64-bit floats exist. Without them square roots and fused multiply-adds are plain
            fp32 and may differ in the last bit.
    """

    order: Order
    rounding: bool = True
    graph: bool = False
    wide: bool = True

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations between operators."""
        return torch.bfloat16 if self.rounding else torch.float32

    @property
    def elements_at_once(self) -> int:
        """Bound of what is decoded or gathered at once: a few MiB stay in a core's cache; 2^25
        elements are what a device's memory pool still finds in one piece."""
        return 1 << 25 if self.graph else 1 << 20

    def square_root(self, x: Tensor) -> Tensor:
        """fp32 square root, correctly rounded where 64-bit arithmetic exists."""
        return square_root(x) if self.wide else x.sqrt()

    def fused(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """fp32 ``a * b + c``, rounded once where 64-bit arithmetic exists."""
        return fused_multiply_add(a, b, c) if self.wide else a * b + c

    def round(self, x: Tensor) -> Tensor:
        """fp32 to the activation dtype: one round-to-nearest-even, or nothing."""
        return x.to(self.dtype)


def free_arithmetic() -> Arithmetic:
    """The default: torch's kernels, every rounding point."""
    return Arithmetic(FreeOrder())


def graph_arithmetic() -> Arithmetic:
    """Forms for graph compilers without 64-bit floats, reductions ordered by the compiler."""
    return Arithmetic(FreeOrder(), graph=True, wide=False)


def fixed_arithmetic() -> Arithmetic:
    """Row-independent: what ``DEEPINFER_BATCH_INVARIANT=1`` uses."""
    return Arithmetic(FixedOrder())

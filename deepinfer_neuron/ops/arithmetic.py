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
* exponentials and logarithms are evaluated with additions and multiplications only, because
  vectorized library code may differ from its scalar tail.
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

_LN2_HIGH = float.fromhex("0x1.62e42feep-1")
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")


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
        """Exponential, accurate to the last fp32 bit."""
        return exp64(x.to(torch.float64)).to(torch.float32)

    def sigmoid(self, x: Tensor) -> Tensor:
        """``1 / (1 + exp(-x))`` in fp64, rounded once."""
        return (1.0 + exp64(-x.to(torch.float64))).reciprocal().to(torch.float32)

    def softplus(self, x: Tensor) -> Tensor:
        """``log(1 + exp(x))`` in fp64, rounded once; ``x`` itself above 20."""
        return torch.where(x > 20, x, log1p64(exp64(x.to(torch.float64))).to(torch.float32))


def _blocks(x: Tensor, blocks: int) -> Tensor:
    """``[..., M, K]`` to fp64 ``[..., blocks, M, 32]``, zeros behind ``K``."""
    wide = F.pad(x.to(torch.float64), (0, blocks * BLOCK - x.shape[-1]))
    blocked: Tensor = wide.unflatten(-1, (blocks, BLOCK))
    return blocked.transpose(-2, -3)


def pairwise_sum(x: Tensor) -> Tensor:
    """Sum of the first axis, neighbours first: ``(x0 + x1) + (x2 + x3)``.

    Zeros behind the last row do not change the result. Works on any dtype; an empty axis gives 0.
    """
    if x.shape[0] == 0:
        return x.new_zeros(x.shape[1:])
    while x.shape[0] > 1:
        paired = x[0 : x.shape[0] // 2 * 2]
        last = x[paired.shape[0] :]
        x = paired[0::2] + paired[1::2]
        if last.shape[0]:
            x = torch.cat((x, last))
    # A single -0 would differ from -0 + 0 of a padded list.
    total: Tensor = x[0] + 0.0
    return total


def exp64(x: Tensor) -> Tensor:
    """``exp(x)`` of fp64 values from additions, multiplications and a power of two.

    ``x = n ln 2 + r``, Taylor series of degree 13 on ``|r| <= ln(2) / 2``. Overflows to infinity
    above 709 and gives zero below -708.
    """
    limited = x.clamp(-708.0, 709.0)
    n = torch.round(limited * (1.0 / math.log(2.0)))
    r = limited - n * _LN2_HIGH - n * _LN2_LOW
    result = torch.full_like(r, 1.0 / math.factorial(13))
    for degree in range(12, -1, -1):
        result = result * r + 1.0 / math.factorial(degree)
    power = ((n.to(torch.int64) + 1023) << 52).view(torch.float64)
    result = result * power
    result = torch.where(x > 709.0, math.inf, result)
    return torch.where(x < -708.0, 0.0, result)


def log1p64(e: Tensor) -> Tensor:
    """``log(1 + e)`` of fp64 ``e >= 0`` from elementary operations.

    ``log(1 + e) = log(u) e / (u - 1)`` with ``u`` the rounded sum restores the bits that the sum
    loses; ``log(u)`` by the series of ``2 artanh((m - 1) / (m + 1))`` on the mantissa.
    """
    u = 1.0 + e
    mantissa, exponent = torch.frexp(u)
    low = mantissa < math.sqrt(0.5)
    mantissa = torch.where(low, mantissa * 2.0, mantissa)
    exponent = torch.where(low, exponent - 1, exponent).to(torch.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = torch.full_like(s, 1.0 / 23.0)
    for odd in range(21, 0, -2):
        series = series * square + 1.0 / odd
    log = exponent * _LN2_HIGH + (exponent * _LN2_LOW + 2.0 * s * series)
    gap = u - 1.0
    return torch.where(gap == 0.0, e, log * (e / torch.where(gap == 0.0, 1.0, gap)))


@dataclass(frozen=True)
class Arithmetic:
    """How the engine computes.

    Attributes:
        order: who orders the reductions.
        rounding: ``False`` leaves out every bf16, fp8 and fp4 rounding (caches hold fp32 then);
            it exists to compare meaning without rounding noise and is no way to serve.
    """

    order: Order
    rounding: bool = True

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations between operators."""
        return torch.bfloat16 if self.rounding else torch.float32

    def round(self, x: Tensor) -> Tensor:
        """fp32 to the activation dtype: one round-to-nearest-even, or nothing."""
        return x.to(self.dtype)


def free_arithmetic() -> Arithmetic:
    """The default: torch's kernels, every rounding point."""
    return Arithmetic(FreeOrder())


def fixed_arithmetic() -> Arithmetic:
    """Row-independent: what ``DEEPINFER_BATCH_INVARIANT=1`` uses."""
    return Arithmetic(FixedOrder())

"""Matrix products ``A B^T`` with quantized or bf16 operands, one or many weight matrices.

``D = round(C + A B^T)``: fp32 accumulation, one rounding to the type of ``D``. A weight is decoded
in bounded runs of its rows, used and dropped; the contracted axis is never split. Codes times
powers of two are exact in fp32, so decoding a weight in runs or whole gives the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops.arithmetic import Arithmetic
from deepinfer_neuron.ops.group_cast import code_values
from deepinfer_neuron.ops.scale_layout import scale_values

CHUNK_BYTES = 1 << 24
"""Bound of the decoded weights alive at once: 16 MiB, 4 Mi fp32 numbers."""

_ROWS = 32
"""Rows of a run are a multiple of this, so that only the last run is ragged."""


@dataclass(frozen=True)
class Operand:
    """A matrix as it is stored.

    Attributes:
        codes: e4m3, bf16 or fp32 ``[..., R, K]``, or int8 ``[..., R, K/2]`` of packed e2m1.
        scale: one scale per row and ``group`` columns in any layout of ``ops.scale_layout``,
            ``[..., R, words]``; ``None`` for an operand without scales.
        group: columns that share a scale.
    """

    codes: Tensor
    scale: Tensor | None = None
    group: int = 32

    @property
    def rows(self) -> int:
        """``R``."""
        return self.codes.shape[-2]

    @property
    def columns(self) -> int:
        """``K``."""
        return self.codes.shape[-1] * (2 if self.codes.dtype == torch.int8 else 1)

    def __getitem__(self, index: int | slice) -> Operand:
        """The same rows, or the same matrix, of codes and scales."""
        scale = None if self.scale is None else self.scale[index]
        return Operand(self.codes[index], scale, self.group)

    def values(self) -> Tensor:
        """fp32 ``[..., R, K]``, exact."""
        values = code_values(self.codes)
        if self.scale is None:
            return values
        groups = -(-self.columns // self.group)
        factor = scale_values(self.scale, groups)
        if self.columns % self.group:
            return values * factor.repeat_interleave(self.group, dim=-1)[..., : self.columns]
        grouped = values.view(*values.shape[:-1], groups, self.group)
        return (grouped * factor[..., None]).flatten(-2)


def gemm(
    a: Operand,
    b: Operand,
    out: Tensor,
    accumulator: Tensor | None,
    arithmetic: Arithmetic,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """``out = round(accumulator + a b^T)``.

    Args:
        a: ``[M, K]``.
        b: ``[N, K]``.
        out: bf16 or fp32 ``[M, N]``, rows of any stride; written in place.
        accumulator: type and shape of ``out``, which it may be; or ``None``.
        arithmetic: order of the sums.
        chunk_bytes: bound of the decoded rows of ``b`` alive at once.
    """
    if out.numel() == 0:
        return
    left = a.values()
    step = max(_ROWS, chunk_bytes // (4 * max(1, b.columns)) // _ROWS * _ROWS)
    for start in range(0, b.rows, step):
        part = slice(start, min(start + step, b.rows))
        product = arithmetic.order.matmul(left, b[part].values())
        if accumulator is not None:
            product = accumulator[:, part].to(torch.float32) + product
        out[:, part] = product.to(out.dtype)


def expert_rows(ends: Tensor, alignment: int, rows: int) -> list[slice]:
    """The rows of every expert.

    Expert ``e`` owns ``[start, ends[e])`` where ``start`` is the end of the expert before, rounded
    up to ``alignment``; what lies between is padding.

    Args:
        ends: int32 ``[E]``.
        alignment: rows to which starts are rounded up.
        rows: rows there are.

    Raises:
        ConfigError: an expert ends before the one before it, or behind the last row.
    """
    parts, before = [], 0
    for expert, end in enumerate(ends.tolist()):
        start = -(-before // alignment) * alignment
        if end < before or (end > start and end > rows):
            raise ConfigError(
                f"expert {expert} ends at row {end}; the expert before ends at {before} and there "
                f"are {rows} rows, give ascending ends within the rows."
            )
        parts.append(slice(start, max(start, end)))
        before = end
    return parts


def grouped_gemm(
    a: Operand, b: Operand, out: Tensor, parts: list[slice], arithmetic: Arithmetic
) -> None:
    """Each expert's rows times its own weight; other rows of ``out`` are left untouched.

    Args:
        a: ``[M, K]``; padding rows are not read.
        b: ``[E, N, K]``.
        out: bf16 or fp32 ``[M, N]``, written in place.
        parts: rows of every expert.
        arithmetic: order of the sums.
    """
    for expert, part in enumerate(parts):
        if part.start < part.stop:
            gemm(a[part], b[expert], out[part], None, arithmetic)


def masked_gemm(a: Operand, b: Operand, out: Tensor, counts: Tensor, order: Arithmetic) -> None:
    """The first ``counts[e]`` rows of each expert times its weight; other rows stay untouched.

    Args:
        a: ``[E, M, K]``.
        b: ``[E, N, K]``.
        out: bf16 or fp32 ``[E, M, N]``, written in place.
        counts: int32 ``[E]``.
        order: order of the sums.
    """
    for expert, count in enumerate(counts.tolist()):
        if count > 0:
            gemm(a[expert][:count], b[expert], out[expert, :count], None, order)


def split_projection(
    x: Tensor, fn: Tensor, products: Tensor, squares: Tensor, arithmetic: Arithmetic
) -> None:
    """Partial sums of ``x fn^T`` and of ``x^2`` over equal parts of the contracted axis.

    Args:
        x: bf16 ``[T, K]``.
        fn: fp32 ``[M, K]``.
        products: fp32 ``[S, T, M]``, written in place.
        squares: fp32 ``[S, T]``, written in place.
        arithmetic: order of the sums.
    """
    splits = products.shape[0]
    width = -(-x.shape[1] // splits)
    for split in range(splits):
        part = slice(split * width, (split + 1) * width)
        wide = x[:, part].to(torch.float32)
        products[split] = arithmetic.order.matmul_wide(wide, fn[:, part])
        squares[split] = arithmetic.order.sum(wide * wide)

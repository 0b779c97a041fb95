"""Dense and grouped products ``D = round(C + A B^T)``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer_neuron.compat.vendor.knobs import KNOBS
from deepinfer_neuron.compat.vendor.operands import (
    Scaled,
    arithmetic,
    check_product,
    operand,
    require,
    shape,
)
from deepinfer_neuron.ops.group_cast import cast_blocks
from deepinfer_neuron.ops.grouped_gemm import (
    Operand,
    expert_rows,
    gemm,
    grouped_gemm,
    masked_gemm,
    split_projection,
)
from deepinfer_neuron.ops.scale_layout import pack_exponents, scale_exponents


def _group(name: str, recipe: Sequence[int]) -> int:
    """Columns per scale of a recipe whose rows have their own scales."""
    require(
        all(rows == 1 for rows in recipe[:-1]),
        f"{name}: recipe is {tuple(recipe)}; scales of several rows must be spread first, see "
        "transform_sf_into_required_layout.",
    )
    return recipe[-1]


def bf16_gemm_nt(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None) -> None:
    """``d = round(c + a b^T)``.

    Args:
        a: bf16 ``[m, k]``.
        b: bf16 ``[n, k]``.
        d: bf16 or fp32 ``[m, n]``, rows may be strided; written in place.
        c: type and shape of ``d``, which it may be.
    """
    left, right = operand(a), operand(b)
    check_product("bf16_gemm_nt", left, right, d, c)
    gemm(left, right, d, c, arithmetic())


def cublaslt_gemm_nt(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None = None) -> None:
    """As :func:`bf16_gemm_nt`, for any shapes and for fp32 operands too."""
    left, right = operand(a), operand(b)
    check_product("cublaslt_gemm_nt", left, right, d, c)
    gemm(left, right, d, c, arithmetic())


def fp8_fp4_gemm_nt(
    a: Scaled,
    b: Scaled,
    d: Tensor,
    c: Tensor | None = None,
    recipe: tuple[int, int, int] = (1, 1, 32),
) -> None:
    """``d = round(c + a b^T)`` of quantized operands.

    Args:
        a: e4m3 ``[m, k]`` and its scales ``[m, words]``, any strides.
        b: e4m3 ``[n, k]`` or int8 ``[n, k/2]``, and its scales ``[n, words]``.
        d: bf16 or fp32 ``[m, n]``, rows may be strided; written in place.
        c: type and shape of ``d``, which it may be.
        recipe: rows of ``a``, rows of ``b`` and columns that share a scale; rows are 1.
    """
    group = _group("fp8_fp4_gemm_nt", recipe)
    left, right = operand(a, group), operand(b, group)
    check_product("fp8_fp4_gemm_nt", left, right, d, c)
    gemm(left, right, d, c, arithmetic())


def _contiguous(
    name: str, a: Operand, b: Operand, d: Tensor, psum: Tensor, use_psum_layout: bool
) -> None:
    require(
        use_psum_layout,
        f"{name}: use_psum_layout=False is not supported; give the end of every expert's rows.",
    )
    require(
        psum.shape == (b.codes.shape[0],),
        f"{name}: psum is {shape(psum)} for {b.codes.shape[0]} experts; give one end each.",
    )
    check_product(name, a, b, d)
    grouped_gemm(a, b, d, expert_rows(psum, KNOBS.row_alignment, a.rows), arithmetic())


def m_grouped_fp8_fp4_gemm_nt_contiguous(
    a: Scaled,
    b: Scaled,
    d: Tensor,
    psum: Tensor,
    recipe_a: tuple[int, int] = (1, 32),
    recipe_b: tuple[int, int] = (1, 32),
    use_psum_layout: bool = True,
    expected_m_for_psum_layout: int | None = None,
    ensure_zero_padding: bool = True,
) -> None:
    """Rows sorted by expert, each expert's rows times its own weight.

    Expert ``e`` owns the rows from ``psum[e - 1]``, rounded up to the alignment that is set, to
    ``psum[e]``. Rows between are padding: they are not read and their output is left untouched.

    Args:
        a: e4m3 ``[M, k]`` and scales ``[M, words]``.
        b: e4m3 ``[E, n, k]`` or int8 ``[E, n, k/2]``, and scales ``[E, n, words]``.
        d: bf16 ``[M, n]``, written in place.
        psum: int32 ``[E]``.
        recipe_a: rows and columns of ``a`` that share a scale.
        recipe_b: the same of ``b``.
        use_psum_layout: only ``True``.
        expected_m_for_psum_layout: has no effect.
        ensure_zero_padding: has no effect.
    """
    name = "m_grouped_fp8_fp4_gemm_nt_contiguous"
    left, right = operand(a, _group(name, recipe_a)), operand(b, _group(name, recipe_b))
    _contiguous(name, left, right, d, psum, use_psum_layout)


def m_grouped_bf16_gemm_nt_contiguous(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    psum: Tensor,
    use_psum_layout: bool = True,
    expected_m_for_psum_layout: int | None = None,
    ensure_zero_padding: bool = True,
) -> None:
    """As :func:`m_grouped_fp8_fp4_gemm_nt_contiguous` with bf16 ``[M, k]`` and ``[E, n, k]``."""
    name = "m_grouped_bf16_gemm_nt_contiguous"
    _contiguous(name, operand(a), operand(b), d, psum, use_psum_layout)


def _masked(name: str, a: Operand, b: Operand, d: Tensor, masked_m: Tensor) -> None:
    experts = b.codes.shape[0]
    require(
        a.codes.shape[0] == experts == d.shape[0] and masked_m.shape == (experts,),
        f"{name}: a is {shape(a.codes)}, d is {shape(d)} and masked_m is {shape(masked_m)} for "
        f"{experts} experts; give one matrix and one count each.",
    )
    check_product(name, a, b, d)
    counts = masked_m.tolist()
    require(
        all(0 <= count <= a.rows for count in counts),
        f"{name}: masked_m is {counts[:8]}, an expert has {a.rows} rows; give counts within them.",
    )
    masked_gemm(a, b, d, masked_m, arithmetic())


def m_grouped_fp8_fp4_gemm_nt_masked(
    a: Scaled,
    b: Scaled,
    d: Tensor,
    masked_m: Tensor,
    expected_m: int | None = None,
    recipe_a: tuple[int, int] = (1, 32),
    recipe_b: tuple[int, int] = (1, 32),
) -> None:
    """The first ``masked_m[e]`` rows of every expert times its weight.

    Args:
        a: e4m3 ``[E, M, k]`` and scales ``[E, M, words]``.
        b: e4m3 ``[E, n, k]`` or int8 ``[E, n, k/2]``, and scales ``[E, n, words]``.
        d: bf16 ``[E, M, n]``; rows behind the count are left untouched.
        masked_m: int32 ``[E]``.
        expected_m: has no effect.
        recipe_a: rows and columns of ``a`` that share a scale.
        recipe_b: the same of ``b``.
    """
    name = "m_grouped_fp8_fp4_gemm_nt_masked"
    left, right = operand(a, _group(name, recipe_a)), operand(b, _group(name, recipe_b))
    _masked(name, left, right, d, masked_m)


def m_grouped_bf16_gemm_nt_masked(
    a: Tensor, b: Tensor, d: Tensor, masked_m: Tensor, expected_m: int | None = None
) -> None:
    """As :func:`m_grouped_fp8_fp4_gemm_nt_masked` with bf16 ``[E, M, k]`` and ``[E, n, k]``."""
    _masked("m_grouped_bf16_gemm_nt_masked", operand(a), operand(b), d, masked_m)


def fp8_einsum(
    expr: str,
    a: Scaled,
    b: Scaled,
    out: Tensor | Scaled,
    recipe: tuple[int, int, int] = (1, 1, 32),
) -> None:
    """One product per head.

    Args:
        expr: only ``"bhr,hdr->bhd"``.
        a: e4m3 ``[b, h, r]`` and scales ``[b, h, words]``, any strides.
        b: e4m3 ``[h, d, r]`` or int8 ``[h, d, r/2]``, and scales ``[h, d, words]``.
        out: bf16 or fp32 ``[b, h, d]``; or e4m3 ``[b, h, d]`` and packed scales
            ``[b, h d / 32 / n]``, to which the fp32 result is quantized in groups of 32 with
            power-of-two scales. Written in place.
        recipe: see :func:`fp8_fp4_gemm_nt`.
    """
    require(expr == "bhr,hdr->bhd", f"fp8_einsum: {expr!r} is not supported; use 'bhr,hdr->bhd'.")
    group = _group("fp8_einsum", recipe)
    batch, heads, width = a[0].shape[0], b[0].shape[0], b[0].shape[1]
    data = out if isinstance(out, Tensor) else out[0]
    require(
        data.shape == (batch, heads, width) and a[0].shape[1] == heads,
        f"fp8_einsum: the output is {shape(data)}; give [{batch}, {heads}, {width}].",
    )
    exponents = []
    for head in range(heads):
        left = operand((a[0][:, head], a[1][:, head]), group)
        right = operand((b[0][head], b[1][head]), group)
        if isinstance(out, Tensor):
            check_product("fp8_einsum", left, right, out[:, head])
            gemm(left, right, out[:, head], None, arithmetic())
            continue
        wide = torch.empty(batch, width, dtype=torch.float32, device=data.device)
        check_product("fp8_einsum", left, right, wide)
        gemm(left, right, wide, None, arithmetic())
        codes, scale = cast_blocks(wide, "e4m3", (1, 32), "power")
        data[:, head] = codes
        exponents.append(scale_exponents(scale))
    if not isinstance(out, Tensor) and exponents:
        out[1].copy_(pack_exponents(torch.cat(exponents, dim=1), out[1].dtype))


def tf32_hc_prenorm_gemm(
    x: Tensor, fn: Tensor, d: Tensor, sqr_sum: Tensor, num_splits: int | None = None
) -> None:
    """Partial sums of ``x fn^T`` and of ``x^2``, in full fp32.

    Args:
        x: bf16 ``[T, K]``.
        fn: fp32 ``[M, K]``.
        d: fp32 ``[T, M]``, or ``[S, T, M]`` with ``num_splits``; written in place.
        sqr_sum: fp32 ``[T]``, or ``[S, T]``; written in place.
        num_splits: ``S``: parts of ``K`` that are summed apart.
    """
    splits = num_splits or 1
    lead = (splits,) if d.dim() == 3 else ()
    rows, outputs = x.shape[0], fn.shape[0]
    require(
        x.shape[1] == fn.shape[1]
        and tuple(d.shape) == (*lead, rows, outputs)
        and tuple(sqr_sum.shape) == (*lead, rows)
        and (splits == 1 or d.dim() == 3),
        f"tf32_hc_prenorm_gemm: x is {shape(x)}, fn {shape(fn)}, d {shape(d)} and sqr_sum "
        f"{shape(sqr_sum)} for num_splits={num_splits}; give [T, M] and [T], or one of each per "
        "split.",
    )
    products, squares = (d, sqr_sum) if lead else (d[None], sqr_sum[None])
    split_projection(x, fn, products, squares, arithmetic())

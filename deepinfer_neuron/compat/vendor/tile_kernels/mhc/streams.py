"""Hyper-connections of ``M`` streams: fp32 coefficients, outputs written in place."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_neuron.compat.vendor.operands import arithmetic, require, shape
from deepinfer_neuron.ops.arithmetic import fused_multiply_add, square_root
from deepinfer_neuron.ops.hyper import Mix, collapse, expand, sinkhorn


def expand_to_mhc_fwd(x: Tensor, out: Tensor) -> None:
    """Copy ``[T, H]`` to every stream of ``[T, M, H]``."""
    out.copy_(x.unsqueeze(-2).expand_as(out))


def mhc_fn_normw_merge_fwd(fn: Tensor, normw: Tensor, out: Tensor) -> None:
    """fp32 product of ``[N, M H]`` and a norm weight ``[M H]``."""
    out.copy_(fn * normw)


def mhc_reduce_partials_and_rmsnorm_fwd(
    mul: Tensor,
    sq: Tensor,
    out_mul: Tensor,
    out_sq: Tensor,
    out: Tensor,
    rms_group_size: int,
    rms_eps: float,
    n_splits: int,
) -> None:
    """Add partial sums and divide by the root mean square.

    Args:
        mul: fp32 ``[S, T, 1, N]``.
        sq: fp32 ``[S, T, 1]``, sums of squares.
        out_mul: fp32 ``[T, 1, N]``, receives the sum of ``mul``.
        out_sq: fp32 ``[T, 1]``, receives the sum of ``sq``.
        out: fp32 ``[T, N]``, receives ``mul / sqrt(sq / rms_group_size + rms_eps)``.
        rms_group_size: numbers behind a sum of squares.
        rms_eps: epsilon.
        n_splits: ``S``.
    """
    total, squares = _reduced(mul, sq, n_splits)
    out_mul.copy_(total.view_as(out_mul))
    out_sq.copy_(squares.view_as(out_sq))
    out.copy_(_normalized(total, squares, rms_group_size, rms_eps))


def _reduced(mul: Tensor, sq: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Sums over the splits, first to last: fp32 ``[T, N]`` and ``[T]``."""
    require(
        mul.shape[0] == sq.shape[0] == splits >= 1 and mul.shape[1] == sq.shape[1],
        f"partial sums are {shape(mul)} and {shape(sq)} for {splits} splits; give one of each per "
        "split and row.",
    )
    rows, width = mul.shape[1], mul.shape[-1]
    total, squares = mul[0].reshape(rows, width), sq[0].reshape(rows)
    for split in range(1, splits):
        total = total + mul[split].reshape(rows, width)
        squares = squares + sq[split].reshape(rows)
    return total, squares


def _normalized(total: Tensor, squares: Tensor, size: int, eps: float) -> Tensor:
    return total * square_root(squares / size + eps).reciprocal()[:, None]


def mhc_pre_split_mixes_fwd(
    mixes: Tensor,
    scale: Tensor,
    base: Tensor,
    pre: Tensor,
    post: Tensor,
    comb: Tensor,
    post_mult: float,
    pre_eps: float,
) -> None:
    """Coefficients from projections, ``z = fma(mix, scale, base)``.

    Args:
        mixes: fp32 ``[T, M (M + 2)]``.
        scale: fp32 ``[3]``: of pre, post and comb.
        base: fp32 ``[M (M + 2)]``.
        pre: fp32 ``[T, M]``, receives ``sigmoid(z) + pre_eps``.
        post: fp32 ``[T, M]``, receives ``sigmoid(z) * post_mult``.
        comb: fp32 ``[T, M M]``, receives ``z``, rows being input streams.
        post_mult: see ``post``.
        pre_eps: see ``pre``.
    """
    streams = pre.shape[1]
    widths = (streams, streams, streams * streams)
    require(
        mixes.shape[1] == sum(widths) and scale.shape == (3,),
        f"mixes are {shape(mixes)} with a scale {shape(scale)}; give {sum(widths)} columns for "
        f"{streams} streams and three scales.",
    )
    factor = torch.cat([part.expand(n) for part, n in zip(scale.split(1), widths, strict=True)])
    z_pre, z_post, z_comb = fused_multiply_add(mixes, factor, base).split(widths, dim=1)
    sigmoid = arithmetic().order.sigmoid
    pre.copy_(sigmoid(z_pre.contiguous()) + pre_eps)
    post.copy_(sigmoid(z_post.contiguous()) * post_mult)
    comb.copy_(z_comb)


def mhc_sinkhorn_fwd(x: Tensor, out: Tensor, repeat: int, eps: float) -> None:
    """Near doubly stochastic matrices: fp32 ``[T, M, M]``.

    Softmax of each row plus ``eps``, columns divided by their sum plus ``eps``; then rows and
    columns ``repeat - 1`` times.
    """
    require(repeat >= 1, f"mhc_sinkhorn_fwd: repeat is {repeat}; give at least 1.")
    out.copy_(sinkhorn(x, eps, repeat, arithmetic()))


def mhc_pre_apply_mix_fwd(x: Tensor, mix: Tensor, out: Tensor) -> None:
    """``round(sum_j mix[j] x[j])``: bf16 ``[T, M, H]``, fp32 ``[T, M]``, out bf16 ``[T, H]``."""
    out.copy_(collapse(x, mix, arithmetic()))


def mhc_post_fwd(
    x: Tensor, residual: Tensor, post: Tensor, comb: Tensor, out: Tensor | None = None
) -> Tensor:
    """New streams ``round(x post[n] + sum_m comb[m, n] residual[m])``.

    Args:
        x: bf16 ``[B, T, H]``.
        residual: bf16 ``[B, T, M, H]``.
        post: fp32 ``[B, T, M, 1]``.
        comb: fp32 ``[B, T, M, M]``.
        out: bf16 like ``residual``, written in place; ``None`` for a new tensor.

    Returns:
        the output.
    """
    width, streams = x.shape[-1], residual.shape[-2]
    coefficients = post.reshape(-1, streams)
    mix = Mix(coefficients, coefficients, comb.reshape(-1, streams, streams))
    made = expand(x.reshape(-1, width), residual.reshape(-1, streams, width), mix, arithmetic())
    target = torch.empty_like(residual) if out is None else out
    return target.copy_(made.view(residual.shape))


def mhc_head_compute_mix_fwd(
    mix: Tensor, scale: Tensor, base: Tensor, out: Tensor, eps: float
) -> None:
    """``sigmoid(fma(mix, scale, base)) + eps``: fp32 ``[T, M]``, scale ``[1]``, base ``[M]``."""
    z = fused_multiply_add(mix, scale.expand(mix.shape[1]), base)
    out.copy_(arithmetic().order.sigmoid(z) + eps)


def mhc_pre_big_fuse_fwd(
    gemm_mul: Tensor,
    gemm_sq: Tensor,
    scale: Tensor,
    base: Tensor,
    residual: Tensor,
    post_mix: Tensor,
    comb_mix: Tensor,
    layer_input: Tensor,
    rms_eps: float,
    pre_eps: float,
    sinkhorn_eps: float,
    post_mult: float,
    sinkhorn_repeat: int,
    n_splits: int = 16,
) -> None:
    """Everything between the projection and the block, equal bit for bit to the single calls.

    Args:
        gemm_mul: fp32 ``[S, T, M (M + 2)]``, partial projections.
        gemm_sq: fp32 ``[S, T]``, partial sums of squares.
        scale: fp32 ``[3]``.
        base: fp32 ``[M (M + 2)]``.
        residual: bf16 ``[T, M, H]``.
        post_mix: fp32 ``[T, M]``, written.
        comb_mix: fp32 ``[T, M M]``, written.
        layer_input: bf16 ``[T, H]``, written: the streams collapsed by ``pre``.
        rms_eps: of the norm.
        pre_eps: of ``pre``.
        sinkhorn_eps: of the matrices.
        post_mult: factor of ``post``.
        sinkhorn_repeat: rounds.
        n_splits: ``S``.
    """
    rows, streams, width = residual.shape
    total, squares = _reduced(gemm_mul, gemm_sq, n_splits)
    mixes = _normalized(total, squares, streams * width, rms_eps)
    pre, post = mixes.new_empty(rows, streams), mixes.new_empty(rows, streams)
    comb = mixes.new_empty(rows, streams * streams)
    mhc_pre_split_mixes_fwd(mixes, scale, base, pre, post, comb, post_mult, pre_eps)
    square = comb.view(rows, streams, streams)
    mhc_sinkhorn_fwd(square, square, sinkhorn_repeat, sinkhorn_eps)
    mhc_pre_apply_mix_fwd(residual, pre, layer_input)
    post_mix.copy_(post.view_as(post_mix))
    comb_mix.copy_(comb.view_as(comb_mix))

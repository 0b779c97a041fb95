"""Casts with a scale per row and group of columns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer_neuron.compat.vendor.knobs import KNOBS
from deepinfer_neuron.compat.vendor.operands import Scaled, require, shape
from deepinfer_neuron.compat.vendor.tile_kernels.torch.casting import cast, cast_back
from deepinfer_neuron.ops.scale_layout import (
    column_major,
    pack_exponents,
    scale_exponents,
    spread_rows,
)

_GROUPS = (16, 32, 64, 128)


def per_token_cast(
    x: Tensor | Scaled,
    fmt: str,
    num_per_channels: int,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
    out: Scaled | None = None,
) -> Scaled:
    """Quantize every row in groups of ``num_per_channels`` columns.

    Args:
        x: bf16 or fp32 ``[T, K]``, rows of any stride; or e4m3 data and scales of blocks
            ``x_block_size``, which are decoded in fp32 first.
        fmt: ``"e4m3"`` or ``"e2m1"``.
        num_per_channels: 16, 32, 64 or 128.
        x_block_size: blocks of ``x`` if that is quantized.
        use_tma_aligned_col_major_sf: lay scales out by columns.
        round_sf: round scales up to powers of two.
        use_packed_ue8m0: pack the scales' exponents into words.
        use_e4m3_sf: scales of type e4m3.
        out: data and scales to write into, of any strides.

    Returns:
        e4m3 ``[T, K]`` or int8 ``[T, K/2]``, and scales; ``out`` if given.
    """
    require(
        num_per_channels in _GROUPS,
        f"per_token_cast: groups of {num_per_channels} columns are not supported; use one of "
        f"{', '.join(map(str, _GROUPS))}.",
    )
    made = cast(
        x,
        fmt,
        (1, num_per_channels),
        None,
        x_block_size,
        round_sf,
        use_tma_aligned_col_major_sf,
        use_packed_ue8m0,
        use_e4m3_sf,
    )
    assert not isinstance(made, Tensor)
    if out is None:
        return made
    for target, value in zip(out, made, strict=True):
        require(
            target.shape == value.shape and target.dtype == value.dtype,
            f"per_token_cast: an output is {shape(target)}; give {shape(value)}.",
        )
        target.copy_(value)
    return out


def per_token_cast_back(x: Scaled, fmt: str, num_per_channels: int) -> Tensor:
    """Decode rows quantized by :func:`per_token_cast` to ``"bf16"`` or ``"fp32"`` ``[T, K]``."""
    return cast_back(x, fmt, (1, num_per_channels))


def per_token_cast_and_cast_back(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    round_sf: bool = False,
    use_e4m3_sf: bool = False,
) -> None:
    """Round a matrix, in place, to what the format holds.

    Args:
        x: bf16 or fp32 ``[T, K]``, rows of any stride; every value is rounded to bf16.
        fmt: ``"e4m3"`` or ``"e2m1"``.
        num_per_channels: columns that share a scale.
        round_sf: round scales up to powers of two.
        use_e4m3_sf: scales of type e4m3.
    """
    quantized = per_token_cast(x, fmt, num_per_channels, round_sf=round_sf, use_e4m3_sf=use_e4m3_sf)
    x.copy_(per_token_cast_back(quantized, "bf16", num_per_channels))


def batched_transpose_weight_sf(
    sfs: Sequence[Tensor],
    block: int,
    transpose_sf1s: Sequence[bool],
    outs: Sequence[Scaled | None] | None = None,
) -> list[Scaled]:
    """Packed scales of weights and of their transposes.

    Args:
        sfs: fp32 powers of two ``[(G,) n/block, k/block]``.
        block: rows, and columns, that share a scale.
        transpose_sf1s: whether the second result of each is returned transposed.
        outs: pairs to write into, or ``None`` for new ones.

    Returns:
        for each input ``[(G,) n, words]`` with strides ``(1, n)``, of which row ``i`` comes from
        block row ``i // block``; and the same of the transposed scales, ``[(G,) k, words]``.
    """
    outs = [None] * len(sfs) if outs is None else outs
    results = []
    for sf, transposed, out in zip(sfs, transpose_sf1s, outs, strict=True):
        first = _row_scales(sf, block)
        second = _row_scales(sf.transpose(-1, -2), block)
        made = (first, second.transpose(-1, -2) if transposed else second)
        if out is not None:
            for target, value in zip(out, made, strict=True):
                target.copy_(value)
            made = out
        results.append(made)
    return results


def _row_scales(sf: Tensor, block: int) -> Tensor:
    """``[(G,) r, c]`` to packed ``[(G,) r * block, words]``, columns one behind the other."""
    require(
        sf.dtype == torch.float32 and sf.dim() >= 2,
        f"scales are {shape(sf)}; give float32 [.., rows, columns].",
    )
    rows = sf.shape[-2] * block
    words = pack_exponents(scale_exponents(sf), KNOBS.scale_word)
    return column_major(spread_rows(words, rows, block), rows)

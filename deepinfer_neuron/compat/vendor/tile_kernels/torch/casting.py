"""Casts with a scale per block, in every scale layout."""

from __future__ import annotations

from typing import cast as typed

import torch
from torch import Tensor

from deepinfer_neuron.compat.vendor.knobs import KNOBS
from deepinfer_neuron.compat.vendor.operands import Scaled, require, shape
from deepinfer_neuron.ops.group_cast import (
    Format,
    Scaling,
    cast_blocks,
    cast_values,
    spread_blocks,
)
from deepinfer_neuron.ops.group_cast import cast_back as dequantize
from deepinfer_neuron.ops.scale_layout import (
    column_major,
    pack_exponents,
    scale_exponents,
    scale_values,
)

Block = tuple[int, int]


def laid_out(scale: Tensor, scaling: Scaling, *, column: bool, packed: bool) -> Tensor:
    """Scales fp32 ``[T, G]`` in the layout a caller asks for."""
    if packed:
        scale = pack_exponents(scale_exponents(scale), KNOBS.scale_word)
    elif scaling == "e4m3":
        scale = scale.to(torch.float8_e4m3fn)
    if not column:
        return scale.contiguous()
    # Bytes and words are copied as they are: not every type of data can be.
    size = scale.element_size()
    raw = scale.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[size])
    return column_major(raw, KNOBS.padded_column(raw.shape[0], size)).view(scale.dtype)


def chosen_scaling(round_sf: bool, use_packed_ue8m0: bool, use_e4m3_sf: bool) -> Scaling:
    """The kind of scale that three flags ask for.

    Raises :class:`ConfigError` if they contradict each other.
    """
    require(
        (round_sf or not use_packed_ue8m0) and not (use_e4m3_sf and round_sf),
        f"round_sf={round_sf}, use_packed_ue8m0={use_packed_ue8m0} and use_e4m3_sf={use_e4m3_sf} "
        "contradict each other; packed scales are rounded, e4m3 scales are neither.",
    )
    return "e4m3" if use_e4m3_sf else "power" if round_sf else "exact"


def checked_format(fmt: str, allowed: tuple[str, ...] = ("e4m3", "e2m1")) -> Format:
    """``fmt`` if it is allowed.

    Raises :class:`ConfigError` if it is not.
    """
    require(fmt in allowed, f"format {fmt!r} is not known here; use one of {', '.join(allowed)}.")
    return typed("Format", fmt)


def cast(
    x: Tensor | Scaled,
    fmt: str,
    block_size: Block = (32, 32),
    sf: Tensor | None = None,
    x_block_size: Block | None = None,
    round_sf: bool = False,
    use_tma_aligned_col_major_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
) -> Tensor | Scaled:
    """Quantize a matrix.

    Args:
        x: bf16 or fp32 ``[T, K]``; or quantized data and scales of blocks ``x_block_size``, which
            are decoded in fp32 first.
        fmt: ``"e4m3"`` or ``"e2m1"``.
        block_size: rows and columns that share a scale.
        sf: fp32 scales ``[ceil(T/bh), ceil(K/bw)]`` to use; then only data are returned.
        x_block_size: blocks of ``x`` if that is quantized.
        round_sf: round scales up to powers of two.
        use_tma_aligned_col_major_sf: lay scales out by columns.
        use_packed_ue8m0: pack the scales' exponents into words.
        use_e4m3_sf: scales of type e4m3.

    Returns:
        e4m3 ``[T, K]`` or int8 ``[T, K/2]``, and scales fp32, e4m3 or words.
    """
    target = checked_format(fmt)
    if not isinstance(x, Tensor):
        require(x_block_size is not None, "cast: quantized input needs x_block_size; give it.")
        assert x_block_size is not None
        x = cast_back(x, "fp32", x_block_size)
    require(
        x.dim() == 2 and (target == "e4m3" or x.shape[1] % 2 == 0),
        f"cast: the input is {shape(x)}; give a matrix, of an even number of columns for e2m1.",
    )
    if sf is not None:
        factor = spread_blocks(sf.to(torch.float32).reciprocal(), block_size, *x.shape)
        return cast_values(x.to(torch.float32) * factor, target)
    scaling = chosen_scaling(round_sf, use_packed_ue8m0, use_e4m3_sf)
    data, scale = cast_blocks(x, target, block_size, scaling)
    layout = laid_out(scale, scaling, column=use_tma_aligned_col_major_sf, packed=use_packed_ue8m0)
    return data, layout


def cast_back(x: Scaled, fmt: str, block_size: Block = (32, 32)) -> Tensor:
    """Decode a quantized matrix.

    Args:
        x: e4m3 ``[T, K]`` or int8 ``[T, K/2]``, and scales of any type and layout.
        fmt: ``"bf16"`` or ``"fp32"``.
        block_size: rows and columns that share a scale.

    Returns:
        ``[T, K]``.
    """
    checked_format(fmt, ("bf16", "fp32"))
    data, scale = x
    columns = data.shape[1] * (2 if data.dtype == torch.int8 else 1)
    values = dequantize(data, scale_values(scale, -(-columns // block_size[1])), block_size)
    return values if fmt == "fp32" else values.to(torch.bfloat16)

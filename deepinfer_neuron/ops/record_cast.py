"""Rows quantized in groups of channels, as the bytes that caches and outputs hold.

The rules are those of :mod:`deepinfer_neuron.ops.group_cast`, with a group of a row as block. The
three kinds that the model itself uses take the shorter way of
:mod:`deepinfer_neuron.ops.quant`, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from deepinfer_neuron.checkpoint.formats import (
    decode_e2m1_bf16,
    decode_e4m3,
    dequantize_fp4,
    dequantize_fp8_rows,
)
from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops.group_cast import Format, block_scale, cast_values
from deepinfer_neuron.ops.quant import (
    CACHE_GROUP,
    GROUP,
    q4_cache_codes,
    q4_cache_values,
    q4_index_codes,
    q8_codes,
)


@dataclass(frozen=True)
class GroupFormat:
    """How groups of channels are stored.

    Attributes:
        values: e4m3 or e2m1; the latter is packed, the even channel in the low nibble.
        group: channels per scale.
        scale: ue8m0, e4m3 or fp32.
        power_of_two: whether an fp32 scale is rounded up to a power of two; ue8m0 always is, e4m3
            never.
    """

    values: str
    group: int
    scale: str
    power_of_two: bool = True

    def __post_init__(self) -> None:
        if self.values not in ("e4m3", "e2m1") or self.scale not in ("ue8m0", "e4m3", "fp32"):
            raise ConfigError(f"values are e4m3 or e2m1, scales ue8m0, e4m3 or fp32; not {self}")
        if self.group < 1 or (self.values == "e2m1" and self.group % 2):
            raise ConfigError(f"a group is a positive number of whole bytes, not {self}")
        if self.scale == "e4m3" and (self.values != "e2m1" or self.group != CACHE_GROUP):
            raise ConfigError(f"e4m3 scales go with e2m1 in groups of {CACHE_GROUP}, not {self}")


_SHORTER: dict[tuple[str, int, str], Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    ("e4m3", GROUP, "ue8m0"): q8_codes,
    ("e2m1", GROUP, "ue8m0"): q4_index_codes,
    ("e2m1", CACHE_GROUP, "e4m3"): q4_cache_codes,
}


def encode_rows(x: Tensor, fmt: GroupFormat) -> tuple[Tensor, Tensor]:
    """Quantize groups of channels.

    Args:
        x: bf16 or fp32 ``[..., C]``, finite, ``C`` a multiple of the group.
        fmt: value and scale formats.

    Returns:
        codes ``[..., C]`` (e2m1: ``[..., C/2]``), uint8; scales ``[..., C/group]``, uint8 or fp32.
    """
    shorter = _SHORTER.get((fmt.values, fmt.group, fmt.scale))
    if shorter is not None:
        return shorter(x)
    groups = x.to(torch.float32).unflatten(-1, (-1, fmt.group))
    scaling: Literal["power", "exact"] = "power" if fmt.power_of_two else "exact"
    values = cast(Format, fmt.values)
    scale, factor = block_scale(groups.abs().amax(-1), values, scaling)
    codes = cast_values(groups * factor[..., None], values).view(torch.uint8).flatten(-2)
    if fmt.scale == "ue8m0":
        scale = (scale.view(torch.int32) >> 23).to(torch.uint8)
    return codes, scale


def decode_rows(codes: Tensor, scale: Tensor, fmt: GroupFormat) -> Tensor:
    """Values of quantized groups: the fp32 product of code and scale, rounded to bf16.

    Args:
        codes: uint8 ``[..., C]`` (e2m1: ``[..., C/2]``).
        scale: ``[..., C/group]``, uint8 or fp32.
        fmt: value and scale formats.

    Returns:
        bf16 ``[..., C]``.
    """
    if fmt.scale == "e4m3":
        return q4_cache_values(codes, scale)
    if fmt.scale == "ue8m0":
        return (dequantize_fp8_rows if fmt.values == "e4m3" else dequantize_fp4)(codes, scale)
    if fmt.values == "e4m3":
        values = decode_e4m3(codes)
    else:
        values = decode_e2m1_bf16(codes).to(torch.float32).mul_(2.0**126)
    grouped: Tensor = values.unflatten(-1, (-1, fmt.group)) * scale[..., None]
    return grouped.flatten(-2).to(torch.bfloat16)

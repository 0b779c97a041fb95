"""The run-time quantizers, as codes and as values.

| name | values | group | scale | amax floor | used for |
|---|---|---|---|---|---|
| ``q8`` | e4m3 | 32 | ue8m0 | 1e-4 | inputs of fp8 and fp4 matrix products; window keys |
| ``q4_index`` | e2m1 | 32 | ue8m0 | 6 * 2^-126 | index queries and keys |
| ``q4_cache`` | e2m1 | 16 | e4m3 | 6 * 2^-9 | compressed keys |

A ue8m0 scale is the smallest power of two that brings the group's largest magnitude within the
format, found on the bits of the fp32 number: exact powers of two are not bumped. Multiplying by
its inverse is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_neuron.checkpoint.formats import (
    E2M1_MAX,
    E4M3_MAX,
    decode_e2m1_bf16,
    decode_e4m3,
    dequantize_fp4,
    dequantize_fp8_rows,
    encode_e2m1,
    encode_e4m3,
)
from deepinfer_neuron.ops import graph_formats
from deepinfer_neuron.ops.arithmetic import Arithmetic

GROUP = 32
CACHE_GROUP = 16

_Q8_FLOOR = 1e-4
_INDEX_FLOOR = 6.0 * 2.0**-126
_CACHE_FLOOR = 6.0 * 2.0**-9


def ue8m0_scale(amax: Tensor, largest: float) -> Tensor:
    """Biased exponents ``ceil(log2(amax / largest)) + 127``.

    Args:
        amax: fp32, positive and normal.
        largest: the format's largest value, 448 or 6.

    Returns:
        int32, same shape, in [1, 254].
    """
    scaled = amax * torch.tensor(1.0 / largest, dtype=torch.float32, device=amax.device)
    # (bits - 1) >> 23, plus one: a value just above a power of two rounds up, the power stays.
    exponent = ((scaled.view(torch.int32) - 1) >> 23) + 1
    return exponent.clamp(min=1)


def _inverse_power(exponent: Tensor) -> Tensor:
    """``2^(127 - exponent)`` as fp32, exponent in [1, 254]: a normal number, or 2^-127 exactly."""
    bits = (254 - exponent) << 23
    return torch.where(exponent == 254, 1 << 22, bits).view(torch.float32)


def _grouped(x: Tensor, width: int, floor: float) -> tuple[Tensor, Tensor]:
    groups = x.to(torch.float32).unflatten(-1, (-1, width))
    return groups, groups.abs().amax(-1).clamp(min=floor)


def q8_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to e4m3 with a power-of-two scale per 32 channels.

    Args:
        x: bf16 or fp32 ``[..., C]``, ``C`` a multiple of 32, finite.

    Returns:
        uint8 codes ``[..., C]`` and uint8 scales ``[..., C/32]``.
    """
    groups, amax = _grouped(x, GROUP, _Q8_FLOOR)
    exponent = ue8m0_scale(amax, E4M3_MAX)
    codes = encode_e4m3(groups * _inverse_power(exponent)[..., None])
    return codes.flatten(-2), exponent.to(torch.uint8)


def q8_values(codes: Tensor, scale: Tensor) -> Tensor:
    """Exact bf16 values of :func:`q8_codes`."""
    return dequantize_fp8_rows(codes, scale)


def q8(x: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Round to what ``q8`` can hold: ``[..., C]`` to values of the activation dtype.

    The same result as decoding :func:`q8_codes`, in fewer passes. With ``E`` and ``f`` the
    exponent field and fraction of the group's ``amax``, the scale's byte is
    ``max(105, E - 8 + [f > 0.75])``.
    """
    if not arithmetic.rounding:
        return x
    if arithmetic.graph:
        return graph_formats.q8(x)
    groups = x.to(torch.float32).unflatten(-1, (-1, GROUP))
    amax = groups.abs().amax(-1, keepdim=True)
    # Adding just under a quarter of a mantissa carries into the exponent iff f > 0.75.
    exponent = ((amax.view(torch.int32) + 0x1FFFFF) >> 23).clamp_(min=113)
    scaled = groups * ((262 - exponent) << 23).view(torch.float32)
    rounded = round_e4m3(scaled).mul_(((exponent - 8) << 23).view(torch.float32))
    return rounded.flatten(-2).to(arithmetic.dtype)


def round_e4m3(x: Tensor) -> Tensor:
    """Nearest e4m3 values of fp32 magnitudes up to 448, ties to even; fp32, same shape.

    Adding ``1.5 * 2^20`` times the value's own power of two leaves three mantissa bits; below
    2^-6 the step stays 2^-9.
    """
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    shift = power.clamp_(min=2.0**-6).mul_(1.5 * 2.0**20)
    return (x + shift).sub_(shift)


def q4_index_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to e2m1 with a power-of-two scale per 32 channels.

    Args:
        x: bf16 or fp32 ``[..., C]``, ``C`` a multiple of 32, finite.

    Returns:
        packed uint8 ``[..., C/2]`` and uint8 scales ``[..., C/32]``.
    """
    groups, amax = _grouped(x, GROUP, _INDEX_FLOOR)
    exponent = ue8m0_scale(amax, E2M1_MAX)
    packed = encode_e2m1(groups * _inverse_power(exponent)[..., None])
    return packed.flatten(-2), exponent.to(torch.uint8)


def q4_index_values(packed: Tensor, scale: Tensor) -> Tensor:
    """Exact bf16 values of :func:`q4_index_codes`."""
    return dequantize_fp4(packed, scale)


def q4_index(x: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Round to what ``q4_index`` can hold, as values of the activation dtype."""
    if not arithmetic.rounding:
        return x
    if arithmetic.graph:
        return graph_formats.q4_index(x)
    return q4_index_values(*q4_index_codes(x))


def q4_cache_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to e2m1 with an e4m3 scale per 16 channels.

    ``scale = e4m3(min(max(amax, 6 * 2^-9) / 6, 448))``, values times the fp32 reciprocal of the
    rounded scale. The scale may round down, so values saturate at 6.

    Args:
        x: bf16 or fp32 ``[..., C]``, ``C`` a multiple of 16, finite.

    Returns:
        packed uint8 ``[..., C/2]`` and uint8 e4m3 scales ``[..., C/16]``.
    """
    groups, amax = _grouped(x, CACHE_GROUP, _CACHE_FLOOR)
    sixth = torch.tensor(1.0 / 6.0, dtype=torch.float32, device=x.device)
    scale = encode_e4m3(amax * sixth)
    packed = encode_e2m1(groups * decode_e4m3(scale).reciprocal()[..., None])
    return packed.flatten(-2), scale


def q4_cache_values(packed: Tensor, scale: Tensor) -> Tensor:
    """Exact bf16 values of :func:`q4_cache_codes`: ``[..., C/2]`` to ``[..., C]``."""
    values = decode_e2m1_bf16(packed) * 2.0**126
    factor = ((scale.view(torch.int8).to(torch.int16) << 4) & -0x7810).view(torch.bfloat16)
    grouped = values.view(*scale.shape, CACHE_GROUP) * (factor * 2.0**120)[..., None]
    return grouped.view(values.shape)

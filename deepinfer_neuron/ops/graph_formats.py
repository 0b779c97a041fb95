"""Number formats and quantizers in the forms a graph compiler takes.

The same results, bit for bit, as :mod:`deepinfer_neuron.checkpoint.formats` and
:mod:`deepinfer_neuron.ops.quant`, but without float8 types, int64, shifts by Python numbers,
step-2 slices, or a look at the data. The forms also keep to what an accelerator computes exactly:

* bit patterns meet only ``and``, ``or``, shifts and reinterpretation; integers that are added,
  multiplied or converted stay below 2^24, so an integer unit that works through fp32 is enough;
* no step needs a subnormal number. Hardware that flushes them gives the same codes, and the same
  values as long as the result itself is a normal number.

The range in which nothing flushes and nothing overflows: inputs that are 0 or at least 2^-126 in
magnitude, and ue8m0 scales of 10 to 246 for e4m3 values, 2 to 252 for e2m1 values. Outside of it
results still equal the host's on hardware that keeps subnormals: smaller scales give subnormal
values, larger ones infinity, and the scale 255 gives NaN.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_neuron.checkpoint.formats import E2M1_MAX, E4M3_MAX, FP8_BLOCK

GROUP = 32
CACHE_GROUP = 16

_Q8_FLOOR = 1e-4
_INDEX_FLOOR = 6.0 * 2.0**-126
_CACHE_FLOOR = 6.0 * 2.0**-9

_EXPONENT = 0x7F800000
_FRACTION = 0x007FFFFF
_SIGN_16 = -0x8000


def shift_right(x: Tensor, bits: int) -> Tensor:
    """``x >> bits`` of an int32 tensor; a shift by a Python number does not lower."""
    return torch.bitwise_right_shift(x, torch.full_like(x, bits))


def shift_left(x: Tensor, bits: int) -> Tensor:
    """``x << bits`` of an int32 tensor."""
    return torch.bitwise_left_shift(x, torch.full_like(x, bits))


def decode_e4m3(codes: Tensor) -> Tensor:
    """Values of e4m3 codes: uint8, any shape, to fp32; 0x7F and 0xFF give NaN."""
    values = _e4m3_values(codes).to(torch.float32)
    wide = codes.to(torch.int32)
    return torch.where((wide & 0x7F) == 0x7F, math.nan, values)


def encode_e4m3(values: Tensor) -> Tensor:
    """Nearest e4m3 codes, ties to even, saturating at 448, the sign of zero kept.

    Args:
        values: fp32 or bf16, any shape, finite.

    Returns:
        uint8, same shape.
    """
    wide = values.to(torch.float32)
    code = _magnitude_code(wide.abs().clamp(max=E4M3_MAX), mantissa=3, smallest=-6)
    return (code + _is_negative(wide) * 128).to(torch.uint8)


def decode_e2m1(packed: Tensor) -> Tensor:
    """Values of packed e2m1 codes: uint8 ``[..., k/2]`` to fp32 ``[..., k]``; code 8 is -0."""
    return _e2m1_values(packed).to(torch.float32)


def encode_e2m1(values: Tensor) -> Tensor:
    """Nearest packed e2m1 codes, ties to the even code, saturating at 6, sign of zero kept.

    Args:
        values: fp32 or bf16 ``[..., k]``, ``k`` even, finite.

    Returns:
        uint8 ``[..., k/2]``.
    """
    wide = values.to(torch.float32)
    code = _magnitude_code(wide.abs().clamp(max=E2M1_MAX), mantissa=1, smallest=0)
    # Pairs are joined in fp32: narrowing interleaved integer slices has failed to compile.
    pairs: Tensor = (code + _is_negative(wide) * 8).to(torch.float32).unflatten(-1, (-1, 2))
    return (pairs[..., 0] + pairs[..., 1] * 16.0).to(torch.uint8)


def decode_ue8m0(codes: Tensor) -> Tensor:
    """Powers of two ``2^(b-127)``: uint8 to bf16, same shape.

    Byte 0 is the subnormal 2^-127; byte 255 gives NaN.
    """
    exponent = codes.to(torch.int32)
    bits = torch.where(exponent == 0, 0x0040, exponent * 128)
    return torch.where(exponent == 255, 0x7FC0, bits).to(torch.int16).view(torch.bfloat16)


def dequantize_fp8(codes: Tensor, scale: Tensor) -> Tensor:
    """Exact bf16 weights of an fp8 matrix with 32 x 32 block scales.

    Args:
        codes: uint8 ``[N, K]``; the NaN codes read as 480 and -480.
        scale: uint8 ``[ceil(N/32), ceil(K/32)]``.

    Returns:
        bf16 ``[N, K]``. Partial blocks at the edges are allowed.
    """
    rows, columns = codes.shape
    high, wide = scale.shape
    values, factor = _e4m3_values(codes), decode_ue8m0(scale)[:, None, :, None]
    if rows == high * FP8_BLOCK and columns == wide * FP8_BLOCK:
        return (values.view(high, FP8_BLOCK, wide, FP8_BLOCK) * factor).view(rows, columns)
    spread = factor.expand(high, FP8_BLOCK, wide, FP8_BLOCK)
    return values * spread.reshape(high * FP8_BLOCK, -1)[:rows, :columns]


def dequantize_fp8_rows(codes: Tensor, scale: Tensor) -> Tensor:
    """Exact bf16 values of e4m3 rows with one scale per group of channels.

    Args:
        codes: uint8 ``[..., C]``, ``C`` a multiple of the number of scales.
        scale: uint8 ``[..., C / group]``.

    Returns:
        bf16 ``[..., C]``.
    """
    return _apply_scale(_e4m3_values(codes), scale)


def dequantize_fp4(packed: Tensor, scale: Tensor) -> Tensor:
    """Exact bf16 weights of an fp4 matrix with one scale per row and 32 input channels.

    Args:
        packed: uint8 ``[..., N, K/2]``.
        scale: uint8 ``[..., N, K/32]``.

    Returns:
        bf16 ``[..., N, K]``.
    """
    return _apply_scale(_e2m1_values(packed), scale)


def q8_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to e4m3 with a power-of-two scale per 32 channels.

    Args:
        x: bf16 or fp32 ``[..., C]``, ``C`` a multiple of 32, finite.

    Returns:
        uint8 codes ``[..., C]`` and uint8 scales ``[..., C/32]``.
    """
    groups, amax = _grouped(x, GROUP, _Q8_FLOOR)
    exponent = _ue8m0_scale(amax, E4M3_MAX)
    codes = encode_e4m3(groups * _power(254 - exponent)[..., None])
    return codes.flatten(-2), exponent.to(torch.uint8)


def q8_values(codes: Tensor, scale: Tensor) -> Tensor:
    """Exact bf16 values of :func:`q8_codes`."""
    return dequantize_fp8_rows(codes, scale)


def q8(x: Tensor) -> Tensor:
    """Round to what :func:`q8_codes` can hold: bf16 or fp32 ``[..., C]`` to bf16 values.

    What rounds to zero becomes +0.
    """
    groups = x.to(torch.float32).unflatten(-1, (-1, GROUP))
    bits = groups.abs().amax(-1, keepdim=True).view(torch.int32)
    # One binade more where the largest magnitude is above 1.75 * 2^k: 448 is 1.75 * 2^8.
    above = ((bits & _FRACTION) > 0x600000).to(torch.int32)
    exponent = (shift_right(bits, 23) + above).clamp(min=113)
    scaled = groups * _power(262 - exponent)
    power = _leading_power(scaled, smallest=-6)
    # Behind a leading 1.5 * 2^20 times its own power of two a value keeps three mantissa bits,
    # which are read as an integer so that no compiler can cancel the addition.
    steps = ((scaled + power * (1.5 * 2.0**20)).view(torch.int32) & _FRACTION) - 0x400000
    rounded: Tensor = steps.to(torch.float32) * (power * 0.125) * _power(exponent - 8)
    return rounded.flatten(-2).to(torch.bfloat16)


def q4_index_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to e2m1 with a power-of-two scale per 32 channels.

    Args:
        x: bf16 or fp32 ``[..., C]``, ``C`` a multiple of 32, finite.

    Returns:
        packed uint8 ``[..., C/2]`` and uint8 scales ``[..., C/32]``.
    """
    groups, amax = _grouped(x, GROUP, _INDEX_FLOOR)
    exponent = _ue8m0_scale(amax, E2M1_MAX)
    packed = encode_e2m1(groups * _power(254 - exponent)[..., None])
    return packed.flatten(-2), exponent.to(torch.uint8)


def q4_index_values(packed: Tensor, scale: Tensor) -> Tensor:
    """Exact bf16 values of :func:`q4_index_codes`."""
    return dequantize_fp4(packed, scale)


def q4_index(x: Tensor) -> Tensor:
    """Round to what :func:`q4_index_codes` can hold, as bf16 values."""
    return q4_index_values(*q4_index_codes(x))


def q4_cache_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to e2m1 with an e4m3 scale per 16 channels.

    Equal to the host where ``1 / x`` of an e4m3 value is correctly rounded.

    Args:
        x: bf16 or fp32 ``[..., C]``, ``C`` a multiple of 16, finite.

    Returns:
        packed uint8 ``[..., C/2]`` and uint8 e4m3 scales ``[..., C/16]``.
    """
    groups, amax = _grouped(x, CACHE_GROUP, _CACHE_FLOOR)
    scale = encode_e4m3(amax * (1.0 / 6.0))
    factor = 1.0 / _e4m3_values(scale).to(torch.float32)
    return encode_e2m1(groups * factor[..., None]).flatten(-2), scale


def q4_cache_values(packed: Tensor, scale: Tensor) -> Tensor:
    """Exact bf16 values of :func:`q4_cache_codes`: ``[..., C/2]`` to ``[..., C]``."""
    values = _e2m1_values(packed)
    grouped = values.view(*scale.shape, CACHE_GROUP) * _e4m3_values(scale)[..., None]
    return grouped.view(values.shape)


def pack_exponent_pairs(exponents: Tensor) -> Tensor:
    """Pack ue8m0 bytes two to a word, the first one low.

    The pair is formed in fp32, where it is exact, and narrowed once: interleaved int32 slices
    narrowed to int16 have failed to compile.

    Args:
        exponents: uint8 ``[..., G]``; a missing last byte is 0.

    Returns:
        int16 ``[..., ceil(G / 2)]``.
    """
    padded = F.pad(exponents.to(torch.float32), (0, exponents.shape[-1] % 2))
    pairs = padded.unflatten(-1, (-1, 2))
    word = pairs[..., 0] + pairs[..., 1] * 256.0
    return torch.where(word >= 32768.0, word - 65536.0, word).to(torch.int16)


def _e4m3_values(codes: Tensor) -> Tensor:
    """bf16 values of e4m3 codes, same shape; the NaN codes read as 480 and -480."""
    # Sign-extended, the code's sign lands in the top bit and its magnitude below the exponent.
    fields = codes.view(torch.int8).to(torch.int16) * 16
    return _code_values(fields, 0x07F0, smallest=-6)


def _e2m1_values(packed: Tensor) -> Tensor:
    """bf16 values of packed e2m1 codes: uint8 ``[..., k/2]`` to ``[..., k]``."""
    word = packed.to(torch.int32)
    low = shift_left(word & 0x07, 6) | shift_left(word & 0x08, 12)
    high = shift_left(word & 0x70, 18) | shift_left(word & 0x80, 24)
    # Both codes of a byte stand in the halves of one word, the lower one first.
    return _code_values((low | high).view(torch.int16), 0x01C0, smallest=0)


def _code_values(fields: Tensor, mask: int, smallest: int) -> Tensor:
    """bf16 values of codes whose fields stand where bf16 has its own.

    Args:
        fields: int16, sign in the top bit.
        mask: the bits of exponent and mantissa.
        smallest: exponent of the smallest normal value.
    """
    lifted = ((fields & mask) + (126 + smallest) * 128).view(torch.bfloat16)
    # A normal code reads right; a subnormal one reads as half of what its leading bit would add,
    # plus half of itself. For normal codes the second term is the larger one.
    values = torch.minimum(lifted, lifted * 2.0 - 2.0**smallest)
    return (values.view(torch.int16) | (fields & _SIGN_16)).view(torch.bfloat16)


def _apply_scale(values: Tensor, scale: Tensor) -> Tensor:
    """``values * 2^(scale - 127)``: bf16 ``[..., C]`` and ue8m0 bytes ``[..., C / group]``."""
    grouped = values.view(*scale.shape, values.shape[-1] // scale.shape[-1])
    return (grouped * decode_ue8m0(scale)[..., None]).view(values.shape)


def _grouped(x: Tensor, width: int, floor: float) -> tuple[Tensor, Tensor]:
    groups = x.to(torch.float32).unflatten(-1, (-1, width))
    return groups, groups.abs().amax(-1).clamp(min=floor)


def _ue8m0_scale(amax: Tensor, largest: float) -> Tensor:
    """Biased exponents ``ceil(log2(amax / largest)) + 127``: positive normal fp32 to int32."""
    bits = (amax * (1.0 / largest)).view(torch.int32)
    above = ((bits & _FRACTION) != 0).to(torch.int32)
    return (shift_right(bits, 23) + above).clamp(min=1)


def _power(exponent: Tensor) -> Tensor:
    """``2^(exponent - 127)`` of int32 biased exponents in [1, 254], as fp32."""
    return shift_left(exponent, 23).view(torch.float32)


def _leading_power(x: Tensor, smallest: int) -> Tensor:
    """The power of two at or below ``|x|``, at least ``2^smallest``: fp32, same shape."""
    return (x.view(torch.int32) & _EXPONENT).view(torch.float32).clamp(min=2.0**smallest)


def _magnitude_code(magnitude: Tensor, mantissa: int, smallest: int) -> Tensor:
    """Codes of magnitudes that do not exceed the format: fp32 to int32, ties to even.

    Args:
        magnitude: at least 0.
        mantissa: mantissa bits of the format.
        smallest: exponent of its smallest normal value.
    """
    power = _leading_power(magnitude, smallest)
    drop = 23 - mantissa
    # Behind a leading 2^drop times its own power of two a value is a whole number of steps.
    steps = (magnitude + power * 2.0**drop).view(torch.int32) & _FRACTION
    binade = shift_right(power.view(torch.int32), drop)
    return steps + (binade - ((127 + smallest) << mantissa))


def _is_negative(x: Tensor) -> Tensor:
    """1 where the sign bit of an fp32 is set, else 0: int32."""
    return (x.view(torch.int32) < 0).to(torch.int32)

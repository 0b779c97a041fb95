"""Number formats of the released files: e4m3, packed e2m1, and their ue8m0 or e4m3 scales.

All codes travel as ``torch.uint8``. Decoding is exact in fp32; a code times a power of two is
exact in bf16 too (at most four significant bits). Encoders round to nearest, ties to even, and
saturate, so a finite input never becomes NaN.

| format | layout | largest | smallest step |
|---|---|---|---|
| e4m3 (fn) | ``s eeee mmm``, bias 7, no infinities, 0x7F/0xFF are NaN | 448 | 2^-9 |
| e2m1 | ``s ee m``, two per byte, the even column in the low nibble | 6 | 0.5 |
| ue8m0 | ``b`` means 2^(b-127); 255 is NaN | 2^127 | |
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
FP8_BLOCK = 32
"""Side of the square scale block of an fp8 matrix, and width of an fp4 scale group."""

# A code moved into the top bits of a bf16 reads as its value times 2^-(127 - bias), subnormals
# included; one multiplication by a power of two restores it.
_E4M3_REBIAS = 120
_E2M1_REBIAS = 126
_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def decode_e4m3(codes: Tensor) -> Tensor:
    """Values of e4m3 codes.

    Args:
        codes: uint8, any shape.

    Returns:
        fp32, same shape; 0x7F and 0xFF give NaN.
    """
    return codes.contiguous().view(torch.float8_e4m3fn).to(torch.float32)


def encode_e4m3(values: Tensor) -> Tensor:
    """Nearest e4m3 codes (ties to even, saturating at 448).

    Args:
        values: fp32 or bf16, any shape, finite.

    Returns:
        uint8, same shape. The sign of zero is kept.
    """
    limited = values.to(torch.float32).clamp(-E4M3_MAX, E4M3_MAX)
    return limited.to(torch.float8_e4m3fn).contiguous().view(torch.uint8)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Split bytes into e2m1 codes: uint8 ``[..., k/2]`` to uint8 ``[..., k]``, low nibble first."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def decode_e2m1(packed: Tensor) -> Tensor:
    """Values of packed e2m1 codes.

    Args:
        packed: uint8 ``[..., k/2]``.

    Returns:
        fp32 ``[..., k]``; code 8 gives -0.
    """
    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    table = torch.tensor(magnitudes + tuple(-value for value in magnitudes), device=packed.device)
    return table[unpack_nibbles(packed).to(torch.int32)]


def encode_e2m1(values: Tensor) -> Tensor:
    """Nearest packed e2m1 codes (ties to the even code, saturating at 6, sign of zero kept).

    Args:
        values: fp32 or bf16 ``[..., k]``, ``k`` even, finite.

    Returns:
        uint8 ``[..., k/2]``.
    """
    value = values.to(torch.float32)
    magnitude = value.abs()
    code = torch.zeros(value.shape, dtype=torch.uint8, device=value.device)
    for index, midpoint in enumerate(_E2M1_MIDPOINTS):
        # A midpoint goes to the even one of its two neighbours, codes ``index`` and ``index + 1``.
        above = magnitude > midpoint if index % 2 == 0 else magnitude >= midpoint
        code += above.to(torch.uint8)
    code |= torch.signbit(value).to(torch.uint8) << 3
    return code[..., 0::2] | (code[..., 1::2] << 4)


def decode_ue8m0(codes: Tensor) -> Tensor:
    """Powers of two ``2^(b-127)`` of scale bytes: uint8 to fp32, same shape.

    Byte 0 is the subnormal 2^-127; byte 255 gives NaN.
    """
    exponent = codes.to(torch.int32)
    # Field 0 of an fp32 has no implicit bit: 2^-127 is the subnormal with only its top bit set.
    bits = torch.where(exponent == 0, 1 << 22, exponent << 23)
    bits = torch.where(exponent == 255, 0x7FC00000, bits)
    return bits.view(torch.float32)


def expand_blocks(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Repeat a 32 x 32 block scale ``[ceil(rows/32), ceil(columns/32)]`` to ``[rows, columns]``."""
    tall = scale.repeat_interleave(FP8_BLOCK, dim=0)[:rows]
    return tall.repeat_interleave(FP8_BLOCK, dim=1)[:, :columns]


def dequantize_fp8(codes: Tensor, scale: Tensor) -> Tensor:
    """Exact bf16 weights of an fp8 matrix with 32 x 32 block scales.

    ``w[n, k] = e4m3(codes[n, k]) * 2^(scale[n // 32, k // 32] - 127)``

    Args:
        codes: uint8 ``[N, K]``.
        scale: uint8 ``[ceil(N/32), ceil(K/32)]``.

    Returns:
        bf16 ``[N, K]``. Partial blocks at the edges are allowed. The NaN codes 0x7F and 0xFF,
        which no valid weight has, read as 480 and -480.
    """
    rows, columns = codes.shape
    values = _e4m3_bits(codes)
    if rows % FP8_BLOCK or columns % FP8_BLOCK:
        factors = expand_blocks(scale, rows, columns)
        return _apply_scale(values, factors, _E4M3_REBIAS)
    # One factor per column is a third faster to apply than one per block.
    wide = scale.repeat_interleave(FP8_BLOCK, dim=1)
    blocked = values.view(rows // FP8_BLOCK, FP8_BLOCK, columns)
    return _apply_scale(blocked, wide[:, None, :], _E4M3_REBIAS).view(rows, columns)


def dequantize_fp8_rows(codes: Tensor, scale: Tensor) -> Tensor:
    """Exact bf16 values of e4m3 rows with one scale per 32 channels of a row.

    Args:
        codes: uint8 ``[..., C]``, ``C`` a multiple of the number of scales.
        scale: uint8 ``[..., C / group]``.

    Returns:
        bf16 ``[..., C]``.
    """
    values = _e4m3_bits(codes)
    grouped = values.view(*scale.shape, codes.shape[-1] // scale.shape[-1])
    return _apply_scale(grouped, scale[..., None], _E4M3_REBIAS).view(codes.shape)


def _e4m3_bits(codes: Tensor) -> Tensor:
    """e4m3 codes as bf16 values times 2^-120, same shape."""
    wide = codes.view(torch.int8).to(torch.int16)
    return wide.bitwise_left_shift_(4).bitwise_and_(-0x7810).view(torch.bfloat16)


def decode_e2m1_bf16(packed: Tensor) -> Tensor:
    """e2m1 codes as bf16 values times 2^-126: uint8 ``[..., k/2]`` to bf16 ``[..., k]``.

    Both nibbles of a byte are spread to one 32-bit word, so the pass writes each output once.
    """
    word = packed.to(torch.int32)
    magnitude = (word & 0x77).mul_((1 << 6) | (1 << 18)).bitwise_and_(0x01C001C0)
    sign = word.bitwise_and_(0x88).mul_((1 << 12) | (1 << 24)).bitwise_and_(-0x7FFF8000)
    return magnitude.bitwise_or_(sign).view(torch.bfloat16)


def dequantize_fp4(packed: Tensor, scale: Tensor) -> Tensor:
    """Exact bf16 weights of an fp4 matrix with one scale per row and 32 input channels.

    ``w[n, k] = e2m1 * 2^(scale[n, k // 32] - 127)``

    Args:
        packed: uint8 ``[..., N, K/2]``.
        scale: uint8 ``[..., N, K/32]``.

    Returns:
        bf16 ``[..., N, K]``.
    """
    values = decode_e2m1_bf16(packed)
    grouped = values.view(*scale.shape, values.shape[-1] // scale.shape[-1])
    return _apply_scale(grouped, scale[..., None], _E2M1_REBIAS).view(values.shape)


def _apply_scale(values: Tensor, scale: Tensor, rebias: int) -> Tensor:
    """``values * 2^rebias * 2^(scale - 127)``, exact and in place.

    ``values`` bf16, ``scale`` ue8m0 bytes.
    """
    largest = int(scale.max()) if scale.numel() else 0
    if largest + rebias <= 254:
        factor = ((scale.to(torch.int16) + rebias) << 7).view(torch.bfloat16)
        return values.mul_(factor)
    # A scale this large would overflow the combined factor: restore the code's value first.
    return values.mul_(2.0**rebias).mul_(decode_ue8m0(scale).to(torch.bfloat16))

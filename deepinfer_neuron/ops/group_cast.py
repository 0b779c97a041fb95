"""Casts to e4m3 and e2m1 with a scale per block, for any block and any kind of scale.

With ``a = max(max |x|, margin)`` over a block and ``top`` the format's largest value:

| scale | stored | values |
|---|---|---|
| ``exact`` | ``a / top`` | ``x * (top / a)``, a true division |
| ``power`` | smallest power of two ``>= a / top`` | ``x`` times its inverse, which is exact |
| ``e4m3`` | ``e4m3(min(a / top, 448))`` | ``x * (1 / stored)`` |

For e2m1 the quotient of the last line is ``a * fp32(1 / 6)``, as in the key cache.

Values are rounded to nearest, ties to even, and saturate. Code 7 (6.0) is what e2m1 makes of NaN.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_neuron.checkpoint.formats import (
    E2M1_MAX,
    E4M3_MAX,
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    encode_e2m1,
    encode_e4m3,
)
from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops.quant import ue8m0_scale

Scaling = Literal["exact", "power", "e4m3"]
Format = Literal["e4m3", "e2m1"]

LARGEST: dict[str, float] = {"e4m3": E4M3_MAX, "e2m1": E2M1_MAX}

_MARGIN = {"e4m3": 1e-4, "e2m1": 6.0 * 2.0**-126}
_MARGIN_STEP = 2.0**-9
"""Smallest e4m3 number; with e4m3 scales the margin is the format's largest value times it."""


def block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest magnitude of every block: fp32 ``[T, K]`` to fp32 ``[ceil(T/bh), ceil(K/bw)]``.

    NaN does not count, as for a hardware maximum.
    """
    rows, columns = x.shape
    size = x.abs()
    size = torch.where(size.isnan(), 0.0, size)
    size = F.pad(size, (0, -columns % block[1], 0, -rows % block[0]))
    tall, wide = -(-rows // block[0]), -(-columns // block[1])
    return size.view(tall, block[0], wide, block[1]).amax((1, 3))


def spread_blocks(scale: Tensor, block: tuple[int, int], rows: int, columns: int) -> Tensor:
    """One factor per element: ``[ceil(T/bh), ceil(K/bw)]`` to ``[rows, columns]``."""
    tall = scale.repeat_interleave(block[0], dim=0)[:rows] if block[0] > 1 else scale[:rows]
    return tall.repeat_interleave(block[1], dim=1)[:, :columns]


def block_scale(amax: Tensor, fmt: Format, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """The stored scale of every block, and the factor of its values.

    Args:
        amax: fp32, any shape, not negative.
        fmt: target format.
        scaling: kind of scale.

    Returns:
        fp32 scales and fp32 factors, same shape.
    """
    largest = LARGEST[fmt]
    margin = largest * _MARGIN_STEP if scaling == "e4m3" else _MARGIN[fmt]
    a = amax.clamp(min=margin)
    if scaling == "power":
        exponent = ue8m0_scale(a, largest)
        return decode_ue8m0(exponent), decode_ue8m0(254 - exponent)
    # Tensor by tensor: a number over a tensor is computed as a product with the reciprocal.
    top = torch.full_like(a, largest)
    if scaling == "exact":
        return a / top, top / a
    quotient = a * torch.full_like(a, 1.0 / largest) if fmt == "e2m1" else a / top
    stored = decode_e4m3(encode_e4m3(quotient))
    return stored, stored.reciprocal()


def cast_values(x: Tensor, fmt: Format) -> Tensor:
    """Nearest codes of scaled fp32 values ``[..., K]``.

    Returns:
        e4m3 ``[..., K]``, or int8 ``[..., K/2]`` holding two e2m1 codes each, even one low.
    """
    if fmt == "e4m3":
        return encode_e4m3(x).view(torch.float8_e4m3fn)
    top = torch.full_like(x, E2M1_MAX)
    return encode_e2m1(torch.where(x.isnan(), torch.copysign(top, x), x)).view(torch.int8)


def cast_blocks(
    x: Tensor, fmt: Format, block: tuple[int, int], scaling: Scaling
) -> tuple[Tensor, Tensor]:
    """Quantize a matrix.

    Args:
        x: bf16 or fp32 ``[T, K]``; ``K`` even for e2m1. Blocks at the edges may be partial.
        fmt: target format.
        block: ``(bh, bw)``.
        scaling: kind of scale.

    Returns:
        codes as :func:`cast_values`, and fp32 scales ``[ceil(T/bh), ceil(K/bw)]``.
    """
    wide = x.to(torch.float32)
    scale, factor = block_scale(block_amax(wide, block), fmt, scaling)
    spread = spread_blocks(factor, block, x.shape[0], x.shape[1])
    return cast_values(wide * spread, fmt), scale


def code_values(codes: Tensor) -> Tensor:
    """fp32 values of codes: e4m3 or bf16 ``[..., K]`` as they are, int8 as packed e2m1.

    Raises :class:`ConfigError` for any other type.
    """
    if codes.dtype == torch.int8:
        return decode_e2m1(codes.contiguous().view(torch.uint8))
    if codes.dtype not in (torch.float8_e4m3fn, torch.bfloat16, torch.float32):
        raise ConfigError(
            f"quantized data of type {codes.dtype} are not known; give float8_e4m3fn, or int8 "
            "holding packed e2m1."
        )
    return codes.to(torch.float32)


def cast_back(codes: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """``value * scale`` in fp32.

    Args:
        codes: e4m3 ``[T, K]`` or int8 ``[T, K/2]``.
        scale: fp32 ``[ceil(T/bh), ceil(K/bw)]``.
        block: ``(bh, bw)``.

    Returns:
        fp32 ``[T, K]``.
    """
    values = code_values(codes)
    return values * spread_blocks(scale, block, values.shape[0], values.shape[1])

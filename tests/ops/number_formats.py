"""Number formats from their definitions: bit fields and nearest neighbours, in plain numpy.

Tests of codecs, quantizers and operators compare the package with these slow forms.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]


def e4m3_value(code: int) -> float:
    """``s eeee mmm`` with bias 7; field 0 is subnormal, all ones is NaN."""
    exponent, mantissa = code >> 3 & 0xF, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        magnitude = math.ldexp(mantissa, -9)
    else:
        magnitude = math.ldexp(8 + mantissa, exponent - 10)
    return math.copysign(magnitude, -1.0 if code & 0x80 else 1.0)


def e2m1_value(code: int) -> float:
    """``s ee m`` with bias 1; field 0 is subnormal."""
    exponent, mantissa = code >> 1 & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else math.ldexp(2 + mantissa, exponent - 2)
    return math.copysign(magnitude, -1.0 if code & 8 else 1.0)


E4M3_MAGNITUDES = np.array([e4m3_value(code) for code in range(0x7F)])
E2M1_MAGNITUDES = np.array([e2m1_value(code) for code in range(8)])


def _nearest(values: Floats, magnitudes: Floats) -> Codes:
    size = np.minimum(np.abs(values), magnitudes[-1])
    distance = np.abs(size[..., None] - magnitudes)
    closest = distance == distance.min(axis=-1, keepdims=True)
    # Two neighbours are closest at a tie, and exactly one of their codes is even.
    return np.where(closest, np.arange(len(magnitudes)) % 2, 2).argmin(axis=-1)


def nearest_e4m3(values: Floats) -> Codes:
    """Codes of the nearest e4m3 values, ties to even, saturating, sign of zero kept."""
    return _nearest(values, E4M3_MAGNITUDES) | np.where(np.signbit(values), 0x80, 0)


def nearest_e2m1(values: Floats) -> Codes:
    """Unpacked codes of the nearest e2m1 values, ties to even, saturating, sign of zero kept."""
    return _nearest(values, E2M1_MAGNITUDES) | np.where(np.signbit(values), 8, 0)


def e4m3_values(codes: Codes) -> Floats:
    """Values of e4m3 codes."""
    return np.array([e4m3_value(code) for code in range(256)])[codes]


def e2m1_values(codes: Codes) -> Floats:
    """Values of unpacked e2m1 codes."""
    return np.array([e2m1_value(code) for code in range(16)])[codes]


def pack_nibbles(codes: Codes) -> NDArray[np.uint8]:
    """Even columns in the low nibbles."""
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8)


def bf16(values: Floats | NDArray[np.float32]) -> NDArray[np.float32]:
    """fp32 numbers rounded to bf16 (nearest, ties to even), as fp32."""
    with np.errstate(over="ignore"):
        word = np.asarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    word = word + 0x7FFF + (word >> 16 & 1) & 0xFFFF0000
    return word.astype(np.uint32).view(np.float32)


def round_to_fp32(exact: Fraction) -> float:
    """The nearest fp32 number, found among the neighbours of a guess."""
    guess = np.float32(float(exact))
    near = [np.nextafter(guess, np.float32(side)) for side in (-np.inf, np.inf)]
    return float(min([guess, *near], key=lambda value: abs(Fraction(float(value)) - exact)))


def fused(a: float, b: float, c: float) -> float:
    """``a * b + c`` rounded once to fp32."""
    return round_to_fp32(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


def wide(x: Tensor) -> Floats:
    """A tensor's values in fp64."""
    return x.to(torch.float64).numpy()


def bits(x: Tensor) -> Tensor:
    """A tensor's words as integers, to compare zeros with their sign, and NaN."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(integers[x.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree in type, shape and every bit."""
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Gaussian numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_bytes(shape: tuple[int, ...], seed: int, low: int = 0, high: int = 256) -> Tensor:
    """Uniform uint8 numbers in ``[low, high)``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator).to(torch.uint8)


def finite_e4m3_codes(shape: tuple[int, ...], seed: int) -> Tensor:
    """Uniform e4m3 codes without the two NaN."""
    magnitude = random_bytes(shape, seed, 0, 0x7F)
    return magnitude | (random_bytes(shape, seed + 1, 0, 2) << 7)

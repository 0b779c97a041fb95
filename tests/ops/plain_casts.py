"""Group casts from their definitions, one group at a time."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.ops.number_formats import (
    e2m1_values,
    e4m3_value,
    e4m3_values,
    nearest_e2m1,
    nearest_e4m3,
    pack_nibbles,
)

F32 = np.float32


def _power_exponent(ratio: Fraction) -> int:
    """Biased exponent of the smallest power of two that is at least ``ratio``."""
    exponent = 0
    while Fraction(2) ** exponent < ratio:
        exponent += 1
    while Fraction(2) ** (exponent - 1) >= ratio:
        exponent -= 1
    return exponent + 127


def _group(x: NDArray[np.float32], values: str, scale: str, power: bool) -> tuple[Fraction, bytes]:
    top = 448 if values == "e4m3" else 6
    floor = {"e4m3": F32(1e-4), "e2m1": F32(6.0 * 2.0**-126)}[values]
    if scale == "e4m3":
        a = max(np.abs(x).max(), F32(6.0 * 2.0**-9))
        code = int(nearest_e4m3(np.array([min(F32(a * F32(1 / 6)), F32(448))], dtype=float))[0])
        return Fraction(float(F32(1) / F32(e4m3_value(code)))), bytes([code])
    a = max(np.abs(x).max(), floor)
    if scale == "ue8m0" or power:
        biased = _power_exponent(Fraction(float(a)) / top)
        word = F32(2.0 ** (biased - 127)).tobytes()
        return Fraction(2) ** (127 - biased), bytes([biased]) if scale == "ue8m0" else word
    return Fraction(float(F32(top) / a)), F32(a / F32(top)).tobytes()


def plain_cast(
    x: Tensor, values: str, group: int, scale: str, power: bool = True
) -> tuple[Tensor, Tensor]:
    """``[n, C]`` to uint8 codes ``[n, C]`` or ``[n, C/2]`` and the bytes of its scales."""
    numbers = x.to(torch.float32).numpy()
    scaled = np.empty(numbers.shape, dtype=np.float64)
    scales = np.empty((len(numbers), numbers.shape[1] // group), dtype=object)
    for row in range(len(numbers)):
        for place in range(numbers.shape[1] // group):
            part = slice(place * group, (place + 1) * group)
            factor, scales[row, place] = _group(numbers[row, part], values, scale, power)
            scaled[row, part] = numbers[row, part] * F32(float(factor))
    if values == "e4m3":
        codes = nearest_e4m3(scaled).astype(np.uint8)
    else:
        codes = pack_nibbles(nearest_e2m1(scaled))
    packed = [list(b"".join(row)) for row in scales.tolist()]
    shape = (len(numbers), scales.shape[1] * (4 if scale == "fp32" else 1))
    return torch.from_numpy(codes), torch.tensor(packed, dtype=torch.uint8).view(shape)


def plain_values(codes: Tensor, scale: Tensor, values: str, group: int, kind: str) -> Tensor:
    """bf16 values of codes and of the bytes of their scales."""
    raw = codes.numpy().astype(np.int64)
    if values == "e4m3":
        numbers = e4m3_values(raw)
    else:
        numbers = e2m1_values(np.stack((raw & 15, raw >> 4), axis=-1).reshape(len(raw), -1))
    if kind == "fp32":
        factor = scale.contiguous().numpy().view(np.float32).astype(np.float64)
    elif kind == "ue8m0":
        factor = 2.0 ** (scale.numpy().astype(np.float64) - 127)
    else:
        factor = e4m3_values(scale.numpy().astype(np.int64))
    product = (numbers.astype(F32) * np.repeat(factor, group, axis=1).astype(F32)).astype(F32)
    return torch.from_numpy(product).to(torch.bfloat16)


def one_rounding(got: Tensor, exact: Tensor, slack: float = 0.0) -> bool:
    """Whether bf16 numbers are fp64 numbers rounded once, up to ``slack`` and fp32 errors."""
    numbers = exact.numpy()
    half = np.ldexp(1.001, np.frexp(numbers)[1] - 9)
    error = np.abs(got.double().numpy() - numbers)
    return got.dtype == torch.bfloat16 and bool((error <= half + slack).all())

"""Cache records by their definition: fp64, tables of all values, nothing shared with the engine.

| record | codes | group | scale |
|---|---|---|---|
| window key | e4m3 | 32 | ue8m0: smallest power of two with ``amax <= 448 * scale`` |
| compressed key | e2m1 | 16 | e4m3, nearest to ``amax / 6`` |
| index key | e2m1 | 32 | ue8m0: smallest power of two with ``amax <= 6 * scale`` |

A record is its codes (two e2m1 codes per byte, the even channel in the low half), then its scales.
Values go to the nearest code, and to the even one of two.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E4M3 = np.array(
    [m * 2.0**-9 for m in range(8)]
    + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
)
"""Magnitudes by code; the last code of e4m3 is no number."""


@dataclass(frozen=True)
class Record:
    """Codes ``[n, channels]`` with the sign in the top bit, and scale bytes ``[n, groups]``."""

    codes: Codes
    scales: Codes
    magnitudes: Floats

    @property
    def order(self) -> Codes:
        """The codes counted from zero in the order of their values; both zeros are 0."""
        magnitude = self.codes % _sign_bit(self.magnitudes)
        return np.where(self.codes == magnitude, magnitude, -magnitude)


def window_record(values: Tensor) -> Record:
    """Record of bf16 values ``[n, channels]``."""
    return _power_of_two_record(values, E4M3, floor=float(np.float32(1e-4)))


def index_record(values: Tensor) -> Record:
    """Record of bf16 values ``[n, channels]``."""
    return _power_of_two_record(values, E2M1, floor=6 * 2.0**-126)


def compressed_record(values: Tensor) -> Record:
    """Record of bf16 values ``[n, channels]``.

    The division by the scale is a product with its fp32 reciprocal, rounded to fp32.
    """
    groups = _grouped(values, 16)
    amax = np.maximum(np.abs(groups).max(-1), 6 * 2.0**-9).astype(np.float32)
    scales = _nearest((amax * np.float32(1 / 6)).astype(np.float64), E4M3)
    reciprocal = np.float32(1) / E4M3[scales].astype(np.float32)
    scaled = groups.astype(np.float32) * reciprocal[..., None]
    return Record(_flat(_nearest(scaled.astype(np.float64), E2M1)), scales, E2M1)


def parse(records: Tensor, channels: int, group: int, magnitudes: Floats) -> Record:
    """Take the bytes ``[n, width]`` of a cache apart."""
    table = records.numpy().astype(np.int64)
    split = table.shape[1] - channels // group
    data, scales = table[:, :split], table[:, split:]
    if len(magnitudes) == len(E2M1):
        data = np.stack((data & 15, data >> 4), -1).reshape(len(data), channels)
    return Record(data, scales, magnitudes)


def _power_of_two_record(values: Tensor, magnitudes: Floats, floor: float) -> Record:
    groups = _grouped(values, 32)
    amax = np.maximum(np.abs(groups).max(-1), floor)
    mantissa, exponent = np.frexp(amax / magnitudes[-1])  # mantissa in [0.5, 1)
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
    codes = _nearest(groups / np.exp2(exponent)[..., None], magnitudes)
    return Record(_flat(codes), exponent + 127, magnitudes)


def _grouped(values: Tensor, width: int) -> Floats:
    return values.double().numpy().reshape(len(values), -1, width)


def _flat(codes: Codes) -> Codes:
    return codes.reshape(len(codes), -1)


def _sign_bit(magnitudes: Floats) -> int:
    return 8 if len(magnitudes) == len(E2M1) else 128


def _nearest(values: Floats, magnitudes: Floats) -> Codes:
    middle = (magnitudes[1:] + magnitudes[:-1]) / 2
    size = np.abs(values)
    below = np.searchsorted(middle, size, side="left")
    tie = np.isin(size, middle) & (below % 2 == 1)
    return below + tie + np.signbit(values) * _sign_bit(magnitudes)

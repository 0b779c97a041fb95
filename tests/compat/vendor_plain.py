"""Random quantized matrices with their exact values, and scale words put together byte by byte."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tests.ops.number_formats import Floats, e2m1_values, e4m3_values, pack_nibbles

WORDS = (torch.int16, torch.int32)


def packed_words(exponents: np.ndarray, word: torch.dtype) -> Tensor:
    """Little-endian words of bytes ``[..., G]``, missing bytes 0."""
    per = word.itemsize
    *lead, groups = exponents.shape
    flat = exponents.reshape(-1, groups)
    count = -(-groups // per)
    out = np.zeros((flat.shape[0], count), dtype=np.int64)
    for row in range(flat.shape[0]):
        for group in range(groups):
            out[row, group // per] += int(flat[row, group]) << 8 * (group % per)
    bits = 8 * per
    out = np.where(out >= 1 << (bits - 1), out - (1 << bits), out)
    return torch.from_numpy(out.reshape(*lead, count)).to(word)


def by_columns(x: Tensor, length: int | None = None) -> Tensor:
    """A copy whose last two axes have strides ``(1, length)``."""
    *lead, rows, width = x.shape
    storage = torch.full((*lead, width, length or max(rows, 1)), -1, dtype=x.dtype)
    storage[..., :rows] = x.transpose(-1, -2)
    return storage[..., :rows].transpose(-1, -2)


class Quantized:
    """Random codes with a power-of-two scale per row and group.

    Attributes:
        codes: e4m3 ``[..., K]`` or int8 ``[..., K/2]``.
        exponents: uint8 bytes ``[..., K / group]``.
        values: exact, fp64 ``[..., K]``.
    """

    def __init__(
        self, shape: tuple[int, ...], seed: int, fmt: str = "e4m3", group: int = 32
    ) -> None:
        rng = np.random.default_rng(seed)
        *lead, width = shape
        self.exponents = rng.integers(122, 132, (*lead, width // group)).astype(np.uint8)
        if fmt == "e4m3":
            codes = rng.integers(0, 0x7F, shape) | rng.integers(0, 2, shape) << 7
            values: Floats = e4m3_values(codes)
            raw = torch.from_numpy(codes.astype(np.uint8))
            self.codes = raw.view(torch.float8_e4m3fn)
        else:
            codes = rng.integers(0, 16, shape)
            values = e2m1_values(codes)
            self.codes = torch.from_numpy(pack_nibbles(codes)).view(torch.int8)
        factor = 2.0 ** (self.exponents.astype(np.float64) - 127)
        self.values = values * np.repeat(factor, group, axis=-1)

    def pair(self, word: torch.dtype, columns: bool = False) -> tuple[Tensor, Tensor]:
        """Codes and packed scales, by rows or by columns."""
        scale = packed_words(self.exponents, word)
        return self.codes, by_columns(scale) if columns else scale


def calc_diff(actual: Tensor, expected: Floats) -> float:
    """``1 - 2 sum(xy) / sum(x^2 + y^2)`` in fp64, 0 if both are zero."""
    x = actual.to(torch.float64).numpy()
    bottom = float((x * x + expected * expected).sum())
    return 1.0 - 2.0 * float((x * expected).sum()) / bottom if bottom else 0.0


def one_rounding(actual: Tensor, expected: Floats, terms: Floats) -> bool:
    """Whether bf16 ``actual`` is ``expected`` rounded once, up to the error of an fp32 sum.

    ``terms`` bounds each sum of magnitudes.
    """
    exact = torch.from_numpy(expected)
    slack = torch.from_numpy(terms) * 2.0**-20
    low = (exact - slack).to(torch.float32).to(actual.dtype)
    high = (exact + slack).to(torch.float32).to(actual.dtype)
    return bool(((actual >= low) & (actual <= high)).all())

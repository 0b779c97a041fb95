"""Output tensors inside larger buffers, to see what a kernel writes besides them."""

from __future__ import annotations

import torch
from torch import Tensor

SENTINEL = 0xA5


class Guarded:
    """A strided view whose surroundings are guard bytes; the view starts as guard bytes too."""

    def __init__(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: torch.dtype,
        offset: int = 0,
        behind: int = 8,
    ) -> None:
        last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True) if n)
        self._shape, self._strides, self._offset = shape, strides, offset
        self._elements = offset + last + 1 + behind
        self.bytes = torch.full((self._elements * dtype.itemsize,), SENTINEL, dtype=torch.uint8)
        self.view = self.bytes.view(dtype).as_strided(shape, strides, offset)

    def intact(self) -> bool:
        """Whether every byte outside the view is still a guard byte."""
        outside = torch.ones(self._elements, dtype=torch.bool)
        outside.as_strided(self._shape, self._strides, self._offset).fill_(False)
        return bool((self.bytes.view(self._elements, -1)[outside] == SENTINEL).all())


def guarded_rows(rows: int, width: int, dtype: torch.dtype, gap: int = 5) -> Guarded:
    """``[rows, width]`` with ``gap`` guard elements between rows and around them."""
    return Guarded((rows, width), (width + gap, 1), dtype, offset=gap)


def strided(x: Tensor, gap: int = 3) -> Tensor:
    """The same matrix with ``gap`` unused elements behind every row."""
    wide = torch.zeros(x.shape[0], x.shape[1] + gap, dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def integers(shape: tuple[int, ...], low: int, high: int, seed: int) -> Tensor:
    """Uniform int32 numbers in ``[low, high)``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator).to(torch.int32)


def prefix(lengths: list[int]) -> Tensor:
    """int32 prefix sums with a zero in front."""
    return torch.tensor([sum(lengths[:n]) for n in range(len(lengths) + 1)], dtype=torch.int32)

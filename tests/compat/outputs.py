"""Outputs inside larger buffers, to see that a kernel writes nothing else."""

from __future__ import annotations

import torch
from torch import Tensor


class Output:
    """A view of the given shape with foreign bytes all around it.

    One-dimensional views are contiguous, others have strided rows.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        margins = [n + 2 for n in shape[:-1]] + [shape[-1] + 5]
        size = torch.tensor([], dtype=dtype).element_size()
        count = torch.Size(margins).numel() * size
        # A bool may only hold 0 or 1.
        pattern = torch.arange(count) % (2 if dtype == torch.bool else 100)
        self._buffer = pattern.to(torch.uint8).view(dtype).view(margins)
        self._region = tuple(slice(1, n + 1) for n in shape)
        self._before = self._buffer.clone()

    @property
    def view(self) -> Tensor:
        """What the kernel writes to."""
        return self._buffer[self._region]

    @property
    def before(self) -> Tensor:
        """What the view held at first."""
        return self._before[self._region]

    def check(self, expected: Tensor) -> None:
        """The view holds the expected bits and the rest of the buffer what it held before."""
        wanted = self._before.clone()
        wanted[self._region] = expected.to(wanted.dtype)
        assert torch.equal(bits(self.view), bits(wanted[self._region])), "the view is wrong"
        assert torch.equal(bits(self._buffer), bits(wanted)), "something else was overwritten"


def bits(x: Tensor) -> Tensor:
    """The bytes of a tensor, so that NaN and -0 compare like anything else."""
    return x.contiguous().view(-1).view(torch.uint8)

"""Row gather."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops.gather import gather_rows

_WORKSPACE_BYTES = 1 << 20
"""Rows copied at once, so that they stay in cache between two passes."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


@cache
def gather_tl(
    D: int, dtype: torch.dtype, index_dtype: torch.dtype, x_stride: int
) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Copy rows; an index outside the table gives a zero row.

    ``x_stride`` is the row stride of the table, for device kernels.

    Kernel: ``x [n, D]``, ``index [m] i32 | i64``, ``-> y [m, D]``.
    """
    if index_dtype not in (torch.int32, torch.int64):
        raise ConfigError(f"gather: indices are int32 or int64, not {index_dtype}")

    def kernel(x: Tensor, index: Tensor, y: Tensor) -> None:
        x, y = _in_words(x, y)
        step = max(1, _WORKSPACE_BYTES // max(1, x.shape[1] * x.element_size()))
        for start in range(0, index.shape[0], step):
            rows = slice(start, start + step)
            y[rows] = gather_rows(x, index[rows].to(torch.int64))

    return kernel


def _in_words(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both tensors in the widest words that their rows, strides and offsets are made of."""
    size = x.element_size()
    counts = (x.shape[1], x.stride(0), x.storage_offset(), y.stride(0), y.storage_offset())
    for width, dtype in _WORDS.items():
        if width > size and not any(count * size % width for count in counts):
            return x.view(dtype), y.view(dtype)
    return x, y

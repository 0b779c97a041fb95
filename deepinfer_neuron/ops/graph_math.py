"""Rotation and byte gathers in the forms a graph compiler takes: 32-bit numbers only.

The host rounds a fused multiply-add once, by way of fp64. A graph has no fp64, so a rotation rounds
twice here unless the compiler fuses it, and is **not** bit-identical. The gathers are exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops.gather import gather_rows

_WORD = 4


def turn_pairs(x0: Tensor, x1: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """``x0 c - x1 s`` and ``x0 s + x1 c`` of fp32 tensors that broadcast, in fp32."""
    return x0 * cos - x1 * sin, x0 * sin + x1 * cos


def byte_words(table: Tensor) -> Tensor:
    """A table of bytes as one of 32-bit words, without a copy.

    To be called before a graph is traced: reinterpreting a narrow type as a wider one does not
    lower.

    Args:
        table: uint8 ``[rows, width]``, contiguous, ``width`` a multiple of 4.

    Returns:
        int32 ``[rows, width / 4]`` that shares the memory.

    Raises:
        ConfigError: another type, a row that is not whole words, or a table with gaps.
    """
    if table.dtype != torch.uint8 or table.dim() != 2:
        raise ConfigError(f"a table of bytes was expected, not {table.dtype} of {table.dim()} axes")
    if table.shape[1] % _WORD:
        raise ConfigError(
            f"rows of {table.shape[1]} bytes are not whole 32-bit words; pad them to a multiple "
            f"of {_WORD} when the table is made"
        )
    if not table.is_contiguous() or table.storage_offset() % _WORD:
        raise ConfigError("a table of bytes must be contiguous and start at a multiple of 4 bytes")
    return table.view(torch.int32)


def gather_bytes(table: Tensor, index: Tensor) -> Tensor:
    """Rows of a table of bytes, gathered as 32-bit words; an index outside it gives zeros.

    Every bit pattern comes through. Gathered as bytes, the table would be widened as a whole.

    Args:
        table: int32 ``[rows, width / 4]`` from :func:`byte_words`; uint8 ``[rows, width]`` is
            accepted outside of graphs that are to be lowered.
        index: int32, any shape.

    Returns:
        uint8 ``[*index.shape, width]``.
    """
    words = byte_words(table) if table.dtype == torch.uint8 else table
    return gather_rows(words, index).view(torch.uint8)

"""fp8 weights for matrix units whose e4m3 ends at 240.

The files hold e4m3fn, which uses the exponent field 15 for the values 256 to 448. Trainium2 has
the IEEE-like e4m3 instead: that field means infinity or NaN and 240 is the largest value. So codes
are halved and scales doubled, ``c' = RNE(c / 2)`` and ``s' = 2 s``, and every product ``c' s'``
equals ``c s``, except for 16 codes: a magnitude code below 16 counts steps of 2^-9, and half of an
odd number of steps is rounded to an even one, which is off by half a step. Blocks whose codes all
stay within 240 can be left as they are, which costs nothing and is exact.

This runs on the host when weights are loaded for such a unit, and never otherwise: the host
computes with the codes of the files.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_neuron.checkpoint.formats import FP8_BLOCK
from deepinfer_neuron.errors import CheckpointError, ConfigError

IEEE_E4M3_MAX = 240.0
"""Largest value of the matrix unit's format."""

_MAGNITUDE = 0x7F
_NAN = 0x7F
_LARGEST = 0x77
_STEPS = 16
_LARGEST_SCALE = 253


def halved_code(code: int) -> int:
    """The e4m3 code of half a code's value, ties to even; raises for the two NaN codes."""
    sign, magnitude = code & 0x80, code & _MAGNITUDE
    if magnitude == _NAN:
        raise CheckpointError(f"code {code:#04x} is not a number and cannot be rescaled")
    if magnitude >= _STEPS:
        # One less in the exponent field.
        return sign | (magnitude - 8)
    # Python rounds halves to even.
    return sign | round(magnitude / 2)


HALVED_CODES: tuple[int, ...] = tuple(
    code if code & _MAGNITUDE == _NAN else halved_code(code) for code in range(256)
)
"""Lookup table of :func:`halved_code`; the NaN codes, which must not occur, stay."""

ROUNDED_CODES: frozenset[int] = frozenset(
    code for code in range(256) if code & _MAGNITUDE < _STEPS and code % 2
)
"""The 16 codes whose half is rounded."""


@dataclass(frozen=True)
class Rescaled:
    """A matrix for a unit that ends at 240.

    Attributes:
        codes: uint8, same shape as before; magnitudes up to 240.
        scale: uint8 ue8m0, same shape as before.
        blocks: scale blocks of the matrix.
        rescaled: blocks that were rescaled; the others are unchanged.
        rounded: codes whose value changed.
    """

    codes: Tensor
    scale: Tensor
    blocks: int
    rescaled: int
    rounded: int


def rescale_fp8(
    codes: Tensor,
    scale: Tensor,
    *,
    block: tuple[int, int] = (FP8_BLOCK, FP8_BLOCK),
    every_block: bool = False,
) -> Rescaled:
    """Bring a matrix within 240.

    Args:
        codes: uint8 e4m3fn ``[N, K]`` on the host, without NaN codes.
        scale: uint8 ue8m0 ``[ceil(N/rows), ceil(K/columns)]``.
        block: ``(rows, columns)`` that share a scale; ``(1, 32)`` for rows of groups.
        every_block: rescale all blocks, not only those that hold a code above 240.

    Raises:
        ConfigError: the scales do not fit the matrix.
        CheckpointError: a NaN code, or a scale that cannot be doubled.
    """
    rows, columns = codes.shape
    expected = (-(-rows // block[0]), -(-columns // block[1]))
    if tuple(scale.shape) != expected:
        raise ConfigError(
            f"scales of shape {list(scale.shape)} do not fit a {rows} x {columns} matrix in blocks "
            f"of {block[0]} x {block[1]}; {list(expected)} are needed"
        )
    magnitude = codes & _MAGNITUDE
    invalid = int((magnitude == _NAN).sum())
    if invalid:
        raise CheckpointError(f"{invalid} codes of an fp8 matrix are not numbers; reload the file")
    chosen = _any_in_block(magnitude > _LARGEST, expected, block)
    if every_block:
        chosen = torch.ones_like(chosen)
    _check_scales(scale, chosen)
    inside = _spread(chosen, block, rows, columns)
    halved = torch.from_numpy(np.asarray(HALVED_CODES, np.uint8)[codes.numpy()])
    rounded = inside & (magnitude < _STEPS) & (codes & 1).to(torch.bool)
    return Rescaled(
        codes=torch.where(inside, halved, codes),
        scale=scale + chosen.to(torch.uint8),
        blocks=chosen.numel(),
        rescaled=int(chosen.sum()),
        rounded=int(rounded.sum()),
    )


def _check_scales(scale: Tensor, chosen: Tensor) -> None:
    """Refuse scales whose double is no number."""
    if bool(((scale > _LARGEST_SCALE) & chosen).any()):
        raise CheckpointError(
            f"a block scale is {int(scale[chosen].max())}, but one above {_LARGEST_SCALE} (2^126) "
            "cannot be doubled; this matrix does not fit the matrix unit's fp8"
        )


def _any_in_block(marks: Tensor, counts: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """bool ``[N, K]`` to bool per block: whether it holds a mark."""
    missing = (counts[0] * block[0] - marks.shape[0], counts[1] * block[1] - marks.shape[1])
    padded = F.pad(marks, (0, missing[1], 0, missing[0]))
    return padded.view(counts[0], block[0], counts[1], block[1]).any(dim=3).any(dim=1)


def _spread(chosen: Tensor, block: tuple[int, int], rows: int, columns: int) -> Tensor:
    """bool per block to bool ``[rows, columns]``."""
    tall = chosen.repeat_interleave(block[0], dim=0)[:rows]
    return tall.repeat_interleave(block[1], dim=1)[:, :columns]

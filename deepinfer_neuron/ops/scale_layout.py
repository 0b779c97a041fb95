"""Where the scales of quantized matrices lie in memory.

A ue8m0 scale is one byte, the biased exponent of a power of two. Bytes are packed little-endian
into words: four to an int32, two to an int16. Matrices of scales ``[T, words]`` are kept row by
row, or column by column ("column-major": the view has strides ``(1, L)``, ``L >= T``).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_neuron.checkpoint.formats import decode_ue8m0
from deepinfer_neuron.errors import ConfigError

_BYTES = {torch.int32: 4, torch.int16: 2}


def exponents_per_word(word: torch.dtype) -> int:
    """Exponents that fit a word: 4 for int32, 2 for int16.

    Raises :class:`ConfigError` for any other type.
    """
    if word not in _BYTES:
        raise ConfigError(f"packed scales of type {word} are not known; use torch.int16 or int32.")
    return _BYTES[word]


def aligned_length(rows: int, itemsize: int) -> int:
    """``rows`` rounded up to a whole number of 16 bytes' worth of elements."""
    step = max(1, 16 // itemsize)
    return -(-rows // step) * step


def pack_exponents(exponents: Tensor, word: torch.dtype) -> Tensor:
    """Pack bytes along the last axis.

    Args:
        exponents: uint8 ``[..., G]``.
        word: int32 or int16.

    Returns:
        ``[..., ceil(G / n)]`` of ``word``, contiguous; missing bytes are 0.
    """
    missing = -exponents.shape[-1] % exponents_per_word(word)
    return F.pad(exponents, (0, missing)).contiguous().view(word)


def unpack_exponents(words: Tensor, groups: int) -> Tensor:
    """The first ``groups`` bytes of every row: packed ``[..., W]`` to uint8 ``[..., groups]``.

    Any strides. Raises :class:`ConfigError` if the words hold fewer bytes.
    """
    held = words.shape[-1] * exponents_per_word(words.dtype)
    if held < groups:
        raise ConfigError(
            f"scales of shape {list(words.shape)} hold {held} groups per row, {groups} are needed; "
            "check the scales' group width."
        )
    return word_bytes(words)[..., :groups]


def word_bytes(words: Tensor) -> Tensor:
    """Bytes of ``[..., W]`` of any type and strides: uint8 ``[..., W * itemsize]``."""
    # A new last axis has stride 1, which a contiguous tensor of one column need not have.
    return words.unsqueeze(-1).view(torch.uint8).flatten(-2)


def scale_exponents(scale: Tensor) -> Tensor:
    """Biased exponents of fp32 powers of two: uint8, same shape; the mantissa is ignored."""
    return (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)


def scale_values(scale: Tensor, groups: int) -> Tensor:
    """fp32 factors of scales in any layout.

    Args:
        scale: packed words ``[..., W]``, or fp32 or e4m3 ``[..., groups]``; any strides.
        groups: scales per row.

    Returns:
        fp32 ``[..., groups]``.
    """
    if scale.dtype in _BYTES:
        return decode_ue8m0(unpack_exponents(scale, groups))
    return scale[..., :groups].to(torch.float32)


def column_major(x: Tensor, length: int) -> Tensor:
    """A copy whose last two axes have strides ``(1, length)``.

    Args:
        x: ``[..., T, W]``.
        length: elements from one column to the next, at least ``T``.
    """
    *lead, rows, width = x.shape
    storage = x.new_zeros(*lead, width, max(length, 1))
    view = storage[..., :rows].transpose(-1, -2)
    return view.copy_(x)


def spread_rows(x: Tensor, rows: int, height: int) -> Tensor:
    """Row ``i`` of the result is row ``i // height`` of ``x``: ``[..., R, G]`` to ``rows``."""
    index = torch.arange(rows, device=x.device) // height
    return x.index_select(x.dim() - 2, index)


def required_layout(
    scale: Tensor, rows: int, columns: int, block: tuple[int, int], word: torch.dtype
) -> Tensor:
    """Packed, column-major scales with one row per matrix row.

    Args:
        scale: fp32 powers of two ``[..., ceil(rows/bh), ceil(columns/bw)]``; packed scales
            ``[..., rows, words]`` are returned as they are.
        rows: rows of the matrix.
        columns: its columns.
        block: ``(bh, bw)``, the block that shares a scale.
        word: int32 or int16.

    Returns:
        ``[..., rows, ceil(G / n)]`` of ``word`` with strides ``(1, L)``, ``L`` the rows rounded up
        to 16 bytes; row ``i`` is source row ``i // bh``, missing bytes are 0.

    Raises:
        ConfigError: the scales have another shape or type.
    """
    groups = -(-columns // block[1])
    words = -(-groups // exponents_per_word(word))
    packed = scale.dtype in _BYTES
    expected = (rows, words) if packed else (-(-rows // block[0]), groups)
    allowed = word if packed else torch.float32
    if tuple(scale.shape[-2:]) != expected or scale.dtype != allowed:
        raise ConfigError(
            f"scales {scale.dtype} {list(scale.shape)} do not fit a {rows} x {columns} matrix in "
            f"blocks of {block[0]} x {block[1]}; give {allowed} [..., {expected[0]}, {expected[1]}]"
            "."
        )
    if packed:
        return scale
    exponents = spread_rows(scale_exponents(scale), rows, block[0])
    return column_major(pack_exponents(exponents, word), aligned_length(rows, word.itemsize))

"""Paged caches of byte records: where a record's sections lie, and reads and writes by row."""

from __future__ import annotations

import torch
from torch import Tensor


def page_sections(
    pages: Tensor, data_bytes: int, scale_bytes: int, *, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Views of the data and of the scales of paged records.

    Args:
        pages: uint8 ``[blocks, size, bytes]`` with any page stride and storage offset.
        data_bytes: bytes of data per record.
        scale_bytes: bytes of scales per record.
        interleaved: a record is data and scales; otherwise a page holds the data of all its
            records, then all their scales.

    Returns:
        ``[blocks, size, data_bytes]`` and ``[blocks, size, scale_bytes]``, sharing the storage.
    """
    if interleaved:
        return pages[..., :data_bytes], pages[..., data_bytes : data_bytes + scale_bytes]
    blocks, size = pages.shape[:2]
    stride, start = pages.stride(0), pages.storage_offset()
    data = pages.as_strided((blocks, size, data_bytes), (stride, data_bytes, 1), start)
    start += size * data_bytes
    return data, pages.as_strided((blocks, size, scale_bytes), (stride, scale_bytes, 1), start)


def write_rows(section: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows to cache slots, in place.

    Args:
        section: ``[blocks, size, width]``, any strides.
        slots: int64 ``[n]``, inside the cache and distinct.
        rows: ``[n, width]``, same dtype.
    """
    size = section.shape[1]
    section[slots.div(size, rounding_mode="floor"), slots.remainder(size)] = rows


def segment_rows(segments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rows that load segments name.

    Args:
        segments: int32 ``[S, 4]``, rows (block, begin, end, destination): rows begin to end of a
            block go to consecutive rows from the destination on.

    Returns:
        int64 ``[n]`` each: block, row inside it, and output row.
    """
    block, begin, end, destination = segments.to(torch.int64).unbind(1)
    length = (end - begin).clamp_(min=0)
    owner = torch.repeat_interleave(length)
    step = torch.arange(owner.shape[0], device=segments.device) - (length.cumsum(0) - length)[owner]
    return block[owner], begin[owner] + step, destination[owner] + step

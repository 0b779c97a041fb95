"""Writing keys to paged caches, and loading ranges of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from deepinfer_neuron.compat.tilelang_ops.cache_layout import CacheLayout, layout_format
from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops.kv_pages import page_sections, segment_rows, write_rows
from deepinfer_neuron.ops.record_cast import decode_rows, encode_rows

_ROWS = 1024
"""Rows cast at once, so that intermediates stay in cache."""


def _check_block_size(name: str, block_size: int) -> None:
    if block_size < 1:
        raise ConfigError(f"{name}: block_size is {block_size}, it must be positive")


def stored_rows(slots: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Rows that have a slot, and their slots: int32 ``[n]`` to two int64 ``[m]``."""
    rows = ((slots >= 0) & (slots < capacity)).nonzero()[:, 0]
    return rows, slots.index_select(0, rows).to(torch.int64)


def store_codes(
    cache_pages: Tensor, slots: Tensor, codes: Tensor, scale: Tensor, *, interleaved: bool
) -> None:
    """Write records to slots: uint8 codes ``[n, bytes]`` and scales ``[n, groups]``."""
    scale = scale.contiguous().view(torch.uint8)
    if interleaved:
        record = torch.cat((codes, scale), 1)
        write_rows(cache_pages[..., : record.shape[1]], slots, record)
        return
    sections = page_sections(cache_pages, codes.shape[1], scale.shape[1], interleaved=False)
    write_rows(sections[0], slots, codes)
    write_rows(sections[1], slots, scale)


@cache
def store_kv_cache_tl(
    layout: CacheLayout,
    block_size: int,
    *,
    tokens_per_tile: int = 4,
    num_stages: int = 3,
    contiguous_slots: bool = True,
    skip_invalid_tiles: bool = True,
    use_reciprocal_lut: bool = True,
    input_l2_cache_ctrl: str = "NOTALLOC_KEEP",
    rows_per_step: int = 1,
) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Quantize keys and write them to their slots; a negative slot writes nothing.

    The keyword arguments tune device kernels and change nothing here.

    Kernel: ``kv [n, D] bf16``, ``<-> cache [blocks, block_size, bytes] u8`` (plain layout: bf16
    ``[blocks, block_size, D]``), ``slots [n] i32``.
    """
    _check_block_size("store_kv_cache", block_size)
    fmt = layout_format(layout)
    interleaved = layout.token_interleaved

    def kernel(kv: Tensor, cache_pages: Tensor, slots: Tensor) -> None:
        rows, where = stored_rows(slots, cache_pages.shape[0] * cache_pages.shape[1])
        for row, slot in zip(rows.split(_ROWS), where.split(_ROWS), strict=True):
            values = kv.index_select(0, row)
            if fmt is None:
                write_rows(cache_pages, slot, values)
            else:
                store_codes(cache_pages, slot, *encode_rows(values, fmt), interleaved=interleaved)

    return kernel


@cache
def load_paged_kv_cache_tl(
    layout: CacheLayout,
    block_size: int,
    fp4_value_block_stride: int = 0,
    fp4_value_stride: int = 0,
    fp4_scale_stride: int = 0,
    index_batch_size: int = 1,
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]:
    """Copy segments of cached keys to consecutive rows; block -1 gives zeros.

    The strides and the batch size describe the views for device kernels; here the views do.

    Kernel: ``segments [S, 4] i32`` (block, begin, end, output row), ``-> kv``, ``-> kv_sf``,
    ``cache_value [blocks, block_size, bytes]`` e4m3 or int8, ``cache_sf [blocks, block_size, s]``.
    Dequantizing layouts: ``kv`` and ``kv_sf`` are one bf16 ``[total, D]``. Index layouts: ``kv``
    holds the codes ``[total, bytes]``, ``kv_sf`` the scales ``[total]`` or ``[total, s]``, both as
    stored. Plain layouts: bf16 copies, ``kv_sf`` and ``cache_sf`` repeat the other two.
    """
    _check_block_size("load_paged_kv_cache", block_size)
    fmt = layout_format(layout)
    decode = fmt if layout.do_cast else None

    def kernel(
        segments: Tensor, kv: Tensor, kv_sf: Tensor, cache_value: Tensor, cache_sf: Tensor
    ) -> None:
        pieces = (part.split(_ROWS) for part in segment_rows(segments))
        for block, row, out in zip(*pieces, strict=True):
            absent = block < 0
            at = (block.clamp(min=0), row)
            data = _rows_at(cache_value, at, absent)
            if fmt is None:
                kv[out] = data
                continue
            scale = _rows_at(cache_sf, at, absent)
            if decode is not None:
                kv[out] = decode_rows(data, scale, decode)
            else:
                _as_bytes(kv)[out] = data
                kv_sf[out] = scale.view(-1, *kv_sf.shape[1:])

    return kernel


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _rows_at(section: Tensor, at: tuple[Tensor, Tensor], absent: Tensor) -> Tensor:
    rows: Tensor = _as_bytes(section)[at]
    return rows.masked_fill_(absent[:, None], 0)

"""Rows of the key caches that a query reads: ranges, rings, pages, and their concatenation.

Everything is int32 and wraps like int32; -1 marks a column without a key.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORKSPACE_ELEMENTS = 1 << 20
"""Elements of an index matrix computed at once, so that intermediates stay in cache."""


def range_index(ranges: Tensor, width: int, ring: int = 0) -> Tensor:
    """Consecutive rows, optionally around a ring.

    Column ``j < length`` is ``offset + j``, or ``offset // ring * ring + (offset + j) % ring``.

    Args:
        ranges: int32 ``[n, 2]``, rows (offset, length); a length beyond ``width`` is cut.
        width: columns of the result.
        ring: slots per ring, 0 for none.

    Returns:
        int32 ``[n, width]``, -1 behind the range.
    """
    offset, length = ranges[:, 0, None], ranges[:, 1, None]
    column = torch.arange(width, dtype=torch.int32, device=ranges.device)
    index = offset + column
    if ring:
        index = index.remainder_(ring).add_(offset - offset.remainder(ring))
    return index.masked_fill_(column >= length, -1)


def paged_range_index(ranges: Tensor, width: int, page: int, table: Tensor) -> Tensor:
    """Consecutive tokens of a flattened page table, as cache rows.

    Column ``j < length`` is token ``p = offset + j``: row ``table[p // page] * page + p % page``.

    Args:
        ranges: int32 ``[n, 2]``, rows (offset, length); a length beyond ``width`` is cut.
        width: columns of the result.
        page: tokens per page.
        table: int32 ``[pages]``; only entries that a range needs are used.

    Returns:
        int32 ``[n, width]``, -1 behind the range.
    """
    step = max(1, _WORKSPACE_ELEMENTS // max(1, width))
    if ranges.shape[0] > step:
        parts = ranges.split(step)
        return torch.cat([paged_range_index(part, width, page, table) for part in parts])
    token = range_index(ranges, width)
    column = torch.arange(width, dtype=torch.int32, device=ranges.device)
    absent = column >= ranges[:, 1, None]
    if table.numel() == 0:
        return token.fill_(-1)
    entry = token.div(page, rounding_mode="floor").masked_fill_(absent, 0)
    rows = table.index_select(0, entry.flatten()).view_as(token)
    return rows.mul_(page).add_(token.remainder_(page)).masked_fill_(absent, -1)


def page_rows(tokens: Tensor, page: int, counts: Tensor, tables: Tensor) -> Tensor:
    """Token numbers of a sequence to cache rows, by its page table.

    The first ``counts`` columns become ``table[x // page] * page + x % page``, all others -1. An
    entry of -1 among them stays -1.

    Args:
        tokens: int32 ``[b, s, k]``, token numbers, the valid ones in front.
        page: tokens per page.
        counts: int32 ``[b, s]``, how many columns are valid; may exceed ``k``.
        tables: int32 ``[b, pages]``.

    Returns:
        int32 ``[b, s, k]``.
    """
    column = torch.arange(tokens.shape[2], dtype=torch.int32, device=tokens.device)
    absent = (column >= counts[:, :, None]) | (tokens < 0)
    if tables.shape[1] == 0:
        return torch.full_like(tokens, -1)
    entry = tokens.div(page, rounding_mode="floor").masked_fill_(absent, 0)
    rows = tables.gather(1, entry.flatten(1).to(torch.int64)).view_as(tokens)
    return (rows * page).add_(tokens.remainder(page)).masked_fill_(absent, -1)


def two_range_index(pivots: Tensor, width: int) -> Tensor:
    """Two ranges one behind the other.

    Args:
        pivots: int32 ``[n, 4]``, rows (first offset, first length, second offset, second length).
        width: columns of the result.

    Returns:
        int32 ``[n, width]``, -1 behind the second range.
    """
    first, length, second, more = (part[:, None] for part in pivots.unbind(1))
    column = torch.arange(width, dtype=torch.int32, device=pivots.device)
    index = torch.where(column < length, first, second - length).add_(column)
    return index.masked_fill_(column >= length + more, -1)


def shifted_index(index: Tensor, shift: int) -> Tensor:
    """Add ``shift`` to every entry that is not exactly -1: int32, any shape."""
    return torch.where(index == -1, index, index + shift)

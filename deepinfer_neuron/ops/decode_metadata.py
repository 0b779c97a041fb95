"""Where the rows of a decode step read and write, from the lengths of their sequences.

Everything is int32. ``positions`` are those of the rows; ``state`` is the number of a sequence's
ring of recent keys, ``ring`` its length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_neuron.ops.packed_rows import PackedRows

_WORKSPACE_ELEMENTS = 1 << 20


def decode_positions(lengths: Tensor, context: Tensor, rows: PackedRows) -> Tensor:
    """Position of each row: the last ones of its sequence.

    Args:
        lengths: int32 ``[n]``, rows of each sequence.
        context: int32 ``[n]``, tokens of each sequence, those rows included.
        rows: the ``Q`` rows.

    Returns:
        int32 ``[Q]``.
    """
    return (context - lengths).index_select(0, rows.sequences) + rows.steps


def window_ranges(positions: Tensor, state: Tensor, window: int, ring: int) -> Tensor:
    """Ring slots of the last ``window`` positions up to each row's.

    Args:
        positions: int32 ``[Q]``.
        state: int32 ``[Q]``.
        window: most keys that a row reads.
        ring: slots per ring.

    Returns:
        int32 ``[Q, 2]``, first slot and length.
    """
    length = (positions + 1).clamp_max(window)
    first = state * ring + (positions - length + 1).remainder(ring)
    return torch.stack((first, length), 1)


def window_slots(positions: Tensor, state: Tensor, ring: int) -> Tensor:
    """Ring slot of each row's own key: int32 ``[Q]``."""
    return state * ring + positions.remainder(ring)


def compressed_length(positions: Tensor, ratio: int) -> Tensor:
    """Compressed keys that are complete at a position: int32 ``[Q]``."""
    return (positions + 1).div(ratio, rounding_mode="floor")


def compressed_ranges(positions: Tensor, ratio: int, tokens_per_row: int) -> Tensor:
    """Token range of each row in the flattened block tables of all rows.

    Args:
        positions: int32 ``[Q]``.
        ratio: tokens per compressed key.
        tokens_per_row: compressed keys that a row of the block tables covers.

    Returns:
        int32 ``[Q, 2]``, offset and length.
    """
    row = torch.arange(positions.shape[0], dtype=torch.int32, device=positions.device)
    return torch.stack((row * tokens_per_row, compressed_length(positions, ratio)), 1)


def compressed_stores(
    positions: Tensor, ratio: int, page: int, table: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Where rows that complete a compressed key store it.

    Args:
        positions: int32 ``[Q]``.
        ratio: tokens per compressed key.
        page: compressed keys per page.
        table: int32 ``[pages]``, page tables one behind the other.
        offsets: int32 ``[Q]``, start of each row's table.

    Returns:
        int32 ``[Q]`` positions of the compressed keys, 0 for none, and int32 ``[Q]`` cache slots,
        -1 for none.
    """
    completes = (positions + 1).remainder(ratio) == 0
    key = positions.div(ratio, rounding_mode="floor")
    at = (key * ratio).where(completes, 0)
    if table.shape[0] == 0:
        return at, torch.full_like(positions, -1)
    entry = offsets + key.div(page, rounding_mode="floor")
    # Padding rows may have no tables.
    entry = entry.where(completes, 0).clamp_(0, table.shape[0] - 1)
    slot = table.index_select(0, entry) * page + key.remainder(page)
    return at, slot.where(completes, -1)


def copy_row_tables(out: Tensor, table: Tensor, offsets: Tensor, rows: PackedRows) -> None:
    """Give every row the page table of its sequence, in place.

    Args:
        out: int32 ``[Q, pages]``; columns behind a table keep their values.
        table: int32 ``[p]``, page tables one behind the other.
        offsets: int32 ``[n + 1]``, where they start and end.
        rows: the ``Q`` rows.
    """
    if table.shape[0] == 0:
        return
    first = offsets.index_select(0, rows.sequences)
    length = offsets.index_select(0, rows.sequences + 1) - first
    first, length = first[:, None], length.where(rows.used, 0)[:, None]
    column = torch.arange(out.shape[1], dtype=torch.int32, device=out.device)
    # In pieces, so that the index matrices stay in cache.
    step = max(1, _WORKSPACE_ELEMENTS // max(1, out.shape[1]))
    parts = (x.split(step) for x in (out, first, length))
    for target, start, count in zip(*parts, strict=True):
        present = column < count
        entry = (start + column).clamp_(0, table.shape[0] - 1)
        value = table.index_select(0, entry.flatten()).view_as(entry)
        target.copy_(value.where(present, target))

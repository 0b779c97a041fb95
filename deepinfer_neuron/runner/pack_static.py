"""From plain numbers to the one upload of a static pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_neuron.cache.pools import BLOCK_TOKENS
from deepinfer_neuron.model.shapes import PassShape
from deepinfer_neuron.model.static.metadata import MetadataLayout
from deepinfer_neuron.runner.pack import ChunkPlan, StepGeometry

Words = NDArray[np.int32]


@dataclass(frozen=True)
class StaticPlan:
    """The next tokens of one sequence, and how many of them are drafts to verify."""

    chunk: ChunkPlan
    drafts: int = 0


@dataclass(frozen=True)
class _Grid:
    """Positions of a pass, ``[S, Q]``; padding is position 0 of slot 0."""

    valid: NDArray[np.bool_]
    position: NDArray[np.int64]
    begin: NDArray[np.int64]  # [S]
    end: NDArray[np.int64]  # [S]
    slot: NDArray[np.int64]  # [S]
    tables: NDArray[np.int64]  # [S, B]
    pages: NDArray[np.int64]  # [S, B]


def pack_static(
    plans: Sequence[StaticPlan], shape: PassShape, layout: MetadataLayout, geometry: StepGeometry
) -> Tensor:
    """The int32 block of a pass.

    Args:
        plans: at most ``S``, each of at most ``Q`` tokens and ``B`` blocks; the rest is padding.
            A plan's rows with logits are its last token that is no draft, and its drafts.
        shape: of the pass.
        layout: fields of the block.
        geometry: window and ring sizes.
    """
    grid = _grid(plans, shape)
    fields = {
        **_rows(plans, grid, shape),
        **_window(grid, geometry),
        **_outputs(plans, grid, shape),
        **_engram(plans, shape, layout),
    }
    for ratio in layout.ratios:
        fields |= _entries(grid, ratio, shape)
    if 2 in layout.ratios:
        fields |= _pairs(grid, shape, geometry)
    if layout.nextn:
        fields["draft_history"] = _draft_history(plans, grid, layout, geometry)
    parts = [
        np.broadcast_to(fields[name], size).reshape(-1)
        for name, size in layout.fields(shape).items()
    ]
    return torch.from_numpy(np.concatenate(parts).astype(np.int32))


def _grid(plans: Sequence[StaticPlan], shape: PassShape) -> _Grid:
    count, begin, slot = (np.zeros(shape.sequences, dtype=np.int64) for _ in range(3))
    tables, pages = (np.zeros((shape.sequences, shape.blocks), dtype=np.int64) for _ in range(2))
    for index, plan in enumerate(plans):
        chunk = plan.chunk
        count[index], begin[index] = len(chunk.token_ids), chunk.start_position
        slot[index] = chunk.state_slot
        used = min(shape.blocks, -(-(chunk.start_position + count[index]) // BLOCK_TOKENS))
        tables[index, :used] = chunk.block_table[:used]
        known = chunk.page_table[:used]
        pages[index, : len(known)] = known
    row = np.arange(shape.rows)
    valid = row < count[:, None]
    position = np.where(valid, begin[:, None] + row, 0)
    return _Grid(valid, position, begin, begin + count, slot, tables, pages)


def _rows(
    plans: Sequence[StaticPlan], grid: _Grid, shape: PassShape
) -> dict[str, NDArray[np.int64] | NDArray[np.bool_]]:
    tokens = np.zeros((shape.sequences, shape.rows), dtype=np.int64)
    for index, plan in enumerate(plans):
        tokens[index, : len(plan.chunk.token_ids)] = plan.chunk.token_ids
    return {
        "token_ids": tokens.reshape(-1),
        "positions": grid.position.reshape(-1),
        "valid": grid.valid.reshape(-1),
        "begin": grid.begin,
        "tables": grid.tables,
    }


def _window(grid: _Grid, geometry: StepGeometry) -> dict[str, NDArray[np.int64]]:
    ring, tail = geometry.window_ring, geometry.page_tail
    before = grid.begin[:, None] + np.arange(1 - geometry.window, 0)
    history = np.where(before >= 0, grid.slot[:, None] * ring + before % ring, 0)

    position = grid.position
    # A ring keeps the last positions only; each of them is written once.
    kept = grid.valid & (position >= grid.end[:, None] - ring)
    places = np.where(kept, grid.slot[:, None] * ring + position % ring, 0)

    place = position % BLOCK_TOKENS - (BLOCK_TOKENS - tail)
    page = np.take_along_axis(grid.pages, position // BLOCK_TOKENS, axis=1)
    paged = grid.valid & (place >= 0) & (page > 0)
    return {
        "history": history.reshape(-1),
        "window_places": places.reshape(-1),
        "page_places": np.where(paged, page * tail + place, 0).reshape(-1),
    }


def _outputs(
    plans: Sequence[StaticPlan], grid: _Grid, shape: PassShape
) -> dict[str, NDArray[np.int64]]:
    drafts, last = (np.zeros(shape.sequences, dtype=np.int64) for _ in range(2))
    proposed = np.zeros((shape.sequences, max(0, shape.outputs - 1)), dtype=np.int64)
    for index, plan in enumerate(plans):
        drafts[index], last[index] = plan.drafts, len(plan.chunk.token_ids) - 1
        if plan.drafts:
            proposed[index, : plan.drafts] = plan.chunk.token_ids[-plan.drafts :]
    first = last - drafts
    row = np.minimum(first[:, None] + np.arange(shape.outputs), last[:, None])
    flat = row + np.arange(shape.sequences)[:, None] * shape.rows
    fields = {
        "output_rows": flat.reshape(-1),
        "proposals": drafts,
        "next": np.where(grid.slot > 0, grid.end - drafts, 0),
    }
    return fields | ({"proposed": proposed} if shape.outputs > 1 else {})


def _engram(
    plans: Sequence[StaticPlan], shape: PassShape, layout: MetadataLayout
) -> dict[str, NDArray[np.int64]]:
    if not layout.engram_layers:
        return {}
    size = (layout.engram_layers, shape.sequences, shape.rows, layout.engram_columns)
    rows = np.full(size, -1, dtype=np.int64)
    for index, plan in enumerate(plans):
        rows[:, index, : len(plan.chunk.token_ids)] = plan.chunk.engram_rows
    return {"engram": rows.reshape(layout.engram_layers, -1, layout.engram_columns)}


def _entries(grid: _Grid, ratio: int, shape: PassShape) -> dict[str, NDArray[np.int64]]:
    per_block = BLOCK_TOKENS // ratio
    visible = np.where(grid.valid, (grid.position + 1) // ratio, 0)
    row = _entry_rows(grid, ratio, shape)
    complete = row < (grid.end - grid.begin)[:, None]
    position = grid.begin[:, None] + row
    entry = np.where(complete, position // ratio, 0)
    block = np.take_along_axis(grid.tables, entry // per_block, axis=1)
    slots = np.where(complete, block * per_block + entry % per_block, 0)
    return {
        f"visible_{ratio}": visible.reshape(-1),
        f"slots_{ratio}": slots.reshape(-1),
        f"turns_{ratio}": (entry * ratio).reshape(-1),
    }


def _entry_rows(grid: _Grid, ratio: int, shape: PassShape) -> NDArray[np.int64]:
    """Row within its sequence that completes each entry, ``[S, e]``; may lie behind the rows."""
    first = -(grid.begin + 1) % ratio
    return first[:, None] + np.arange(max(1, shape.rows // ratio)) * ratio


def _pairs(grid: _Grid, shape: PassShape, geometry: StepGeometry) -> dict[str, NDArray[np.int64]]:
    ring, sequences = geometry.pair_ring, shape.sequences
    sequence = np.arange(sequences)[:, None]
    row = _entry_rows(grid, 2, shape)
    complete = row < (grid.end - grid.begin)[:, None]
    flat = sequences + sequence * shape.rows + row
    first = np.where(row > 0, flat - 1, sequence)
    before = grid.begin - 1
    read = np.where(before >= 0, grid.slot * ring + before % ring, 0)
    kept = grid.valid & (grid.position >= grid.end[:, None] - ring)
    places = np.where(kept, grid.slot[:, None] * ring + grid.position % ring, 0)
    return {
        "rows_2": np.where(complete, flat, sequences).reshape(-1),
        "first_2": np.where(complete, first, sequences).reshape(-1),
        "pair_read": read,
        "pair_places": places.reshape(-1),
    }


def _draft_history(
    plans: Sequence[StaticPlan], grid: _Grid, layout: MetadataLayout, geometry: StepGeometry
) -> NDArray[np.int64]:
    drafts = np.zeros(len(grid.slot), dtype=np.int64)
    for index, plan in enumerate(plans):
        drafts[index] = plan.drafts
    next_position = grid.end - drafts
    position = next_position[:, None] + np.arange(-layout.window, layout.nextn)
    ring = geometry.window_ring
    known = (position >= 0) & (grid.slot[:, None] > 0)
    return np.where(known, grid.slot[:, None] * ring + position % ring, 0)

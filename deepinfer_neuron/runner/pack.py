"""From plain numbers to the tensors of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_neuron.cache.pools import BLOCK_TOKENS, page_tail_length
from deepinfer_neuron.model.step import Chunk, EntryPlan, StepTensors, WindowPlan

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class ChunkPlan:
    """The next tokens of one sequence."""

    token_ids: Sequence[int] | Ints
    """New tokens, at least one."""
    start_position: int
    """Position of the first: how many tokens the caches already hold."""
    state_slot: int
    """Ring slot of the sequence, at least 1."""
    block_table: Sequence[int] | Ints
    """Blocks of the sequence, covering the new tokens."""
    engram_rows: Ints
    """``[engram layers, tokens, columns]``."""
    num_outputs: int
    """How many of its last rows need logits: 0, 1, or all that score prompt tokens."""
    page_table: Sequence[int] | Ints = ()
    """Window page of each block, 0 for none; empty if none of them has one."""


@dataclass(frozen=True)
class StepGeometry:
    """What packing must know about the model and its caches."""

    window: int
    window_ring: int
    pair_ring: int
    ratios: tuple[int, ...]
    """Compression ratios in use, of 1 and 2."""

    @property
    def page_tail(self) -> int:
        """Window keys that a window page holds."""
        return page_tail_length(self.window)


@dataclass(frozen=True)
class _Rows:
    """Per-row and per-chunk numbers shared by the parts of a step."""

    first: Ints  # [s] row of each chunk's first token
    begin: Ints  # [s] its position
    end: Ints  # [s] position behind its last token
    slot: Ints  # [s]
    table: Ints  # [s, blocks]
    pages: Ints  # [s, blocks]
    chunk: Ints  # [n] chunk of each row
    position: Ints  # [n]


def pack(plans: Sequence[ChunkPlan], geometry: StepGeometry) -> StepTensors:
    """Tensors of a step that runs the given chunks side by side.

    Args:
        plans: at least one; sequences must differ.
        geometry: window and ring sizes.
    """
    rows = _rows(plans)
    last = np.cumsum([len(plan.token_ids) for plan in plans]) - 1
    wanted = [
        np.arange(stop - plan.num_outputs, stop) + 1
        for stop, plan in zip(last, plans, strict=True)
        if plan.num_outputs
    ]
    tokens = np.concatenate([np.asarray(plan.token_ids, dtype=np.int64) for plan in plans])
    chunks = tuple(
        Chunk(int(first), int(stop) + 1, int(end), torch.from_numpy(table))
        for first, stop, end, table in zip(rows.first, last, rows.end, rows.table, strict=True)
    )
    return StepTensors(
        token_ids=torch.from_numpy(tokens),
        positions=torch.from_numpy(rows.position),
        engram_rows=torch.from_numpy(np.concatenate([p.engram_rows for p in plans], axis=1)),
        window=_window_plan(rows, geometry),
        entries={ratio: _entry_plan(rows, ratio, geometry) for ratio in geometry.ratios},
        chunks=chunks,
        output_rows=_tensor(np.concatenate([np.empty(0, dtype=np.int64), *wanted])),
    )


def _rows(plans: Sequence[ChunkPlan]) -> _Rows:
    count = np.array([len(plan.token_ids) for plan in plans], dtype=np.int64)
    begin = np.array([plan.start_position for plan in plans], dtype=np.int64)
    first = np.cumsum(count) - count
    chunk = np.repeat(np.arange(len(plans)), count)
    table = _padded(
        [plan.block_table for plan in plans], max(len(plan.block_table) for plan in plans)
    )
    return _Rows(
        first=first,
        begin=begin,
        end=begin + count,
        slot=np.array([plan.state_slot for plan in plans], dtype=np.int64),
        table=table,
        pages=_padded([plan.page_table for plan in plans], table.shape[1]),
        chunk=chunk,
        position=begin[chunk] + np.arange(len(chunk)) - first[chunk],
    )


def _padded(tables: Sequence[Sequence[int] | Ints], width: int) -> Ints:
    """Ragged tables as rows of one array, zeros behind."""
    result = np.zeros((len(tables), width), dtype=np.int64)
    for index, table in enumerate(tables):
        result[index, : len(table)] = table
    return result


def _window_plan(rows: _Rows, geometry: StepGeometry) -> WindowPlan:
    window, ring = geometry.window, geometry.window_ring
    kept = np.minimum(rows.begin, window - 1)
    offset = np.cumsum(kept) - kept
    owner = np.repeat(np.arange(len(kept)), kept)
    total = len(owner)
    history_position = (rows.begin - kept - offset)[owner] + np.arange(total)
    history = rows.slot[owner] * ring + history_position % ring

    chunk, position = rows.chunk, rows.position
    width = min(window, int(position.max()) + 1)
    lowest = np.maximum(position - window + 1, 0)
    key = lowest[:, None] + np.arange(width)
    before = (offset - rows.begin + kept)[chunk, None] + key
    within = (total + rows.first - rows.begin)[chunk, None] + key
    index = np.where(key < rows.begin[chunk, None], before, within)
    index = np.where(key <= position[:, None], index, -1)

    stored = np.flatnonzero(position >= rows.end[chunk] - ring)
    places = rows.slot[chunk[stored]] * ring + position[stored] % ring
    paged, page_places = _page_plan(rows, geometry.page_tail)
    return WindowPlan(
        _tensor(history), _tensor(index), _tensor(stored), _tensor(places), _tensor(paged),
        _tensor(page_places),
    )  # fmt: skip


def window_copy(
    slot: int, length: int, pages: Sequence[int], geometry: StepGeometry
) -> tuple[Tensor, Tensor]:
    """Ring places and page places of the window before ``length``, int64 ``[n]`` each.

    Args:
        slot: ring slot of the sequence.
        length: tokens already cached, a multiple of the block size.
        pages: window page of each of its blocks; those the window reaches must not be 0.
        geometry: sizes.
    """
    position = np.arange(max(0, length - geometry.window + 1), length)
    table = np.asarray(pages, dtype=np.int64)
    place = position % BLOCK_TOKENS - (BLOCK_TOKENS - geometry.page_tail)
    ring = slot * geometry.window_ring + position % geometry.window_ring
    return _tensor(ring), _tensor(table[position // BLOCK_TOKENS] * geometry.page_tail + place)


def _page_plan(rows: _Rows, tail: int) -> tuple[Ints, Ints]:
    """Rows within the last ``tail`` positions of a block that has a page, and their places."""
    place = rows.position % BLOCK_TOKENS - (BLOCK_TOKENS - tail)
    page = rows.pages[rows.chunk, rows.position // BLOCK_TOKENS]
    kept = np.flatnonzero((place >= 0) & (page > 0))
    return kept, page[kept] * tail + place[kept]


def _entry_plan(rows: _Rows, ratio: int, geometry: StepGeometry) -> EntryPlan:
    chunk, position = rows.chunk, rows.position
    complete = np.flatnonzero((position + 1) % ratio == 0)
    entry = position[complete] // ratio
    per_block = BLOCK_TOKENS // ratio
    owner = chunk[complete]
    slots = rows.table[owner, entry // per_block] * per_block + entry % per_block
    empty = np.empty(0, dtype=np.int64)
    first = ring_read = stored = places = empty
    if ratio == 2:
        ring = geometry.pair_ring
        earlier = complete[position[complete] - 1 < rows.begin[owner]]
        ring_read = rows.slot[chunk[earlier]] * ring + (position[earlier] - 1) % ring
        first = len(earlier) + complete - 1
        first[np.isin(complete, earlier)] = np.arange(len(earlier))
        stored = np.flatnonzero(position >= rows.end[chunk] - ring)
        places = rows.slot[chunk[stored]] * ring + position[stored] % ring
    return EntryPlan(
        rows=_tensor(complete),
        first=_tensor(first),
        ring_read=_tensor(ring_read),
        ring_store_rows=_tensor(stored),
        ring_store_places=_tensor(places),
        positions=_tensor(entry * ratio),
        slots=_tensor(slots),
    )


def _tensor(values: Ints) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))

"""Memory of the past: paged pools and per-sequence rings, one contiguous tensor per layer and kind.

A *block* covers ``BLOCK_TOKENS`` uncompressed tokens in every pool and holds
``BLOCK_TOKENS / ratio`` entries; one block table per sequence serves all layers. Block 0 and state
slot 0 belong to padding and are never given to a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_neuron.cache.records import Codec, CodecSet
from deepinfer_neuron.ops.gather import gather_rows

BLOCK_TOKENS = 128


@dataclass(frozen=True)
class EntryPool:
    """Compressed keys of one layer: ``[num_blocks * entries, width]``."""

    codec: Codec
    records: Tensor

    def store(self, slots: Tensor, values: Tensor) -> None:
        """Write ``[n, channels]`` values at int64 ``[n]`` slots."""
        self.records[slots] = self.codec.pack(values)

    def load(self, slots: Tensor) -> Tensor:
        """Values ``[n, channels]`` at int64 ``[n]`` slots, zeros for -1."""
        return self.codec.unpack(gather_rows(self.records, slots))


@dataclass(frozen=True)
class IndexPool:
    """Index keys of one layer: ``[num_blocks, entries * width]``, data bytes before scale bytes."""

    codec: Codec
    entries: int
    blocks: Tensor

    def _sections(self) -> tuple[Tensor, Tensor]:
        data = self.codec.data_width * self.entries
        return (
            self.blocks[:, :data].unflatten(1, (self.entries, -1)),
            self.blocks[:, data:].unflatten(1, (self.entries, self.codec.scale_width)),
        )

    def store(self, slots: Tensor, values: Tensor) -> None:
        """Write ``[n, channels]`` values at int64 ``[n]`` slots (block * entries + place)."""
        block, place = slots // self.entries, slots % self.entries
        for section, part in zip(self._sections(), self.codec.encode(values), strict=True):
            section[block, place] = part

    def load_blocks(self, table: Tensor, count: int) -> Tensor:
        """The first ``count`` values of a sequence.

        Args:
            table: int64 block ids that hold at least ``count`` entries.
            count: entries wanted.

        Returns:
            ``[count, channels]``.
        """
        used = table[: -(-count // self.entries)]
        data, scale = (section[used].flatten(0, 1)[:count] for section in self._sections())
        return self.codec.decode(data, scale)


@dataclass(frozen=True)
class Ring:
    """The last ``length`` window keys of every sequence: ``[slots * length, width]``."""

    codec: Codec
    length: int
    records: Tensor

    def write(self, places: Tensor, records: Tensor) -> None:
        """Write ``[n, width]`` records at int64 ``[n]`` places (slot * length + p % length)."""
        self.records[places] = records

    def load(self, places: Tensor) -> Tensor:
        """Values ``[n, channels]`` at int64 ``[n]`` places."""
        return self.codec.unpack(gather_rows(self.records, places))


@dataclass(frozen=True)
class WindowPages:
    """Window keys at the end of blocks that a later sequence may continue from.

    ``[pages * tail, width]``: the last ``tail`` keys of a block, at place
    ``page * tail + p % BLOCK_TOKENS - (BLOCK_TOKENS - tail)``.
    """

    tail: int
    records: Tensor

    def write(self, places: Tensor, records: Tensor) -> None:
        """Write ``[n, width]`` records at int64 ``[n]`` places."""
        self.records[places] = records


@dataclass(frozen=True)
class PairRing:
    """Unrounded scores and values of the last tokens of a ratio-2 compressor.

    fp32 ``[slots * length, 2, channels]``: score, then value.
    """

    length: int
    state: Tensor


@dataclass(frozen=True)
class LayerCache:
    """Everything one layer remembers; the last three only where the layer owns them."""

    window: Ring
    pages: WindowPages
    compressed: EntryPool | None
    index: IndexPool | None
    pairs: PairRing | None


@dataclass(frozen=True)
class CacheShape:
    """Sizes that decide how much memory the caches take."""

    num_blocks: int
    """Blocks in every pool, the dummy block 0 included."""
    num_slots: int
    """Sequence slots, the dummy slot 0 included."""
    window_ring: int
    """Window keys kept per sequence: the window plus what may be rolled back."""
    pair_ring: int
    """Tokens kept per sequence for a ratio-2 compressor."""
    num_pages: int = 1
    """Window pages, the dummy page 0 included."""
    page_tail: int = 0
    """Window keys kept per page."""


def window_ring_length(window: int, backtracking: int) -> int:
    """Window keys a sequence keeps so that ``backtracking`` tokens can be undone."""
    return window + backtracking


def page_tail_length(window: int) -> int:
    """Window keys at the end of a block that a continuation needs from that block."""
    return min(window - 1, BLOCK_TOKENS)


def window_blocks(window: int) -> int:
    """Blocks that one window before a block boundary reaches into, at least 1."""
    return max(1, -(-(window - 1) // BLOCK_TOKENS))


def pair_ring_length(ratio: int, backtracking: int) -> int:
    """Compressor inputs a sequence keeps: an open group plus what may be undone."""
    return ratio + max(0, backtracking - 1)


def allocate_layer(
    shape: CacheShape,
    codecs: CodecSet,
    ratio: int,
    *,
    owns_compressed: bool,
    owns_index: bool,
) -> LayerCache:
    """Zeroed caches of one layer.

    Args:
        shape: numbers of blocks and slots.
        codecs: record formats.
        ratio: tokens per compressed entry, 0 for a window-only layer.
        owns_compressed: the layer writes compressed keys.
        owns_index: the layer writes index keys.
    """
    width, dtype = codecs.window.width, codecs.window.dtype
    keys = torch.zeros(shape.num_slots * shape.window_ring, width, dtype=dtype)
    paged = torch.zeros(shape.num_pages * shape.page_tail, width, dtype=dtype)
    compressed = index = pairs = None
    if owns_compressed:
        entries = shape.num_blocks * (BLOCK_TOKENS // ratio)
        records = torch.zeros(entries, codecs.compressed.width, dtype=codecs.compressed.dtype)
        compressed = EntryPool(codecs.compressed, records)
        if ratio == 2:
            length = shape.num_slots * shape.pair_ring
            pairs = PairRing(shape.pair_ring, torch.zeros(length, 2, codecs.window.channels))
    if owns_index:
        per_block = BLOCK_TOKENS // ratio
        blocks = torch.zeros(
            shape.num_blocks, per_block * codecs.index.width, dtype=codecs.index.dtype
        )
        index = IndexPool(codecs.index, per_block, blocks)
    return LayerCache(
        Ring(codecs.window, shape.window_ring, keys),
        WindowPages(shape.page_tail, paged),
        compressed,
        index,
        pairs,
    )

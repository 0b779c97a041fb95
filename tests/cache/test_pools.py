"""Pools and rings: sizes, places of bytes, and what is left alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer_neuron.cache.pools import (
    BLOCK_TOKENS,
    CacheShape,
    EntryPool,
    IndexPool,
    LayerCache,
    Ring,
    allocate_layer,
    pair_ring_length,
    window_ring_length,
)
from deepinfer_neuron.cache.records import CodecSet
from deepinfer_neuron.ops.arithmetic import fixed_arithmetic
from deepinfer_neuron.ops.quant import q4_cache_codes, q4_index, q4_index_codes, q8, q8_codes
from tests.ops.number_formats import normal, same_bits

RELEASED = CodecSet.of(head_dim=512, index_head_dim=128, rounding=True)
SMALL = CodecSet.of(head_dim=64, index_head_dim=32, rounding=True)
RAW = CodecSet.of(head_dim=64, index_head_dim=32, rounding=False)
SHAPE = CacheShape(num_blocks=5, num_slots=3, window_ring=9, pair_ring=7)


def owner(codecs: CodecSet = SMALL, ratio: int = 2, shape: CacheShape = SHAPE) -> LayerCache:
    """Caches of a layer that writes compressed and index keys."""
    return allocate_layer(shape, codecs, ratio, owns_compressed=True, owns_index=True)


def entry_pool(ratio: int = 2) -> EntryPool:
    pool = owner(ratio=ratio).compressed
    assert pool is not None
    return pool


def index_pool(ratio: int = 2, codecs: CodecSet = SMALL) -> IndexPool:
    pool = owner(codecs, ratio).index
    assert pool is not None
    return pool


def tensors(cache: LayerCache) -> list[Tensor]:
    """Every tensor of a layer."""
    parts = [cache.window.records]
    if cache.compressed is not None:
        parts.append(cache.compressed.records)
    if cache.index is not None:
        parts.append(cache.index.blocks)
    if cache.pairs is not None:
        parts.append(cache.pairs.state)
    return parts


class TestReleasedSizes:
    """Byte counts of the published layout: 512 channels, 128 index channels."""

    BLOCKS, SLOTS = 3, 2
    SHAPE = CacheShape(BLOCKS, SLOTS, window_ring_length(128, 6), pair_ring_length(2, 6))

    def block_bytes(self, ratio: int) -> int:
        cache = owner(RELEASED, ratio, self.SHAPE)
        assert cache.compressed is not None
        assert cache.index is not None
        assert cache.index.blocks.dtype == cache.compressed.records.dtype == torch.uint8
        total = cache.compressed.records.numel() + cache.index.blocks.numel()
        assert total % self.BLOCKS == 0
        return total // self.BLOCKS

    def test_blocks(self) -> None:
        """Ratio 2 needs 22784 bytes per 128 tokens and owning layer, ratio 1 twice that."""
        assert BLOCK_TOKENS == 128
        assert (self.block_bytes(2), self.block_bytes(1)) == (22784, 45568)
        assert 3 * self.block_bytes(2) + self.block_bytes(1) == 113920

    def test_parts_of_a_block(self) -> None:
        cache = owner(RELEASED, 2, self.SHAPE)
        assert cache.compressed is not None
        assert cache.index is not None
        assert cache.compressed.records.shape == (self.BLOCKS * 64, 288)
        assert cache.index.blocks.shape == (self.BLOCKS, 64 * 68)

    def test_window_ring(self) -> None:
        """134 records of 528 bytes per sequence: window 128 and six tokens to undo."""
        ring = owner(RELEASED, 2, self.SHAPE).window
        assert ring.length == 134
        assert ring.records.shape == (self.SLOTS * 134, 528)
        assert ring.records[:134].numel() == 70752

    def test_pair_ring(self) -> None:
        """7 tokens of 2 x 512 fp32 numbers per sequence."""
        pairs = owner(RELEASED, 2, self.SHAPE).pairs
        assert pairs is not None
        assert pairs.length == 7
        assert pairs.state.shape == (self.SLOTS * 7, 2, 512)
        assert pairs.state[:7].numel() * pairs.state.element_size() == 28672

    @pytest.mark.parametrize(("backtracking", "want"), [(0, 2), (1, 2), (2, 3), (6, 7)])
    def test_ring_lengths(self, backtracking: int, want: int) -> None:
        assert pair_ring_length(2, backtracking) == want
        assert window_ring_length(128, backtracking) == 128 + backtracking


class TestAllocation:
    """What each kind of layer gets."""

    @pytest.mark.parametrize("codecs", [SMALL, RAW])
    @pytest.mark.parametrize("ratio", [1, 2])
    def test_tensors_are_zero_and_contiguous(self, ratio: int, codecs: CodecSet) -> None:
        for tensor in tensors(owner(codecs, ratio)):
            assert tensor.is_contiguous()
            assert not tensor.any()

    def test_layers_that_own_nothing(self) -> None:
        for ratio in (0, 1, 2):
            cache = allocate_layer(SHAPE, SMALL, ratio, owns_compressed=False, owns_index=False)
            assert (cache.compressed, cache.index, cache.pairs) == (None, None, None)
            assert cache.window.records.shape == (27, 66)

    def test_pairs_belong_to_ratio_2(self) -> None:
        assert owner(ratio=1).pairs is None
        assert owner(ratio=2).pairs is not None

    def test_index_keys_without_compressed_keys(self) -> None:
        cache = allocate_layer(SHAPE, SMALL, 1, owns_compressed=False, owns_index=True)
        assert cache.compressed is None
        assert cache.index is not None
        assert cache.index.blocks.shape == (5, 128 * 17)

    def test_layers_share_no_memory(self) -> None:
        first, second = owner(), owner()
        first.window.records.fill_(1)
        assert not second.window.records.any()


class TestEntryPool:
    """Compressed keys, one interleaved record per slot."""

    def test_bytes(self) -> None:
        pool, x = entry_pool(), normal((3, 64), 1)
        slots = torch.tensor([64, 200, 131])
        pool.store(slots, x)
        packed, scale = q4_cache_codes(x)
        assert torch.equal(pool.records[slots, :32], packed)
        assert torch.equal(pool.records[slots, 32:], scale)

    def test_other_slots_stay(self) -> None:
        """Block 0 among them."""
        pool = entry_pool()
        slots = torch.tensor([64, 200, 131])
        pool.store(slots, normal((3, 64), 2))
        rest = torch.ones(len(pool.records), dtype=torch.bool)
        rest[slots] = False
        assert not pool.records[rest].any()
        assert pool.records[slots].any(dim=1).all()

    def test_load(self) -> None:
        pool, x = entry_pool(), normal((3, 64), 3)
        pool.store(torch.tensor([64, 200, 131]), x)
        got = pool.load(torch.tensor([131, -1, 64, 300]))
        want = pool.codec.unpack(pool.codec.pack(x))
        assert same_bits(got[[0, 2]], want[[2, 0]])
        assert not got[[1, 3]].any()

    def test_nothing(self) -> None:
        pool, none = entry_pool(), torch.empty(0, dtype=torch.int64)
        pool.store(none, normal((0, 64), 4))
        assert not pool.records.any()
        assert pool.load(none).shape == (0, 64)


class TestIndexPool:
    """Index keys: within a block all data bytes, then all scale bytes."""

    @pytest.mark.parametrize("ratio", [1, 2])
    def test_bytes(self, ratio: int) -> None:
        """Entry ``e`` of a block: data at ``16 e``, scale behind all data at ``16 E + e``."""
        pool, x = index_pool(ratio), normal((4, 32), 1)
        entries = 128 // ratio
        places = [(1, 0), (1, entries - 1), (3, 5), (4, 17)]
        pool.store(torch.tensor([block * entries + place for block, place in places]), x)
        packed, scale = q4_index_codes(x)
        want = torch.zeros(5, entries * 17, dtype=torch.uint8)
        for row, (block, place) in enumerate(places):
            for byte in range(16):
                want[block, 16 * place + byte] = packed[row, byte]
            want[block, 16 * entries + place] = scale[row, 0]
        assert torch.equal(pool.blocks, want)

    def test_scales_of_several_groups(self) -> None:
        """With 128 channels an entry has four scale bytes, side by side in the second section."""
        pool, x = index_pool(2, RELEASED), normal((1, 128), 2)
        pool.store(torch.tensor([64 + 3]), x)
        packed, scale = q4_index_codes(x)
        block = pool.blocks[1]
        assert torch.equal(block[64 * 3 : 64 * 4], packed[0])
        assert torch.equal(block[64 * 64 + 4 * 3 : 64 * 64 + 4 * 4], scale[0])
        assert block.count_nonzero() <= 68

    @pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 128, 150])
    @pytest.mark.parametrize("codecs", [SMALL, RAW])
    def test_a_sequence_in_scattered_blocks(self, count: int, codecs: CodecSet) -> None:
        pool, x = index_pool(2, codecs), normal((150, 32), 3)
        table = torch.tensor([4, 1, 3])
        entry = torch.arange(150)
        pool.store(table[entry // 64] * 64 + entry % 64, x.float())
        got = pool.load_blocks(table, count)
        want = x[:count].float() if codecs is RAW else q4_index(x[:count], fixed_arithmetic())
        assert torch.equal(got, want)
        assert not pool.blocks[[0, 2]].any()

    def test_a_longer_table_does_not_matter(self) -> None:
        pool, x = index_pool(), normal((10, 32), 4)
        pool.store(64 + torch.arange(10), x)
        short, long = (pool.load_blocks(torch.tensor(t), 10) for t in ([1], [1, 0, 0]))
        assert same_bits(short, long)

    def test_storing_again_replaces(self) -> None:
        pool, x, y = index_pool(), normal((1, 32), 5), normal((1, 32), 6)
        pool.store(torch.tensor([70]), x)
        pool.store(torch.tensor([70]), y)
        got = pool.load_blocks(torch.tensor([1]), 7)[6:]
        assert torch.equal(got, q4_index(y, fixed_arithmetic()))


class TestRing:
    """Window keys of every sequence."""

    def ring(self) -> Ring:
        return owner().window

    def test_bytes(self) -> None:
        ring, x = self.ring(), normal((2, 64), 1)
        ring.write(torch.tensor([9, 26]), ring.codec.pack(x))
        codes, scale = q8_codes(x)
        assert torch.equal(ring.records[[9, 26], :64], codes)
        assert torch.equal(ring.records[[9, 26], 64:], scale)
        assert ring.records.any(dim=1).nonzero().flatten().tolist() == [9, 26]

    def test_load(self) -> None:
        ring, x = self.ring(), normal((2, 64), 2)
        ring.write(torch.tensor([9, 26]), ring.codec.pack(x))
        assert torch.equal(ring.load(torch.tensor([26, 9])), q8(x, fixed_arithmetic())[[1, 0]])
        assert ring.load(torch.empty(0, dtype=torch.int64)).shape == (0, 64)

    def test_the_dummy_slot_stays(self) -> None:
        """Slot 0 fills the places before the first sequence's."""
        ring = self.ring()
        ring.write(torch.arange(9, 27), ring.codec.pack(normal((18, 64), 3)))
        assert not ring.records[:9].any()
        assert ring.records[9:].any(dim=1).all()

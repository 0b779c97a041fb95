"""Blocks and window pages: nothing leaks, nothing is shared by mistake, old prefixes go first."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from deepinfer_neuron.cache.blocks import ROOT, BlockManager, block_digest, prefix_digests
from deepinfer_neuron.cache.pools import BLOCK_TOKENS


def tokens(*firsts: int) -> list[int]:
    """Blocks of equal tokens, one per argument."""
    return [first for first in firsts for _ in range(BLOCK_TOKENS)]


class TestDigests:
    def test_a_digest_covers_everything_before_it(self) -> None:
        one, two = prefix_digests(tokens(1, 7), 2), prefix_digests(tokens(2, 7), 2)
        assert one[0] != two[0]
        assert one[1] != two[1]

    def test_equal_prefixes_have_equal_digests(self) -> None:
        assert prefix_digests(tokens(1, 2, 3), 2) == prefix_digests(tokens(1, 2, 9), 2)

    def test_extra_content_separates_equal_tokens(self) -> None:
        block = tokens(1)
        assert block_digest(ROOT, block, b"image") != block_digest(ROOT, block)

    def test_order_inside_a_block_matters(self) -> None:
        block = [*range(BLOCK_TOKENS)]
        assert block_digest(ROOT, block) != block_digest(ROOT, block[::-1])


class TestPrefixes:
    def test_block_0_is_never_handed_out(self) -> None:
        manager = BlockManager(5, 5, 1)
        assert sorted(manager.allocate(4)) == [1, 2, 3, 4]
        assert manager.available == 0

    def test_a_released_prefix_is_found_again(self) -> None:
        manager = BlockManager(5, 5, 1)
        digests = prefix_digests(tokens(1, 2), 2)
        blocks = manager.allocate(2)
        for block, digest in zip(blocks, digests, strict=True):
            manager.commit(block, digest)
        manager.release(blocks)
        assert manager.match(digests) == blocks
        manager.share(blocks)
        assert manager.usage().cached == 0
        assert manager.usage().used == 2

    def test_uncommitted_blocks_are_not_found(self) -> None:
        manager = BlockManager(5, 5, 1)
        digests = prefix_digests(tokens(1), 1)
        manager.release(manager.allocate(1))
        assert manager.match(digests) == []

    def test_the_tail_of_a_prefix_is_evicted_before_its_head(self) -> None:
        manager = BlockManager(4, 4, 1)
        digests = prefix_digests(tokens(1, 2, 3), 3)
        blocks = manager.allocate(3)
        for block, digest in zip(blocks, digests, strict=True):
            manager.commit(block, digest)
        manager.release(blocks)
        assert manager.allocate(1) == [blocks[2]]
        assert manager.match(digests) == blocks[:2]

    def test_a_prefix_cannot_end_where_a_window_page_is_missing(self) -> None:
        manager = BlockManager(6, 3, 1)  # two pages for five blocks
        digests = prefix_digests(tokens(1, 2, 3), 3)
        blocks = manager.allocate(3)  # the first block loses its page to the third
        for block, digest in zip(blocks, digests, strict=True):
            manager.commit(block, digest)
        assert manager.match(digests) == blocks
        assert manager.match(digests[:1]) == []

    def test_a_wide_window_needs_the_pages_of_several_blocks(self) -> None:
        manager = BlockManager(6, 3, 2)
        digests = prefix_digests(tokens(1, 2, 3), 3)
        blocks = manager.allocate(3)
        for block, digest in zip(blocks, digests, strict=True):
            manager.commit(block, digest)
        assert manager.match(digests) == blocks
        assert manager.match(digests[:2]) == []

    def test_equal_content_is_kept_once(self) -> None:
        manager = BlockManager(5, 5, 1)
        digest = prefix_digests(tokens(1), 1)[0]
        first, second = manager.allocate(2)
        manager.commit(first, digest)
        manager.commit(second, digest)
        manager.release([first, second])
        assert manager.usage().cached == 1
        assert manager.match([digest]) == [first]

    def test_without_pages_nothing_is_cached(self) -> None:
        manager = BlockManager(5, 1, 1)
        digest = prefix_digests(tokens(1), 1)[0]
        blocks = manager.allocate(1)
        manager.commit(blocks[0], digest)
        manager.release(blocks)
        assert manager.match([digest]) == []
        assert manager.usage().free == 4

    def test_forgetting_frees_the_cached_blocks(self) -> None:
        manager = BlockManager(5, 5, 1)
        digests = prefix_digests(tokens(1, 2), 2)
        blocks = manager.allocate(2)
        for block, digest in zip(blocks, digests, strict=True):
            manager.commit(block, digest)
        manager.release(blocks[1:])
        manager.forget()
        assert manager.usage().free == 3
        assert manager.match(digests) == []
        manager.release(blocks[:1])
        assert manager.usage().free == 4


class BlockMachine(RuleBasedStateMachine):
    """Random sequences come and go; a plain model counts who holds what."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(9, 5, 1)
        self.holders: Counter[int] = Counter()

    @rule(target=sequences, content=st.lists(st.integers(0, 2), min_size=1, max_size=5))
    def admit(self, content: list[int]) -> list[int]:
        digests = prefix_digests(tokens(*content), len(content))
        shared = self.manager.match(digests)
        needed = len(content) - len(shared)
        if needed > self.manager.available - self.manager.unreferenced(shared):
            return []
        self.manager.share(shared)
        fresh = self.manager.allocate(needed)
        assert not set(fresh) & set(self.holders), "a used block was handed out"
        blocks = shared + fresh
        self.holders.update(blocks)
        for block, digest in zip(fresh, digests[len(shared) :], strict=True):
            self.manager.commit(block, digest)
        return blocks

    @rule(blocks=consumes(sequences))
    def release(self, blocks: list[int]) -> None:
        self.manager.release(blocks)
        self.holders.subtract(blocks)
        self.holders = +self.holders

    @rule()
    def forget(self) -> None:
        self.manager.forget()

    @invariant()
    def counts_add_up(self) -> None:
        usage = self.manager.usage()
        assert usage.used == len(self.holders)
        assert usage.total == usage.used + usage.cached + usage.free
        assert usage.free >= 0

    @invariant()
    def pages_belong_to_one_block_each(self) -> None:
        pages = [self.manager.page(block) for block in range(1, 9) if self.manager.page(block)]
        assert len(pages) == len(set(pages))
        assert all(1 <= page <= 4 for page in pages)
        assert self.manager.page(0) == 0


BlockMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
TestBlocksUnderRandomUse = BlockMachine.TestCase

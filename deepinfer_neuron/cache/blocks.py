"""Which blocks a sequence owns, and which blocks already hold a known prefix.

A block is *free*, *used* (reference count above 0), or *cached*: nobody uses it, but it still holds
the keys of a known run of tokens and can be given to a sequence that starts with that run. Cached
blocks are reused for new content in least-recently-used order, after the free ones.

Beside its paged entries a prefix needs the window keys at its end. They are kept in *window pages*,
one per block while the pool of pages lasts; a prefix can end at a block only if the pages that
cover one window still exist. Taking a page away from a block only removes that possibility.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer_neuron.cache.pools import BLOCK_TOKENS

Digest = bytes
ROOT: Digest = b""
"""Parent of a sequence's first block."""


def block_digest(parent: Digest, token_ids: Sequence[int], extra: bytes = b"") -> Digest:
    """Identity of a full block: its tokens, everything before them, and ``extra``.

    Args:
        parent: digest of the block before, :data:`ROOT` for the first.
        token_ids: the block's ``BLOCK_TOKENS`` tokens.
        extra: whatever else decides the content, such as the hashes of images inside the block.
    """
    state = hashlib.blake2b(parent, digest_size=16)
    state.update(np.asarray(token_ids, dtype=np.int64).tobytes())
    state.update(extra)
    return state.digest()


def prefix_digests(token_ids: Sequence[int], count: int) -> list[Digest]:
    """Digests of the first ``count`` full blocks of a sequence."""
    digests: list[Digest] = []
    parent = ROOT
    for index in range(count):
        start = index * BLOCK_TOKENS
        parent = block_digest(parent, token_ids[start : start + BLOCK_TOKENS])
        digests.append(parent)
    return digests


@dataclass(frozen=True)
class BlockUsage:
    """How the blocks of a pool are spread; the dummy block 0 is not counted."""

    total: int
    used: int
    cached: int

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        return self.total - self.used - self.cached


class BlockManager:
    """Blocks 1 to ``num_blocks - 1`` and window pages 1 to ``num_pages - 1``.

    Args:
        num_blocks: blocks in every pool, the dummy block 0 included; at least 2.
        num_pages: window pages, the dummy page 0 included; 1 or less switches prefix caching off.
        window_blocks: blocks whose pages cover one window.
    """

    def __init__(self, num_blocks: int, num_pages: int, window_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.window_blocks = window_blocks
        self.caching = num_pages > 1
        self._free: deque[int] = deque(range(1, num_blocks))
        self._references = [0] * num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._digest: list[Digest | None] = [None] * num_blocks
        self._by_digest: dict[Digest, int] = {}
        self._free_pages = list(range(num_pages - 1, 0, -1))
        self._page = np.zeros(num_blocks, dtype=np.int64)
        self._page_order: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free) + len(self._cached)

    def usage(self) -> BlockUsage:
        """Present spread of the blocks."""
        total = self.num_blocks - 1
        return BlockUsage(total, total - self.available, len(self._cached))

    def page(self, block: int) -> int:
        """Window page of a block, 0 if it has none."""
        return int(self._page[block])

    def pages(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Window pages of blocks, any shape; 0 where there is none."""
        return self._page[blocks]

    def allocate(self, count: int) -> list[int]:
        """Hand out blocks with reference count 1; ``count`` must not exceed :attr:`available`."""
        blocks = []
        for _ in range(count):
            block = self._free.popleft() if self._free else self._evict()
            self._references[block] = 1
            if self.caching:
                self._take_page(block)
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Give back a sequence's blocks, last first so that prefixes outlive their tails."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._digest[block] is not None:
                self._cached[block] = None
            else:
                self._drop_page(block)
                self._free.append(block)

    def commit(self, block: int, digest: Digest) -> None:
        """Declare that a used block holds the content of ``digest`` completely.

        If another block holds the same content already, this one stays private.
        """
        if not self.caching or self._digest[block] is not None or digest in self._by_digest:
            return
        self._digest[block] = digest
        self._by_digest[digest] = block
        self._touch_page(block)

    def holds(self, digest: Digest) -> bool:
        """Whether some block holds this content."""
        return digest in self._by_digest

    def match(self, digests: Sequence[Digest]) -> list[int]:
        """Blocks of the longest known prefix that a sequence can continue from.

        Args:
            digests: of the sequence's full blocks, in order.

        Returns:
            the blocks, still unreferenced by the caller; see :meth:`share`.
        """
        blocks: list[int] = []
        for digest in digests:
            block = self._by_digest.get(digest)
            if block is None:
                break
            blocks.append(block)
        while blocks and not all(self._page[b] for b in blocks[-self.window_blocks :]):
            blocks.pop()
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to matched blocks."""
        for block in blocks:
            self._references[block] += 1
            self._cached.pop(block, None)
            self._touch_page(block)

    def unreferenced(self, blocks: Sequence[int]) -> int:
        """How many of these blocks nobody uses: sharing them lowers :attr:`available`."""
        return sum(block in self._cached for block in blocks)

    def forget(self) -> None:
        """Drop every cached prefix; blocks in use stay."""
        for block, digest in enumerate(self._digest):
            if digest is not None:
                del self._by_digest[digest]
                self._digest[block] = None
        for block in self._cached:
            self._drop_page(block)
            self._free.append(block)
        self._cached.clear()

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        digest = self._digest[block]
        if digest is not None:
            del self._by_digest[digest]
        self._digest[block] = None
        self._drop_page(block)
        return block

    def _take_page(self, block: int) -> None:
        if self._free_pages:
            page = self._free_pages.pop()
        else:
            victim, _ = self._page_order.popitem(last=False)
            page, self._page[victim] = int(self._page[victim]), 0
        self._page[block] = page
        self._page_order[block] = None

    def _touch_page(self, block: int) -> None:
        if self._page[block]:
            self._page_order.move_to_end(block)

    def _drop_page(self, block: int) -> None:
        if self._page[block]:
            self._free_pages.append(int(self._page[block]))
            self._page[block] = 0
            del self._page_order[block]

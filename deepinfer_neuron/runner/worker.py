"""The network with its weights and caches: takes chunk plans, gives logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer_neuron.cache.pools import (
    BLOCK_TOKENS,
    CacheShape,
    LayerCache,
    pair_ring_length,
    window_ring_length,
)
from deepinfer_neuron.checkpoint.config import ModelConfig
from deepinfer_neuron.checkpoint.names import inventory
from deepinfer_neuron.checkpoint.reader import Checkpoint
from deepinfer_neuron.model.drafts import DraftHeads
from deepinfer_neuron.model.footprint import measure_parts, text_parts, total
from deepinfer_neuron.model.matrix import WeightSource
from deepinfer_neuron.model.network import TextNetwork
from deepinfer_neuron.ops.arithmetic import Arithmetic
from deepinfer_neuron.runner.hashes import TokenHashes
from deepinfer_neuron.runner.pack import ChunkPlan, StepGeometry, pack, window_copy
from deepinfer_neuron.runner.pack_drafts import DraftPlan, pack_drafts


class Worker(TokenHashes):
    """Owns the network and its caches on this process's device.

    Args:
        checkpoint: opened files; must stay open.
        arithmetic: order and rounding.
        expanded: decode quantized weights once, or keep them as stored.
        max_length: exclusive upper bound of every position of a sequence.
        progress: show a bar while loading.
        nextn: drafts per sequence and step; 0 leaves the draft blocks unloaded.
        backtracking: tokens that the rings let a sequence undo, at least ``nextn + 1``.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        arithmetic: Arithmetic,
        *,
        expanded: bool,
        max_length: int,
        progress: bool = False,
        nextn: int = 0,
        backtracking: int = 0,
    ) -> None:
        super().__init__(checkpoint)
        self.config = checkpoint.config
        self.nextn = nextn
        source = WeightSource(checkpoint, expanded, arithmetic)
        # The last draft of a block may stand behind the longest sequence.
        self.network = TextNetwork(
            self.config, source, max_length + nextn, progress, drafts=nextn > 0
        )
        self.geometry = step_geometry(self.config, max(backtracking, nextn + 1))
        self.caches: list[LayerCache] = []

    def allocate(self, num_blocks: int, num_sequences: int, num_pages: int = 0) -> None:
        """Fresh caches for so many usable blocks, sequences and window pages.

        The dummy block, slot and page 0 are added. Old caches are dropped first.
        """
        self.caches = []
        geometry = self.geometry
        shape = CacheShape(
            num_blocks + 1, num_sequences + 1, geometry.window_ring, geometry.pair_ring,
            num_pages + 1, geometry.page_tail,
        )  # fmt: skip
        self.caches = self.network.allocate_caches(shape)

    @torch.inference_mode()
    def run(self, plans: Sequence[ChunkPlan]) -> Tensor:
        """Run one step: fp32 logits ``[o, V]`` of the rows that want them, in plan order."""
        logits: Tensor = self.network(pack(plans, self.geometry), self.caches)
        return logits

    @torch.inference_mode()
    def hidden(self, plans: Sequence[ChunkPlan]) -> Tensor:
        """Run one step: final hidden states ``[o, D]`` of the rows that want logits."""
        return self.network.hidden(pack(plans, self.geometry), self.caches)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits ``[n, V]`` of hidden states ``[n, D]``."""
        return self.network.head(hidden)

    @torch.inference_mode()
    def draft_hidden(self, plans: Sequence[DraftPlan]) -> Tensor:
        """Run the draft blocks: states before the post norm ``[s * nextn, D]``."""
        draft = self.config.draft
        assert draft is not None
        step = pack_drafts(plans, self.nextn, draft.noise_token_id, self.geometry)
        return self.network.draft_hidden(step, self.caches)

    @property
    def draft_heads(self) -> DraftHeads:
        """Heads of the draft blocks, which must be loaded."""
        assert self.network.drafts is not None
        return self.network.drafts.heads

    def restore_window(self, slot: int, length: int, pages: Sequence[int]) -> None:
        """Fill a sequence's window rings from the pages of the blocks before ``length``.

        Args:
            slot: the sequence's slot.
            length: tokens it continues from, a multiple of the block size.
            pages: window page of each of its blocks.
        """
        places, sources = window_copy(slot, length, pages, self.geometry)
        for cache in self.caches:
            cache.window.write(places, cache.pages.records[sources])


def step_geometry(config: ModelConfig, backtracking: int = 1) -> StepGeometry:
    """Window, ring sizes and ratios of a model whose steps may be undone so many tokens."""
    return StepGeometry(
        window=config.sliding_window,
        window_ring=window_ring_length(config.sliding_window, backtracking),
        pair_ring=pair_ring_length(2, backtracking),
        ratios=tuple(sorted({spec.ratio for spec in config.layers if spec.owns_kv})),
    )


def blocks_for(tokens: int) -> int:
    """Blocks that hold a sequence of that many tokens."""
    return -(-tokens // BLOCK_TOKENS)


def expanded_bytes(config: ModelConfig, *, drafts: bool) -> int:
    """Memory that the network takes with its quantized weights expanded."""
    parts = measure_parts(inventory(config))
    return total(text_parts(parts, drafts=drafts)).expanded

"""The network with its weights and caches: takes chunk plans, gives logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_neuron.cache.pools import (
    BLOCK_TOKENS,
    CacheShape,
    LayerCache,
    pair_ring_length,
    window_ring_length,
)
from deepinfer_neuron.checkpoint.config import ModelConfig
from deepinfer_neuron.checkpoint.engram import EngramHasher
from deepinfer_neuron.checkpoint.names import inventory
from deepinfer_neuron.checkpoint.reader import Checkpoint
from deepinfer_neuron.model.footprint import measure_parts, text_only, total
from deepinfer_neuron.model.matrix import WeightSource
from deepinfer_neuron.model.network import TextNetwork
from deepinfer_neuron.ops.arithmetic import Arithmetic
from deepinfer_neuron.runner.pack import ChunkPlan, StepGeometry, pack

BACKTRACKING_TOKENS = 1
"""Tokens that the rings let a sequence undo. One row per step and no drafts: one."""


class Worker:
    """Owns the network and its caches on this process's device.

    Args:
        checkpoint: opened files; must stay open.
        arithmetic: order and rounding.
        expanded: decode quantized weights once, or keep them as stored.
        max_length: exclusive upper bound of every position.
        progress: show a bar while loading.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        arithmetic: Arithmetic,
        *,
        expanded: bool,
        max_length: int,
        progress: bool = False,
    ) -> None:
        self.config = checkpoint.config
        source = WeightSource(checkpoint, expanded, arithmetic)
        self.network = TextNetwork(self.config, source, max_length, progress)
        self.hasher = engram_hasher(checkpoint)
        self.geometry = step_geometry(self.config)
        self.caches: list[LayerCache] = []

    def allocate(self, num_blocks: int, num_sequences: int) -> None:
        """Fresh caches for that many usable blocks and sequences; old ones are dropped first."""
        self.caches = []
        shape = CacheShape(
            num_blocks + 1, num_sequences + 1, self.geometry.window_ring, self.geometry.pair_ring
        )
        self.caches = self.network.allocate_caches(shape)

    def compress(self, token_ids: Sequence[int]) -> NDArray[np.int32]:
        """Compressed ids of tokens, for the Engram hashes; empty without Engram."""
        if self.hasher is None:
            return np.empty(0, dtype=np.int32)
        return self.hasher.compress(np.asarray(token_ids, dtype=np.int64))

    def engram_rows(
        self, compressed: NDArray[np.int32], start: int, stop: int
    ) -> NDArray[np.int64]:
        """Table rows ``[layers, stop - start, columns]`` of positions ``[start, stop)``.

        ``compressed`` holds at least the sequence's first ``stop`` compressed ids.
        """
        if self.hasher is None:
            return np.empty((0, stop - start, 0), dtype=np.int64)
        return self.hasher.sequence_rows(compressed[:stop], start)

    @torch.inference_mode()
    def run(self, plans: Sequence[ChunkPlan]) -> Tensor:
        """Run one step: fp32 logits ``[o, V]`` of the plans that want them, in plan order."""
        logits: Tensor = self.network(pack(plans, self.geometry), self.caches)
        return logits


def engram_hasher(checkpoint: Checkpoint) -> EngramHasher | None:
    """The hasher of a checkpoint with Engram, else ``None``."""
    if checkpoint.config.engram is None:
        return None
    return EngramHasher.from_config(
        checkpoint.config.engram, checkpoint.directory / "tokenizer.json"
    )


def step_geometry(config: ModelConfig) -> StepGeometry:
    """Window, ring sizes and ratios of a model."""
    return StepGeometry(
        window=config.sliding_window,
        window_ring=window_ring_length(config.sliding_window, BACKTRACKING_TOKENS),
        pair_ring=pair_ring_length(2, BACKTRACKING_TOKENS),
        ratios=tuple(sorted({spec.ratio for spec in config.layers if spec.owns_kv})),
    )


def blocks_for(tokens: int) -> int:
    """Blocks that hold a sequence of that many tokens."""
    return -(-tokens // BLOCK_TOKENS)


def expanded_bytes(config: ModelConfig) -> int:
    """Memory that the network takes with its quantized weights expanded."""
    return total(text_only(measure_parts(inventory(config)))).expanded

"""A decode step of the released model on a rank of 64, with shapes only."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from torch import nn

from deepinfer_neuron.cache.pools import CacheShape
from deepinfer_neuron.checkpoint.config import ModelConfig, parse_config
from deepinfer_neuron.model.matrix import WeightSource
from deepinfer_neuron.model.rank_weights import VISION, RankSplit, rank_tensors
from deepinfer_neuron.model.shapes import PassShape
from deepinfer_neuron.model.static.network import StaticNetwork
from deepinfer_neuron.ops.arithmetic import graph_arithmetic
from deepinfer_neuron.platform.regions import PlainBackend, RegionKey, Regions, Signature
from deepinfer_neuron.runner.graph_count import decode_launches
from deepinfer_neuron.runner.worker import step_geometry
from tests.support.meta_weights import META, MetaCheckpoint
from tests.support.released import released_config

RANKS, NEXTN, LENGTH = 64, 5, 16384
SHAPE = PassShape(sequences=1, rows=8, blocks=LENGTH // 128, outputs=1 + NEXTN)


@functools.cache
def released() -> ModelConfig:
    return parse_config(released_config(), "config.json")


def rank_config() -> ModelConfig:
    """The released model with the table rows of one rank."""
    engram = released().engram
    assert engram is not None
    rows = tuple(-(-count // RANKS) for count in engram.num_embeddings)
    return dataclasses.replace(released(), engram=dataclasses.replace(engram, num_embeddings=rows))


class Once(PlainBackend):
    """Runs one module of a kind per signature; the others get results of the same shapes.

    That is what a compiled graph does, and it is told apart by the shapes of the weights too, so
    layers that could not share a graph would be seen.
    """

    def __init__(self) -> None:
        self.results: dict[Hashable, Any] = {}

    def run(
        self,
        key: RegionKey,
        signature: Signature,
        function: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
    ) -> Any:
        state = tuple((n, b.dtype, tuple(b.shape)) for n, b in module.named_buffers())
        graph = (key, signature, state)
        if graph not in self.results:
            self.results[graph] = super().run(key, signature, function, module, args)
        return self.results[graph]


@pytest.fixture(scope="module")
def network() -> StaticNetwork:
    config = rank_config()
    source = WeightSource(
        MetaCheckpoint(config), expanded=False, arithmetic=graph_arithmetic(), rank=3, ranks=RANKS
    )
    built = StaticNetwork(
        config, source, LENGTH, Regions(Once()), nextn=NEXTN, temperatures=(1.0,) * NEXTN
    )
    return built.to(META)


def test_a_decode_step_runs(network: StaticNetwork) -> None:
    config, geometry = released(), step_geometry(released(), NEXTN + 1)
    cache = CacheShape(
        1 + SHAPE.blocks, 2, geometry.window_ring, geometry.pair_ring, 2, geometry.page_tail
    )
    caches = network.allocate(cache, META)
    block = torch.empty(network.layout.size(SHAPE), dtype=torch.int32, device=META)
    with torch.inference_mode():
        trunk, step = network.run(block, SHAPE, caches)
        tokens, accepted = network.head.verify(trunk.streams, trunk.mix, step.outputs)
        left = network.propose(tokens, accepted, step, caches)
    assert trunk.streams.shape == (8, 4, 5120)
    assert (tuple(tokens.shape), tuple(accepted.shape)) == ((1, 6), (1,))
    # Tokens, accepted drafts, drafts, and their confidences.
    assert tuple(left.shape) == (1, 6 + 1 + 5 + 5)
    regions = network.embedding.regions
    expected = Counter(decode_launches(config, SHAPE, NEXTN))
    launched = {str(record.key): record.calls for record in regions.records}
    assert launched == expected
    assert regions.calls == 92 <= 3 * 40 + 10
    # Every region at one signature (the selections of both ratios are 512 entries of 8 rows), with
    # weights of one shape each.
    assert isinstance(regions.backend, Once)
    assert len(regions.records) == len(regions.backend.results) == len(expected) == 14


def test_weights_are_those_that_a_rank_is_counted_with(network: StaticNetwork) -> None:
    tensors = {id(buffer): buffer for buffer in network.buffers()}
    rotary = network.preparation
    held = sum(tensor.nbytes for tensor in tensors.values())
    held -= rotary.base_table.nbytes + rotary.compressed_table.nbytes
    counted = sum(
        tensor.bytes * tensor.copies
        for tensor in rank_tensors(released(), RankSplit(RANKS, RANKS))
        if tensor.component != VISION
    )
    assert held == pytest.approx(counted, rel=1e-4)
    assert 17.0 < held / 2**30 < 17.2


def test_a_rank_holds_its_experts(network: StaticNetwork) -> None:
    mixtures = [m for m in network.modules() if hasattr(m, "first_expert")]
    assert [m.experts.count for m in mixtures] == [384 // RANKS] * 40 + [128 // RANKS] * 3

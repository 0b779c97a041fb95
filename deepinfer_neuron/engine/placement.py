"""Does a model fit on so many cores, and what would it do there.

Everything follows from the configuration; no weights are needed. One core stands for all of them:
the split is even, so the fullest core holds what this one does.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_neuron.cache.pools import BLOCK_TOKENS, pair_ring_length, window_ring_length
from deepinfer_neuron.cache.records import CodecSet
from deepinfer_neuron.checkpoint.config import ModelConfig
from deepinfer_neuron.engine.config import block_bytes, page_bytes
from deepinfer_neuron.engine.forecast import Forecast, decode_shape, forecast
from deepinfer_neuron.engine.layout import Layout
from deepinfer_neuron.model.rank_weights import (
    COMPONENTS,
    DRAFTS,
    EMBEDDING,
    EXPERTS,
    TABLES,
    VISION,
    Component,
    rank_tensors,
)
from deepinfer_neuron.platform.simulator.cost import GIB, CoreSpec, trn2_core
from deepinfer_neuron.runner.graph_count import planned_graphs
from deepinfer_neuron.runner.worker import blocks_for

SCALES = "scales of dense matrices"

_PAGE_SHARE = 0.1
"""Share of the memory behind weights and states that window pages of the prefix cache may take."""


@dataclass(frozen=True)
class Reserves:
    """Memory of a core that neither weights nor caches may take, in bytes.

    Attributes:
        micro_code: instructions of both physical cores.
        scratch: working memory of the hungriest graph.
        free: kept free, because the device's pool fragments.
    """

    micro_code: int = 192 * 2**20
    scratch: int = GIB
    free: int = 3 * GIB // 2

    @property
    def total(self) -> int:
        """Their sum."""
        return self.micro_code + self.scratch + self.free


@dataclass(frozen=True)
class Item:
    """Bytes of one component on a core."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Memory:
    """Where the bytes of a core go.

    Attributes:
        weights: by component, as stored.
        host: what stays in the host's memory, by component.
        states: rings of the sequences, rotary tables, and what padding writes to.
        reserves: micro-code, scratch and what is kept free.
        capacity: of the core.
        block_bytes: of one block of the paged caches.
        blocks_needed: for one sequence of the greatest length, the dummy block included.
        blocks_wanted: for all sequences at that length.
    """

    weights: tuple[Item, ...]
    host: tuple[Item, ...]
    states: tuple[Item, ...]
    reserves: tuple[Item, ...]
    capacity: int
    block_bytes: int
    blocks_needed: int
    blocks_wanted: int

    @property
    def weight_bytes(self) -> int:
        """All weights."""
        return sum(item.bytes for item in self.weights)

    @property
    def fixed_bytes(self) -> int:
        """Everything but the paged caches."""
        return sum(item.bytes for item in (*self.weights, *self.states, *self.reserves))

    @property
    def missing(self) -> int:
        """Bytes that the core lacks, 0 or less if the layout fits."""
        return self.fixed_bytes + self.blocks_needed * self.block_bytes - self.capacity


@dataclass(frozen=True)
class Placement:
    """A layout that fits.

    Attributes:
        layout: the request.
        memory: by component.
        blocks: of the paged caches, the dummy block included.
        blocks_that_fit: most blocks that would fit if nothing were expanded.
        pages: window pages of the prefix cache, besides the dummy page 0.
        page_bytes: of one of them.
        expanded_bytes: what expanded matrices take on top of the packed ones.
        unused: bytes that are left beyond the reserves.
        graphs_by_region: graphs to compile, by region.
        step: estimated decode step of one sequence.
    """

    layout: Layout
    memory: Memory
    blocks: int
    blocks_that_fit: int
    pages: int
    page_bytes: int
    expanded_bytes: int
    unused: int
    graphs_by_region: tuple[tuple[str, int], ...]
    step: Forecast

    @property
    def graphs(self) -> int:
        """All graphs that a warm-up compiles."""
        return sum(count for _, count in self.graphs_by_region)


def measure(
    config: ModelConfig, layout: Layout, core: CoreSpec, reserves: Reserves | None = None
) -> Memory:
    """Bytes of a core by component."""
    held = Reserves() if reserves is None else reserves
    weights, host = _weights(config, layout)
    per_sequence = blocks_for(layout.max_model_len)
    return Memory(
        weights=weights,
        host=host,
        states=_states(config, layout),
        reserves=(
            Item("micro-code", held.micro_code),
            Item("scratch", held.scratch),
            Item("kept free", held.free),
        ),
        capacity=core.hbm_bytes,
        block_bytes=block_bytes(config),
        blocks_needed=1 + per_sequence,
        blocks_wanted=1 + per_sequence * layout.max_num_seqs,
    )


def place(
    config: ModelConfig, layout: Layout, core: CoreSpec | None = None, *, context: int = 1
) -> Placement | None:
    """The placement of a layout, ``None`` if it does not fit.

    Caches come first: blocks for every sequence at the greatest length, or as many as fit. Window
    pages take up to a tenth, expanded matrices what is left and helps.

    Args:
        config: the model.
        layout: the request.
        core: rates and memory; Trainium2 if left out.
        context: tokens of the one sequence whose decode step is estimated.
    """
    core = trn2_core() if core is None else core
    memory = measure(config, layout, core)
    if memory.missing > 0:
        return None
    left = memory.capacity - memory.fixed_bytes
    fitting = left // memory.block_bytes
    blocks = min(memory.blocks_wanted, fitting)
    page = page_bytes(config, layout.nextn)
    left -= blocks * memory.block_bytes
    pages = min(blocks - 1, int(_PAGE_SHARE * left) // page)
    left -= pages * page
    shape = decode_shape(config, layout, 1, context)
    step = forecast(config, layout, shape, left, core)
    graphs = planned_graphs(config, layout.ladder(config), layout.nextn)
    return Placement(
        layout=layout,
        memory=memory,
        blocks=blocks,
        blocks_that_fit=fitting,
        pages=pages,
        page_bytes=page,
        expanded_bytes=step.path.extra_bytes,
        unused=left - step.path.extra_bytes,
        graphs_by_region=tuple(graphs.items()),
        step=step,
    )


def _weights(config: ModelConfig, layout: Layout) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """Weights of a core, and those that stay in host memory; scales of experts with them."""
    totals: dict[Component, int] = {}
    for tensor in rank_tensors(config, layout.split):
        if tensor.component == DRAFTS and not layout.nextn:
            continue
        with_scales = tensor.component in (EXPERTS, TABLES, DRAFTS)
        held = tensor.bytes if with_scales else tensor.code_bytes
        scales = tensor.bytes - held
        totals[tensor.component] = totals.get(tensor.component, 0) + held * tensor.copies
        totals[SCALES] = totals.get(SCALES, 0) + scales * tensor.copies
    items = [Item(name, totals[name]) for name in (*COMPONENTS, SCALES) if totals.get(name)]
    in_host = {VISION, EMBEDDING} if layout.host_embed else {VISION}
    return (
        tuple(item for item in items if item.name not in in_host),
        tuple(item for item in items if item.name in in_host),
    )


def _states(config: ModelConfig, layout: Layout) -> tuple[Item, ...]:
    """What every sequence keeps besides blocks, and what the greatest length takes."""
    codecs = CodecSet.of(config.head_dim, config.index_head_dim, rounding=True)
    slots, undo = layout.max_num_seqs + 1, layout.nextn + 1
    layers = len(config.layers) + (config.num_draft_layers if layout.nextn else 0)
    ring = window_ring_length(config.sliding_window, undo) * codecs.window.width
    pairs = sum(spec.owns_kv and spec.ratio == 2 for spec in config.layers)
    state = pair_ring_length(2, undo) * 2 * config.head_dim * 4
    positions = layout.max_model_len + layout.nextn
    # Two tables, one for window-only and one for compressed layers, in fp32.
    tables = 2 * positions * config.qk_rope_head_dim * 4
    return (
        Item("window rings", slots * layers * ring),
        Item("compressor states", slots * pairs * state),
        Item("rotary tables", tables),
        Item("window page of padding", page_bytes(config, layout.nextn)),
    )


def tokens_of(blocks: int) -> int:
    """Tokens that so many blocks hold, the dummy block excluded."""
    return (blocks - 1) * BLOCK_TOKENS

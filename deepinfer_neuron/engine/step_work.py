"""What a decode step moves, computes and converts on one core, region by region.

Everything is counted from the configuration: weights from the inventory, cache reads from the
static shape of the pass (a graph of fixed shape reads its whole block table, live or not),
operations from the sizes of the matrices. The regions are those that a device launches
(:func:`deepinfer_neuron.runner.graph_count.decode_launches`): two per layer (attention and experts,
each with its hyper-connection site), one per Engram update, metadata, embedding, head with
verification, and for drafts the update of their keys, their beginning and embedding, one per draft
layer and the whole chain of draft tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from deepinfer_neuron.cache.pools import BLOCK_TOKENS
from deepinfer_neuron.cache.records import CodecSet
from deepinfer_neuron.checkpoint.config import LayerSpec, ModelConfig
from deepinfer_neuron.engine.layout import Layout
from deepinfer_neuron.model.rank_weights import (
    DRAFTS,
    EMBEDDING,
    ENGRAM,
    HEAD,
    Component,
    RankTensor,
    rank_tensors,
)
from deepinfer_neuron.model.shapes import PassShape
from deepinfer_neuron.model.static.attention import attention_kind
from deepinfer_neuron.model.weight_path import Matrix, RegionLoad
from deepinfer_neuron.platform.simulator.cost import CollectiveCost

CACHE_READS = "cache reads"
ACTIVATIONS = "activations"

PASSES = 2
"""Of the vector engine per converted element: cast, scale."""

_BF16, _FP32 = 2, 4


@dataclass
class Work:
    """Bytes, operations and conversions of a component besides its quantized matrices."""

    bytes: int = 0
    flops: int = 0
    converted: int = 0


@dataclass
class RegionWork:
    """One launch of a region, by component."""

    name: str
    kind: str = ""
    """Regions of one kind name their matrices alike; the region's name if left out."""
    work: defaultdict[Component, Work] = field(default_factory=lambda: defaultdict(Work))
    matrices: list[tuple[Component, Matrix]] = field(default_factory=list)

    def load(self) -> RegionLoad:
        """The sum over components."""
        return RegionLoad(
            name=self.name,
            matrices=tuple(matrix for _, matrix in self.matrices),
            bytes=sum(work.bytes for work in self.work.values()),
            flops=sum(work.flops for work in self.work.values()),
            converted_elements=sum(work.converted for work in self.work.values()),
            passes=PASSES,
        )

    def add(self, tensors: Iterable[RankTensor], rows: int, times: int = 1) -> RegionWork:
        """Read tensors and multiply ``rows`` rows with them, ``times`` times over."""
        for tensor in tensors:
            work = self.work[tensor.component]
            work.flops += 2 * rows * tensor.values * tensor.copies * times
            if not tensor.quantized:
                work.bytes += tensor.bytes * tensor.copies * times
                continue
            for copy in range(tensor.copies):
                # The first expert stands for all of a block; give each its own name.
                name = tensor.name.replace(".experts.0.", f".experts.{copy}.")
                place = name.removeprefix(f"{tensor.block}.")
                family = f"{self.kind or self.name}: {place}"
                self.matrices.append(
                    (tensor.component, Matrix(name, family, tensor.values, tensor.bytes))
                )
        return self

    def extra(
        self, component: Component, moved: int, flops: int = 0, converted: int = 0
    ) -> RegionWork:
        """Work besides weights."""
        work = self.work[component]
        work.bytes += moved
        work.flops += flops
        work.converted += converted
        return self


@dataclass(frozen=True)
class StepWork:
    """All launches of a step in order, and its exchanges between cores."""

    regions: tuple[RegionWork, ...]
    collectives: tuple[CollectiveCost, ...]


def step_work(config: ModelConfig, layout: Layout, shape: PassShape) -> StepWork:
    """The work of one step of the backbone and, with drafts, of one pass of the draft blocks.

    Args:
        config: the model.
        layout: how it is spread.
        shape: of the backbone's pass.
    """
    return _Counter(config, layout, shape).step()


class _Counter:
    """Counts one step."""

    def __init__(self, config: ModelConfig, layout: Layout, shape: PassShape) -> None:
        self.config, self.layout, self.shape = config, layout, shape
        self.rows = shape.total_rows
        self.codecs = CodecSet.of(config.head_dim, config.index_head_dim, rounding=True)
        self.heads = config.num_attention_heads
        self.vocabulary = config.vocab_size
        if layout.dense == "sharded":
            self.heads = -(-self.heads // layout.cores)
            self.vocabulary = -(-self.vocabulary // layout.cores)
        self.blocks: defaultdict[str, list[RankTensor]] = defaultdict(list)
        for tensor in rank_tensors(config, layout.split):
            self.blocks[tensor.block].append(tensor)

    def step(self) -> StepWork:
        regions = [RegionWork("metadata"), self._embed("embedding", EMBEDDING, self.rows)]
        for layer in self.config.layers:
            if layer.engram is not None:
                regions.append(self._engram(layer))
            regions += self._layer(layer)
        wanted = self.shape.sequences * self.shape.outputs
        logits = wanted * self.vocabulary * _FP32
        head = RegionWork("head, verification")
        head.add(self._named("", "head.weight", "norm."), wanted)
        # Written by the product, then read twice: for the largest, and for its place.
        regions.append(head.extra(HEAD, 3 * logits))
        # Tokens and counts are joined for the download, by the chain of drafts where there is one.
        regions += self._drafts() if self.layout.nextn else [RegionWork("result")]
        return StepWork(tuple(regions), tuple(_merged(self._collectives())))

    def _named(self, block: str, *starts: str) -> list[RankTensor]:
        """Tensors of a block that start with one of ``starts`` inside it, tables left out."""
        return [t for t in self.blocks[block] if t.suffix.startswith(starts) and not t.gathered]

    def _embed(self, name: str, component: Component, rows: int) -> RegionWork:
        width = self.config.hidden_size
        region = RegionWork(name).extra(component, rows * width * _BF16)
        return region.extra(ACTIVATIONS, rows * self.config.hc_width * _BF16)

    def _site(self, region: RegionWork, rows: int) -> RegionWork:
        """Reading and writing the residual streams."""
        return region.extra(ACTIVATIONS, 2 * rows * self.config.hc_width * _BF16)

    def _engram(self, layer: LayerSpec) -> RegionWork:
        engram = self.config.engram
        assert engram is not None
        region = RegionWork("Engram")
        region.add(self._named(f"layers.{layer.index}", "engram."), self.rows)
        bundle = self.rows * engram.row_bundle
        # One core reads a row of codes and scales; here as if it were always this one.
        region.extra(ENGRAM, bundle + bundle // 32, converted=bundle)
        return self._site(region, self.rows)

    def _layer(self, layer: LayerSpec) -> list[RegionWork]:
        block = f"layers.{layer.index}"
        name = f"attention, {layer.role.value}, ratio {layer.ratio}"
        # Modules that share graphs must hold their matrices alike.
        attention = RegionWork(name, f"attention, {attention_kind(self.config, layer)}")
        attention.add(self._named(block, "attn", "hc_attn"), self.rows)
        self._window(attention, self.rows, self.config.sliding_window)
        if layer.ratio:
            self._far(attention, layer)
        experts = RegionWork("experts").add(self._named(block, "ffn", "hc_ffn"), self.rows)
        return [self._site(attention, self.rows), self._site(experts, self.rows)]

    def _window(self, region: RegionWork, rows: int, keys: int) -> None:
        """Every row reads its window."""
        self._attend(region, rows, keys, self.codecs.window.width)

    def _attend(self, region: RegionWork, rows: int, keys: int, width: int) -> None:
        """Gather, decode and attend to so many keys per row: scores and values, two flops each."""
        dim = self.config.head_dim
        region.extra(
            CACHE_READS,
            rows * keys * width,
            flops=4 * rows * keys * self.heads * dim,
            converted=rows * keys * dim,
        )

    def _far(self, region: RegionWork, layer: LayerSpec) -> None:
        """Compressed keys, and the scan of the index keys where the layer selects."""
        c = self.config
        entries = self.shape.blocks * (BLOCK_TOKENS // layer.ratio)
        self._attend(region, self.rows, min(c.index_topk, entries), self.codecs.compressed.width)
        if layer.owns_index:
            scanned = self.shape.sequences * entries
            region.extra(
                CACHE_READS,
                scanned * self.codecs.index.width,
                flops=2 * self.rows * entries * c.index_n_heads * c.index_head_dim,
                converted=scanned * c.index_head_dim,
            )

    def _drafts(self) -> list[RegionWork]:
        """Key update with the backbone's rows, then one block of drafts per sequence."""
        c, nextn = self.config, self.layout.nextn
        ladder = self.layout.ladder(c)
        draft_shape = ladder.draft_shape(self.shape.sequences)
        rows = draft_shape.total_rows
        update = RegionWork("draft key update", "draft layer").add(
            self._named("mtp.0", "main_"), self.rows
        )
        regions = [update, RegionWork("draft beginning")]
        regions.append(self._embed("draft embedding", DRAFTS, rows))
        for index in range(c.num_draft_layers):
            block = f"mtp.{index}"
            update.add(self._named(block, "attn.wkv", "attn.kv_norm"), self.rows)
            layer = RegionWork("draft layer")
            layer.add(self._named(block, "attn", "hc_attn", "ffn", "hc_ffn"), rows)
            self._window(layer, rows, c.sliding_window + draft_shape.rows)
            regions.append(self._site(self._site(layer, rows), rows))
        return [*regions, self._chain(rows, nextn)]

    def _chain(self, rows: int, nextn: int) -> RegionWork:
        """Norm, head, and one place after the other: Markov bias, confidence, choice."""
        sequences = self.shape.sequences
        chain = RegionWork("draft chain")
        last = f"mtp.{self.config.num_draft_layers - 1}"
        for tensor in self._named("", "head.weight"):
            chain.extra(DRAFTS, tensor.bytes, flops=2 * rows * tensor.values)
        markov = self._named(last, "norm", "markov_head.head", "confidence_head")
        chain.add(markov, sequences, times=nextn)
        return chain.extra(DRAFTS, 3 * rows * self.vocabulary * _FP32)

    def _collectives(self) -> Iterator[CollectiveCost]:
        """Exchanges of a step.

        One per mixture of experts and per Engram update, and one vector of control values; with
        sharded dense matrices also those of :meth:`_sharded_collectives`.
        """
        c, cores, rows = self.config, self.layout.cores, self.rows
        width = c.hidden_size * _BF16
        engrams = sum(layer.engram is not None for layer in c.layers)
        draft_rows = 0
        blocks = c.num_draft_layers if self.layout.nextn else 0
        if blocks:
            draft_rows = self.layout.ladder(c).draft_shape(self.shape.sequences).total_rows
        groups = len(c.layers), blocks
        sharded = self.layout.dense == "sharded"
        # The shared expert's part rides on the exchange of the routed ones.
        ranks = cores if sharded else self.layout.ep
        for count, group_rows in zip(groups, (rows, draft_rows), strict=True):
            yield CollectiveCost(count, group_rows * width, ranks)
        if c.engram is not None:
            yield CollectiveCost(engrams, rows * c.engram.row_bundle * _BF16, cores)
        yield CollectiveCost(1, self.shape.sequences * 4 * _FP32, cores)
        if sharded:
            yield from self._sharded_collectives(draft_rows)

    def _sharded_collectives(self, draft_rows: int) -> Iterator[CollectiveCost]:
        """Exchanges behind ``wo_a``, ``wo_b``, the Engram projection, embeddings and heads."""
        c, cores, rows = self.config, self.layout.cores, self.rows
        width = c.hidden_size * _BF16
        latent = c.o_groups * c.o_lora_rank * _BF16
        engrams = sum(layer.engram is not None for layer in c.layers)
        blocks = c.num_draft_layers if self.layout.nextn else 0
        groups = len(c.layers), blocks
        for count, group_rows in zip(groups, (rows, draft_rows), strict=True):
            yield CollectiveCost(count, group_rows * latent, cores)
            yield CollectiveCost(count, group_rows * width, cores)
        yield CollectiveCost(engrams, rows * (c.hc_mult + 1) * width, cores)
        yield CollectiveCost(1, rows * width, cores)
        # Choices of a vocabulary in parts: a value and an id per row and core.
        yield CollectiveCost(1, rows * cores * 2 * _FP32, cores)
        if blocks:
            yield CollectiveCost(1, rows * width, cores)
            yield CollectiveCost(1, draft_rows * width, cores)
            small = self.shape.sequences * cores * 2 * _FP32
            yield CollectiveCost(self.layout.nextn, small, cores)


def _merged(collectives: Iterable[CollectiveCost]) -> list[CollectiveCost]:
    """Exchanges of equal size together."""
    counts: dict[tuple[int, int], int] = {}
    for cost in collectives:
        if cost.count:
            key = (cost.bytes, cost.ranks)
            counts[key] = counts.get(key, 0) + cost.count
    return [CollectiveCost(count, size, ranks) for (size, ranks), count in counts.items()]

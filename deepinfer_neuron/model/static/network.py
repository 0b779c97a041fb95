"""The network over a pass: which regions run, in which order, on which caches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tqdm import tqdm

from deepinfer_neuron.cache.pools import CacheShape
from deepinfer_neuron.checkpoint.config import LayerSpec, ModelConfig
from deepinfer_neuron.model.matrix import WeightSource
from deepinfer_neuron.model.network import rotary_tables
from deepinfer_neuron.model.shapes import PassShape
from deepinfer_neuron.model.static.attention import StaticAttention
from deepinfer_neuron.model.static.caches import (
    SourceCache,
    StaticCache,
    WindowCache,
    WordCodecs,
    allocate_static,
    allocate_window,
)
from deepinfer_neuron.model.static.drafts import StaticDraftLayer, StaticDrafts
from deepinfer_neuron.model.static.heads import StaticHead
from deepinfer_neuron.model.static.metadata import MetadataLayout
from deepinfer_neuron.model.static.mixture import LayerMixture, StaticEngram
from deepinfer_neuron.model.static.preparation import Embedding, Preparation
from deepinfer_neuron.model.static.restoring import WindowRestorer
from deepinfer_neuron.model.static.step import Published, StaticStep, WindowRows
from deepinfer_neuron.platform.regions import Regions


@dataclass(frozen=True)
class StaticCaches:
    """Caches of every layer."""

    backbone: tuple[StaticCache, ...]
    drafts: tuple[WindowCache, ...]

    @property
    def windows(self) -> tuple[WindowCache, ...]:
        """Window caches of all layers, those of the draft layers last."""
        return (*(cache.window for cache in self.backbone), *self.drafts)


@dataclass(frozen=True)
class Trunk:
    """Where a pass stands: residual streams ``[n, M, D]`` and the carried mix ``[n, M]``."""

    streams: Tensor
    mix: Tensor


class StaticLayer(nn.Module):
    """The regions of one backbone layer."""

    def __init__(
        self, config: ModelConfig, spec: LayerSpec, source: WeightSource, regions: Regions
    ) -> None:
        super().__init__()
        self.spec = spec
        self.engram: StaticEngram | None = None
        if spec.engram is not None:
            self.engram = StaticEngram(config, spec.index, source, regions)
        self.attention = StaticAttention(config, spec, source, regions)
        self.mixture = LayerMixture(config, spec.index, source, regions)


class StaticNetwork(nn.Module):
    """Embedding, layers, head and draft blocks, as regions.

    Args:
        config: model configuration.
        source: weights.
        max_length: exclusive upper bound of every position of a sequence.
        regions: where regions run.
        nextn: drafts per sequence, 0 leaves the draft blocks out.
        host_embed: token embeddings are looked up on the host and given to :meth:`run` and
            :meth:`propose`.
        temperatures: ``nextn`` divisors of the confidence logits.
        progress: show a bar while loading.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        max_length: int,
        regions: Regions,
        *,
        nextn: int = 0,
        host_embed: bool = False,
        temperatures: tuple[float, ...] = (),
        progress: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.nextn = config, nextn
        self.codecs = WordCodecs.of(config, source.arithmetic)
        self.layout = MetadataLayout.of(config, nextn)
        self.preparation = Preparation(
            self.layout, *rotary_tables(config, max_length + nextn), regions
        )
        table = None if host_embed else source.plain("embed.weight")
        self.embedding = Embedding(table, config.hc_mult, source.arithmetic, regions)
        self.layers = nn.ModuleList(
            StaticLayer(config, spec, source, regions)
            for spec in tqdm(config.layers, "loading", unit="layer", disable=not progress)
        )
        self.head = StaticHead(config, source, regions)
        self.restorer = WindowRestorer(regions)
        self.drafts: StaticDrafts | None = None
        self.targets: tuple[int, ...] = ()
        draft = config.draft
        if nextn and draft is not None:
            self.targets = draft.target_layer_ids
            layers = nn.ModuleList(
                StaticDraftLayer(config, draft, index, source, regions)
                for index in range(draft.num_layers)
            )
            self.drafts = StaticDrafts(
                config, draft, layers, nextn, self.preparation, self.head.head,
                torch.tensor(temperatures, dtype=torch.float32), source, regions,
            )  # fmt: skip

    def allocate(self, shape: CacheShape, device: torch.device) -> StaticCaches:
        """Zeroed caches of every layer."""
        layers = len(self.drafts.layers) if self.drafts is not None else 0
        return StaticCaches(
            tuple(allocate_static(self.codecs, spec, shape, device) for spec in self.config.layers),
            tuple(allocate_window(self.codecs, shape, device) for _ in range(layers)),
        )

    def run(
        self,
        block: Tensor,
        shape: PassShape,
        caches: StaticCaches,
        embedded: Tensor | None = None,
    ) -> tuple[Trunk, StaticStep]:
        """Run the backbone over a pass, embedding to last layer.

        Args:
            block: int32 metadata on the device.
            shape: of the pass.
            caches: written.
            embedded: ``[n, D]`` rows of the embedding, if it is in host memory.

        Returns:
            the trunk behind the last layer, and the pass taken apart.
        """
        step = self.preparation.prepare(block, shape)
        streams, mix = self._start(step.token_ids, embedded)
        published, targets = Published(), []
        for layer in self.layers:
            assert isinstance(layer, StaticLayer)
            spec = layer.spec
            if layer.engram is not None and spec.engram is not None:
                streams = layer.engram.remember(streams, step.engram[spec.engram])
            if spec.index in self.targets:
                targets.append(streams)
            rows = step.compressed if spec.ratio else step.plain
            cache = caches.backbone[spec.index]
            if spec.owns_index:
                source = step.ratio_1 if spec.ratio == 1 else step.ratio_2
                assert source is not None
                streams, mix, left = layer.attention.attend_and_select(
                    streams, mix, rows, cache.window, source, self._pools(spec, caches),
                    _taken(spec, published), shape,
                )  # fmt: skip
                published = _merged(published, left)
            else:
                selection = published.selection if spec.ratio else None
                streams, mix = layer.attention.attend(streams, mix, rows, cache.window, selection)
            streams, mix = layer.mixture.mix(streams, mix)
        if self.drafts is not None:
            self._remember(self.drafts, targets, step.plain, caches)
        return Trunk(streams, mix), step

    def propose(
        self,
        tokens: Tensor,
        accepted: Tensor,
        step: StaticStep,
        caches: StaticCaches,
        embedded: Tensor | None = None,
    ) -> Tensor:
        """Draft for every sequence of a pass.

        Args:
            tokens: int32 ``[S, O]`` tokens of the pass.
            accepted: int32 ``[S]``: the newest token of a sequence is ``tokens[s, accepted[s]]``.
            step: the pass.
            caches: only read.
            embedded: ``[S * K', D]`` rows of the embedding, if it is in host memory.

        Returns:
            int32 ``[S, O + 1 + 2 K]``: tokens, accepted drafts, next drafts, confidence bits.
        """
        assert self.drafts is not None
        assert step.draft_history is not None
        rows = self.drafts.begin(tokens, accepted, step.outputs.next, step.draft_history)
        streams, mix = self._start(rows.token_ids, embedded)
        for layer, cache in zip(self.drafts.layers, caches.drafts, strict=True):
            assert isinstance(layer, StaticDraftLayer)
            streams, mix = layer.draft(streams, mix, rows, cache.ring)
        return self.drafts.propose(streams, mix, rows.golden, tokens, accepted)

    def _start(self, token_ids: Tensor, embedded: Tensor | None) -> tuple[Tensor, Tensor]:
        if embedded is None:
            return self.embedding.start(token_ids)
        return self.embedding.start_from(embedded)

    def restore(self, places: Tensor, caches: StaticCaches) -> None:
        """Copy window keys from pages to rings in every layer.

        Args:
            places: int32 ``[2, W - 1]``: ring places, then page places.
            caches: written.
        """
        for cache in caches.windows:
            self.restorer.restore(places, cache)

    def _remember(
        self, drafts: StaticDrafts, trunks: list[Tensor], rows: WindowRows, caches: StaticCaches
    ) -> None:
        drafts.remember(tuple(trunks), rows.turns, rows.places, rows.page_places, caches.drafts)

    def _pools(self, spec: LayerSpec, caches: StaticCaches) -> SourceCache:
        """Pools that an index source reads, with the open pairs where it owns them."""
        assert spec.kv_source is not None
        assert spec.index_k_source is not None
        keys = caches.backbone[spec.kv_source].source
        index = caches.backbone[spec.index_k_source].source.index_keys
        return SourceCache(keys.entries, index, keys.pairs if spec.owns_kv else None)


def _taken(spec: LayerSpec, published: Published) -> Published:
    """What a source layer needs of what earlier ones left; nothing else enters its graph."""
    return Published(
        None,
        published.latent if spec.owns_index_k and not spec.owns_kv else None,
        published.candidates if spec.candidate_source is not None else None,
    )


def _merged(before: Published, left: Published) -> Published:
    return Published(
        left.selection,
        left.latent if left.latent is not None else before.latent,
        left.candidates if left.candidates is not None else before.candidates,
    )

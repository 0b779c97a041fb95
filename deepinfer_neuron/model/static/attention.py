"""Attention of one backbone layer as a region; its role decides what it takes and leaves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_neuron.cache.pools import BLOCK_TOKENS
from deepinfer_neuron.checkpoint.config import LayerSpec, ModelConfig
from deepinfer_neuron.model.attention import Attention, IndexKeys, KeySource, Selector
from deepinfer_neuron.model.blocks import Site
from deepinfer_neuron.model.matrix import WeightSource
from deepinfer_neuron.model.shapes import PassShape
from deepinfer_neuron.model.static.caches import SourceCache, WindowCache, WordCodecs
from deepinfer_neuron.model.static.step import Published, RatioRows, Selection, WindowRows
from deepinfer_neuron.ops import graph_select, index
from deepinfer_neuron.ops.attention import sink_attention
from deepinfer_neuron.ops.compress import pool_pairs
from deepinfer_neuron.ops.index import index_scores
from deepinfer_neuron.ops.norm import rms_norm
from deepinfer_neuron.ops.quant import q8
from deepinfer_neuron.ops.rope import rope
from deepinfer_neuron.platform.regions import RegionModule, Regions, region


class Selections(NamedTuple):
    """The forms of the selections."""

    first_entries: Callable[[Tensor, int], Tensor]
    top_entries: Callable[[Tensor, int], Tensor]
    candidate_blocks: Callable[[Tensor, Tensor, int, int], Tensor]
    candidate_mask: Callable[[Tensor, int, int], Tensor]


HOST_FORMS = Selections(
    index.first_entries, index.top_entries, index.candidate_blocks, index.candidate_mask
)
GRAPH_FORMS = Selections(
    graph_select.first_entries,
    graph_select.top_entries,
    graph_select.candidate_blocks,
    graph_select.candidate_mask,
)


def leaves_latent(config: ModelConfig, spec: LayerSpec) -> bool:
    """Whether a layer behind this one makes index keys of this layer's entries."""
    return spec.owns_kv and any(
        other.owns_index_k and not other.owns_kv and other.kv_source == spec.index
        for other in config.layers
    )


def attention_kind(config: ModelConfig, spec: LayerSpec) -> str:
    """What tells the graphs of a layer's attention from those of other layers.

    Layers that select nothing share one graph, whatever the ratio of the keys they are given.
    """
    if not spec.owns_index:
        return "reuse" if spec.ratio else "window"
    parts = [f"ratio {spec.ratio}"]
    parts += ["keys"] * spec.owns_kv
    parts += ["index keys"] * spec.owns_index_k
    parts += ["index"] * spec.owns_index
    parts += ["latents"] * leaves_latent(config, spec)
    parts += ["candidates"] * spec.is_candidate_source
    parts += ["within candidates"] * (spec.candidate_source is not None)
    return ", ".join(parts)


class StaticAttention(RegionModule):
    """Hyper-connection site and attention of one layer.

    Args:
        config: the model.
        spec: role of the layer.
        source: weights.
        regions: where regions run.
    """

    rows_pow2 = True

    def __init__(
        self, config: ModelConfig, spec: LayerSpec, source: WeightSource, regions: Regions
    ) -> None:
        super().__init__(regions, attention_kind(config, spec))
        self.config, self.arithmetic = config, source.arithmetic
        self.ratio = spec.ratio
        self.site = Site(config, f"layers.{spec.index}", "attn", source)
        self.own = Attention(config, spec, source)
        self.codecs = WordCodecs.of(config, source.arithmetic)
        self.forms = GRAPH_FORMS if self.arithmetic.graph else HOST_FORMS
        self.gives_candidates = spec.is_candidate_source
        self.gives_latent = leaves_latent(config, spec)
        self.takes_candidates = spec.candidate_source is not None

    @region
    def attend(
        self,
        trunk: Tensor,
        pre: Tensor,
        rows: WindowRows,
        cache: WindowCache,
        selection: Selection | None,
    ) -> tuple[Tensor, Tensor]:
        """A layer that selects nothing itself.

        Args:
            trunk: ``[n, M, D]``.
            pre: fp32 ``[n, M]``, mix of the site before.
            rows: window keys of the pass.
            cache: of this layer; written.
            selection: of the index source, ``None`` for a window-only layer.

        Returns:
            the new trunk and this site's mix.
        """

        def block(y: Tensor) -> Tensor:
            a = q8(y, self.arithmetic)
            return self._attention(a, self.own.latent(a), rows, cache, selection)

        attended: tuple[Tensor, Tensor] = self.site(trunk, pre, block)
        return attended

    @region
    def attend_and_select(
        self,
        trunk: Tensor,
        pre: Tensor,
        rows: WindowRows,
        cache: WindowCache,
        source: RatioRows,
        pools: SourceCache,
        published: Published,
        shape: PassShape,
    ) -> tuple[Tensor, Tensor, Published]:
        """A source layer: stores what it owns, selects, attends.

        Args:
            trunk: ``[n, M, D]``.
            pre: fp32 ``[n, M]``.
            rows: window keys of the pass.
            cache: of this layer; written.
            source: entries of this layer's ratio.
            pools: of the layers that own the entries and index keys; written where that is this
                layer.
            published: what earlier sources left.
            shape: of the pass.

        Returns:
            the new trunk, this site's mix, and what is left for the layers behind.
        """
        left: list[Published] = []

        def block(y: Tensor) -> Tensor:
            a = q8(y, self.arithmetic)
            latent = self.own.latent(a)
            left.append(self._publish(y, latent, rows, source, pools, published, shape))
            return self._attention(a, latent, rows, cache, left[0].selection)

        trunk, pre = self.site(trunk, pre, block)
        return trunk, pre, left[0]

    def _attention(
        self,
        a: Tensor,
        latent: Tensor,
        rows: WindowRows,
        cache: WindowCache,
        selection: Selection | None,
    ) -> Tensor:
        """Attention output ``[n, D]`` of quantized hidden states and query latents."""
        own, codec = self.own, self.codecs.window
        query = own.query(latent, rows.turns)
        words = codec.pack(own.window_keys(a, rows.turns))
        history = F.embedding(rows.history, cache.ring)
        near = codec.unpack(torch.cat((history, words)))
        if selection is None:
            selection = Selection(near[:0], rows.keys[:, :0])
        out = sink_attention(
            query, near, rows.keys, selection.keys, selection.places,
            own.sink, self.config.softmax_scale, self.arithmetic,
        )  # fmt: skip
        cache.ring.index_put_((rows.places,), words)
        cache.pages.index_put_((rows.page_places,), words)
        return own.project(out, rows.turns)

    def _publish(
        self,
        y: Tensor,
        latent: Tensor,
        rows: WindowRows,
        source: RatioRows,
        pools: SourceCache,
        published: Published,
        shape: PassShape,
    ) -> Published:
        own, entry_latent = self.own, published.latent
        if own.keys is not None:
            entry_latent = self._store_entries(own.keys, y, source, pools)
        if own.index_keys is not None:
            self._store_index(own.index_keys, entry_latent, source, pools)
        assert own.selector is not None
        chosen, candidates = self._select(
            own.selector, y, latent, rows, source, pools, published.candidates, shape
        )
        selection = self._gather(chosen, source, pools, shape)
        return Published(
            selection,
            entry_latent if self.gives_latent else None,
            candidates if self.gives_candidates else None,
        )

    def _store_entries(
        self, keys: KeySource, y: Tensor, source: RatioRows, pools: SourceCache
    ) -> Tensor:
        """Store the entries that the pass completes; returns their latents ``[e, D]``."""
        if keys.wgate is None:
            pooled = keys.wkv(y)
        else:
            assert source.rows is not None
            assert source.first is not None
            assert source.pair_read is not None
            assert source.pair_places is not None
            assert pools.pairs is not None
            made = torch.stack((keys.wgate(y), keys.wkv(y)), dim=1)
            both = torch.cat((pools.pairs[source.pair_read], made))
            pools.pairs.index_put_((source.pair_places,), made)
            pooled = pool_pairs(both[source.first], both[source.rows], self.arithmetic)
        latent = rms_norm(pooled, keys.norm, keys.eps, self.arithmetic)
        assert pools.entries is not None
        words = self.codecs.entries.pack(rope(latent, source.turns, self.arithmetic))
        pools.entries.index_put_((source.slots,), words)
        return latent

    def _store_index(
        self, keys: IndexKeys, latent: Tensor | None, source: RatioRows, pools: SourceCache
    ) -> None:
        """Store the index keys of the same entries."""
        assert latent is not None
        assert pools.index_keys is not None
        made = rms_norm(keys.wk(latent), keys.k_norm, keys.eps, self.arithmetic)
        words = self.codecs.index.pack(rope(made, source.turns, self.arithmetic))
        pools.index_keys.index_put_((source.slots,), words)

    def _select(
        self,
        selector: Selector,
        y: Tensor,
        latent: Tensor,
        rows: WindowRows,
        source: RatioRows,
        pools: SourceCache,
        candidates: Tensor | None,
        shape: PassShape,
    ) -> tuple[Tensor, Tensor | None]:
        """Each row's entries ``[n, k]`` and, from a candidate source, the kept blocks."""
        c, arithmetic = self.config, self.arithmetic
        count = shape.blocks * (BLOCK_TOKENS // self.ratio)
        if count <= c.index_topk:
            return self.forms.first_entries(source.visible, count), candidates
        query, weight = selector.query(y, latent, rows.turns)
        keys = self._index_keys(source, pools, shape)
        per_sequence = (shape.sequences, shape.rows)
        scores = index_scores(
            query.unflatten(0, per_sequence), keys, weight.unflatten(0, per_sequence), arithmetic
        ).flatten(0, 1)
        entry = torch.arange(count, dtype=torch.int32, device=scores.device)
        scores = scores.masked_fill(entry >= source.visible[:, None], -math.inf)
        size, limit = c.candidate_block_size, c.candidate_topk_blocks
        if self.gives_candidates and count > size * limit:
            candidates = self.forms.candidate_blocks(scores, source.visible, size, limit)
        if self.takes_candidates and candidates is not None:
            inside = self.forms.candidate_mask(candidates, size, count)
            scores = scores.masked_fill(~inside, -math.inf)
        return self.forms.top_entries(scores, c.index_topk), candidates

    def _index_keys(self, source: RatioRows, pools: SourceCache, shape: PassShape) -> Tensor:
        """Index keys ``[S, entries, Di]`` of all blocks in the tables."""
        assert pools.index_keys is not None
        per_block = BLOCK_TOKENS // self.ratio
        blocks = pools.index_keys.view(-1, per_block * pools.index_keys.shape[1])
        words = F.embedding(source.tables, blocks).view(
            shape.sequences, shape.blocks * per_block, pools.index_keys.shape[1]
        )
        return self.codecs.index.unpack(words)

    def _gather(
        self, chosen: Tensor, source: RatioRows, pools: SourceCache, shape: PassShape
    ) -> Selection:
        """Compressed keys of the selection: all of the tables' entries, or the selected ones,
        whichever are fewer."""
        assert pools.entries is not None
        per_block, codec = BLOCK_TOKENS // self.ratio, self.codecs.entries
        count, words = shape.blocks * per_block, codec.words
        sequence = torch.arange(shape.sequences, dtype=torch.int32, device=chosen.device)
        owner = sequence[:, None].expand(-1, shape.rows).reshape(-1, 1)
        absent = chosen < 0
        if shape.sequences * count <= chosen.numel():
            blocks = F.embedding(source.tables, pools.entries.view(-1, per_block * words))
            keys = codec.unpack(blocks.view(-1, words))
            return Selection(keys, (chosen + owner * count).masked_fill(absent, -1))
        entry = chosen.clamp(min=0)
        block = entry.div(per_block, rounding_mode="trunc")
        table = source.tables.view(-1, 1)
        page = F.embedding(block + owner * shape.blocks, table)[..., 0]
        slots = page * per_block + (entry - block * per_block)
        keys = codec.unpack(F.embedding(slots.masked_fill(absent, 0).flatten(), pools.entries))
        order = torch.arange(chosen.numel(), dtype=torch.int32, device=chosen.device)
        return Selection(keys, order.view(chosen.shape).masked_fill(absent, -1))

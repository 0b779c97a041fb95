"""Attention of one layer: window, compressed keys, indexer, output projection."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deepinfer_neuron.cache.pools import BLOCK_TOKENS, EntryPool, LayerCache
from deepinfer_neuron.checkpoint.config import LayerSpec, ModelConfig
from deepinfer_neuron.model.matrix import DenseLinear, WeightSource, WideLinear
from deepinfer_neuron.model.step import EntryPlan, StepTensors
from deepinfer_neuron.ops.attention import sink_attention
from deepinfer_neuron.ops.compress import pool_pairs
from deepinfer_neuron.ops.index import (
    candidate_blocks,
    candidate_mask,
    first_entries,
    index_scores,
    top_entries,
)
from deepinfer_neuron.ops.norm import rms_norm
from deepinfer_neuron.ops.quant import q4_index, q8
from deepinfer_neuron.ops.rope import rope


@dataclass
class Published:
    """What source layers leave for the layers behind them within one forward pass."""

    pool: EntryPool | None = None
    """Compressed keys of the current segment."""
    latent: Tensor | None = None
    """Latents before RoPE ``[e, Dh]`` of the entries that this step completes."""
    far: Tensor | None = None
    """Decoded compressed keys ``[q, Dh]``."""
    far_index: Tensor | None = None
    """``[n, k]`` each row's selected keys in ``far``, -1 behind."""
    far_is_whole: bool = False
    """``far`` holds all entries of all chunks, chunk after chunk."""
    selected: Tensor | None = None
    """``[n, k]`` the same selection as entry numbers within the sequence."""
    index_keys: tuple[Tensor, ...] = ()
    """Per chunk, the index keys ``[m, Di]`` where scores are needed, else empty."""
    candidates: tuple[Tensor | None, ...] = ()
    """Per chunk, the kept blocks ``[rows, b]``; ``None`` where all are kept."""


@dataclass(frozen=True)
class Turns:
    """Rows of the rotary tables for one step."""

    window: Tensor
    """``[n, R]`` base table: window-only layers."""
    compressed: Tensor
    """``[n, R]`` table of the compressed layers."""
    entries: dict[int, Tensor]
    """By ratio, ``[e, R]`` at the positions of the completed entries."""


class KeySource(nn.Module):
    """Compressor of a KV source: pools, norms, rotates and stores entries."""

    def __init__(self, config: ModelConfig, layer: LayerSpec, source: WeightSource) -> None:
        super().__init__()
        name = f"layers.{layer.index}.attn.compressor"
        self.ratio, self.eps, self.arithmetic = layer.ratio, config.rms_norm_eps, source.arithmetic
        self.wkv: DenseLinear | WideLinear
        self.wgate: WideLinear | None = None
        if layer.ratio == 1:
            self.wkv = source.dense(f"{name}.wkv")
        else:
            self.wkv, self.wgate = source.wide(f"{name}.wkv"), source.wide(f"{name}.wgate")
        self.norm = nn.Buffer(source.plain(f"{name}.norm.weight"), persistent=False)

    def forward(self, x: Tensor, plan: EntryPlan, turns: Tensor, cache: LayerCache) -> Tensor:
        """Store the entries that the step completes.

        Args:
            x: normed hidden states ``[n, D]``.
            plan: the step's entries of this ratio.
            turns: ``[e, R]`` rotary rows of the entries.
            cache: this layer's caches.

        Returns:
            the latent before RoPE ``[e, Dh]``, for the index keys.
        """
        pooled = self._single(x, plan) if self.wgate is None else self._pairs(x, plan, cache)
        latent = rms_norm(pooled, self.norm, self.eps, self.arithmetic)
        assert cache.compressed is not None
        cache.compressed.store(plan.slots, rope(latent, turns, self.arithmetic))
        return latent

    def _single(self, x: Tensor, plan: EntryPlan) -> Tensor:
        return self.wkv(x[plan.rows])

    def _pairs(self, x: Tensor, plan: EntryPlan, cache: LayerCache) -> Tensor:
        assert self.wgate is not None
        assert cache.pairs is not None
        rows = torch.stack((self.wgate(x), self.wkv(x)), dim=1)
        state = cache.pairs.state
        first = torch.cat((state[plan.ring_read], rows))[plan.first]
        state[plan.ring_store_places] = rows[plan.ring_store_rows]
        return pool_pairs(first, rows[plan.rows], self.arithmetic)


class IndexKeys(nn.Module):
    """Index keys of an index-K source."""

    def __init__(self, config: ModelConfig, layer: LayerSpec, source: WeightSource) -> None:
        super().__init__()
        name = f"layers.{layer.index}.attn.indexer"
        self.eps, self.arithmetic = config.rms_norm_eps, source.arithmetic
        self.wk = source.dense(f"{name}.wk")
        self.k_norm = nn.Buffer(source.plain(f"{name}.k_norm.weight"), persistent=False)

    def forward(self, latent: Tensor, slots: Tensor, turns: Tensor, cache: LayerCache) -> None:
        """Store the keys of ``[e, Dh]`` latents at ``[e]`` slots."""
        assert cache.index is not None
        keys = rms_norm(self.wk(latent), self.k_norm, self.eps, self.arithmetic)
        cache.index.store(slots, rope(keys, turns, self.arithmetic))


class Selector(nn.Module):
    """Indexer of an index source: scores entries and publishes each row's selection."""

    def __init__(self, config: ModelConfig, layer: LayerSpec, source: WeightSource) -> None:
        super().__init__()
        name = f"layers.{layer.index}.attn.indexer"
        self.config, self.layer, self.arithmetic = config, layer, source.arithmetic
        self.wq_b = source.fp8(f"{name}.wq_b")
        self.weights_proj = source.dense(f"{name}.weights_proj")

    def forward(
        self, x: Tensor, latent: Tensor, turns: Tensor, step: StepTensors, published: Published
    ) -> None:
        """Publish the selection of every row.

        Args:
            x: normed hidden states ``[n, D]``.
            latent: quantized query latent ``[n, Q]``.
            turns: ``[n, R]`` rotary rows.
            step: the step.
            published: index keys are read, selection and candidates are written.
        """
        topk, ratio = self.config.index_topk, self.layer.ratio
        visible = (step.positions + 1) // ratio
        width = min(topk, max(chunk.entries(ratio) for chunk in step.chunks))
        selected = first_entries(visible, width)
        scored = [i for i, chunk in enumerate(step.chunks) if chunk.entries(ratio) > topk]
        candidates: list[Tensor | None] = [None] * len(step.chunks)
        if scored:
            query, weight = self.query(x, latent, turns)
        for i in scored:
            rows = slice(step.chunks[i].start, step.chunks[i].stop)
            scores = index_scores(
                query[rows], published.index_keys[i], weight[rows], self.arithmetic
            )
            entry = torch.arange(scores.shape[1])
            scores = scores.masked_fill(entry >= visible[rows, None], -math.inf)
            if self.layer.is_candidate_source:
                candidates[i] = self._blocks(scores, visible[rows])
            elif self.layer.candidate_source is not None:
                scores = self._within(scores, published.candidates[i])
            selected[rows] = top_entries(scores, width)
        published.selected = selected
        if self.layer.is_candidate_source:
            published.candidates = tuple(candidates)

    def query(self, x: Tensor, latent: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
        """Quantized index queries ``[n, H, Di]`` and head weights ``[n, H]``."""
        shape = (-1, self.config.index_n_heads, self.config.index_head_dim)
        query = rope(self.wq_b(latent).view(shape), turns, self.arithmetic)
        return q4_index(query, self.arithmetic), self.weights_proj(x)

    def _blocks(self, scores: Tensor, visible: Tensor) -> Tensor | None:
        size, limit = self.config.candidate_block_size, self.config.candidate_topk_blocks
        if scores.shape[1] <= size * limit:
            return None
        return candidate_blocks(scores, visible, size, limit)

    def _within(self, scores: Tensor, blocks: Tensor | None) -> Tensor:
        if blocks is None:
            return scores
        inside = candidate_mask(blocks, self.config.candidate_block_size, scores.shape[1])
        return scores.masked_fill(~inside, -math.inf)


class Projections(nn.Module):
    """What every attention sub-layer has: queries, window keys, sink, output projection.

    Args:
        config: the model.
        block: prefix of the block, such as ``layers.3``.
        source: weights.
    """

    def __init__(self, config: ModelConfig, block: str, source: WeightSource) -> None:
        super().__init__()
        name = f"{block}.attn"
        self.config, self.arithmetic = config, source.arithmetic
        self.wq_a, self.wq_b = source.fp8(f"{name}.wq_a"), source.fp8(f"{name}.wq_b")
        self.wkv, self.wo_b = source.fp8(f"{name}.wkv"), source.fp8(f"{name}.wo_b")
        self.wo_a = source.fp8_groups(f"{name}.wo_a", config.o_groups)
        self.q_norm = nn.Buffer(source.plain(f"{name}.q_norm.weight"), persistent=False)
        self.kv_norm = nn.Buffer(source.plain(f"{name}.kv_norm.weight"), persistent=False)
        self.sink = nn.Buffer(source.plain(f"{name}.attn_sink"), persistent=False)

    def latent(self, a: Tensor) -> Tensor:
        """Quantized query latent ``[n, Q]`` of quantized hidden states ``[n, D]``."""
        return q8(self._norm(self.wq_a(a), self.q_norm), self.arithmetic)

    def query(self, latent: Tensor, turns: Tensor) -> Tensor:
        """Queries ``[n, H, Dh]``, turned by ``[n, R]`` rotary rows."""
        c = self.config
        query = self.wq_b(latent).view(-1, c.num_attention_heads, c.head_dim)
        return rope(query, turns, self.arithmetic)

    def window_keys(self, a: Tensor, turns: Tensor) -> Tensor:
        """Window keys ``[n, Dh]`` of quantized hidden states ``[n, D]``, before their codec."""
        return rope(self._norm(self.wkv(a), self.kv_norm), turns, self.arithmetic)

    def project(self, out: Tensor, turns: Tensor) -> Tensor:
        """Attention output ``[n, H, Dh]``, turned back and projected to ``[n, D]``."""
        out = rope(out, turns, self.arithmetic, inverse=True)
        groups = q8(out, self.arithmetic).flatten(1).chunk(self.config.o_groups, dim=1)
        parts = [w(g.contiguous()) for w, g in zip(self.wo_a, groups, strict=True)]
        projected: Tensor = self.wo_b(q8(torch.cat(parts, dim=1), self.arithmetic))
        return projected

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.config.rms_norm_eps, self.arithmetic)


class Attention(Projections):
    """One attention sub-layer; which parts it owns follows from the layer's role."""

    def __init__(self, config: ModelConfig, layer: LayerSpec, source: WeightSource) -> None:
        super().__init__(config, f"layers.{layer.index}", source)
        self.layer = layer
        self.keys = KeySource(config, layer, source) if layer.owns_kv else None
        self.index_keys = IndexKeys(config, layer, source) if layer.owns_index_k else None
        self.selector = Selector(config, layer, source) if layer.owns_index else None

    def forward(
        self, y: Tensor, step: StepTensors, turns: Turns, cache: LayerCache, published: Published
    ) -> Tensor:
        """Attention output.

        Args:
            y: normed hidden states ``[n, D]``.
            step: the step.
            turns: rotary rows of the step.
            cache: this layer's caches; written.
            published: what earlier source layers left; source layers replace their part.

        Returns:
            ``[n, D]``.
        """
        c, arithmetic = self.config, self.arithmetic
        own_turns = turns.compressed if self.layer.ratio else turns.window
        a = q8(y, arithmetic)
        latent = self.latent(a)
        query = self.query(latent, own_turns)
        window = self.window_keys(a, own_turns)
        self._publish(y, latent, step, turns, cache, published)

        records = cache.window.codec.pack(window)
        history = cache.window.load(step.window.history_places)
        near = torch.cat((history, cache.window.codec.unpack(records)))
        far, far_index = published.far, published.far_index
        if self.layer.ratio == 0 or far is None or far_index is None:
            far, far_index = near[:0], step.window.key_index[:, :0]
        out = sink_attention(
            query, near, step.window.key_index, far, far_index,
            self.sink, c.softmax_scale, arithmetic,
        )  # fmt: skip
        cache.window.write(step.window.store_places, records[step.window.store_rows])
        cache.pages.write(step.window.page_places, records[step.window.page_rows])
        return self.project(out, own_turns)

    def _publish(
        self,
        y: Tensor,
        latent: Tensor,
        step: StepTensors,
        turns: Turns,
        cache: LayerCache,
        published: Published,
    ) -> None:
        """Run the source parts that this layer owns."""
        ratio = self.layer.ratio
        if self.keys is not None:
            published.latent = self.keys(y, step.entries[ratio], turns.entries[ratio], cache)
            published.pool = cache.compressed
        if self.index_keys is not None:
            slots = step.entries[ratio].slots
            self.index_keys(published.latent, slots, turns.entries[ratio], cache)
            published.index_keys = _load_index_keys(step, cache, ratio, self.config.index_topk)
        if self.selector is not None:
            self.selector(y, latent, turns.compressed, step, published)
            _gather_far(step, published, ratio, reload=self.keys is not None)


def _load_index_keys(
    step: StepTensors, cache: LayerCache, ratio: int, topk: int
) -> tuple[Tensor, ...]:
    """Index keys of the chunks that have more entries than are selected anyway."""
    assert cache.index is not None
    counts = [chunk.entries(ratio) for chunk in step.chunks]
    return tuple(
        cache.index.load_blocks(chunk.block_table, count if count > topk else 0)
        for chunk, count in zip(step.chunks, counts, strict=True)
    )


def entry_slots(table: Tensor, entries: Tensor, ratio: int) -> Tensor:
    """Pool slots of a sequence's entries: block ids ``[b]`` and int64 entries, any shape."""
    per_block = BLOCK_TOKENS // ratio
    return table[entries // per_block] * per_block + entries % per_block


def _gather_far(step: StepTensors, published: Published, ratio: int, *, reload: bool) -> None:
    """Decode the compressed keys that the selection needs.

    Either all entries of every chunk once per segment, or just the selected ones: whichever is
    fewer. The values are the same.
    """
    selected = published.selected
    assert selected is not None
    assert published.pool is not None
    total = sum(chunk.entries(ratio) for chunk in step.chunks)
    if total <= selected.numel():
        if reload or not published.far_is_whole:
            slots = [
                entry_slots(chunk.block_table, torch.arange(chunk.entries(ratio)), ratio)
                for chunk in step.chunks
            ]
            published.far = published.pool.load(torch.cat(slots))
            published.far_is_whole = True
        index, offset = selected.clone(), 0
        for chunk in step.chunks:
            index[chunk.start : chunk.stop] += offset
            offset += chunk.entries(ratio)
        published.far_index = index.masked_fill(selected < 0, -1)
        return
    slots = [
        entry_slots(chunk.block_table, selected[chunk.start : chunk.stop].clamp(min=0), ratio)
        for chunk in step.chunks
    ]
    flat = torch.cat(slots).masked_fill(selected < 0, -1).flatten()
    published.far = published.pool.load(flat)
    published.far_is_whole = False
    order = torch.arange(flat.numel()).view(selected.shape)
    published.far_index = order.masked_fill(selected < 0, -1)

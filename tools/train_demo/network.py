"""The text network over a batch of sequences, differentiable.

The same network as ``deepinfer_neuron.reference``, arranged for training: all sequences have one
length, which is a multiple of the window; selections are masks instead of gathers; the experts of
a layer work on rows sorted by expert. With :data:`EXACT` precision it has no rounding points.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from deepinfer_neuron.checkpoint.config import LayerSpec, ModelConfig
from deepinfer_neuron.checkpoint.engram import EngramHasher
from deepinfer_neuron.reference.attention import rope_frequencies
from tools.train_demo import kernels
from tools.train_demo.attending import Attend
from tools.train_demo.functions import (
    MIX,
    Collapse,
    Engram,
    Expand,
    Gather,
    Grouped,
    Mix,
    Norm,
    Quantize,
    Rope,
    Scatter,
    SwiGLU,
)
from tools.train_demo.kernels import call
from tools.train_demo.weights import Precision


@dataclass
class Published:
    """What source layers leave for the layers behind them."""

    compressed: Tensor | None = None
    index_keys: Tensor | None = None
    latent: Tensor | None = None
    mask: Tensor | None = None
    allowed: Tensor | None = None


@dataclass
class Forward:
    """Result of a pass."""

    hidden: Tensor
    """``[B * T, D]`` behind the last norm."""
    features: list[Tensor]
    """Per target layer of the drafts, the mean of the streams ``[B * T, D]``."""
    index_loss: Tensor
    loads: dict[str, Tensor]
    """Tokens per expert, by the name of the layer's selection bias."""


@dataclass(frozen=True)
class Options:
    """What a pass does beside the logits.

    ``sparse``: attend to the selected entries only (otherwise to all visible ones).
    ``index_rows``: sequences of the batch on which the indexer learns, 0 for none.
    """

    sparse: bool = True
    index_rows: int = 0


@dataclass
class Network:
    """The pass of one configuration in one precision.

    Args:
        config: of the checkpoint.
        hasher: Engram rows, ``None`` without Engram.
        compressed_ids: int64 ``[V]``, the folded vocabulary of the hasher.
        precision: of the computation.
    """

    config: ModelConfig
    hasher: EngramHasher | None
    compressed_ids: Tensor
    precision: Precision
    _turns: dict[tuple[bool, int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, w: dict[str, Tensor], ids: Tensor, options: Options) -> Forward:
        """Run sequences ``ids`` int64 ``[B, T]`` through all layers."""
        c = self.config
        batch, length = ids.shape
        trunk, mix = self.enter(w, ids.flatten())
        state, loads = Published(), {}
        features: list[Tensor] = []
        index_loss = torch.zeros(())
        targets = c.draft.target_layer_ids if c.draft is not None else ()
        for layer in c.layers:
            prefix = f"layers.{layer.index}."
            if layer.engram is not None:
                rows = self.engram_rows(layer.engram, ids).flatten(0, 1)
                trunk = self.engram(w, prefix, trunk, rows)
            if layer.index in targets:
                features.append(self.feature(trunk))
            x, flat = Collapse.apply(trunk, mix, w[prefix + "attn_norm.weight"], c.rms_norm_eps)
            out, extra = self.attention(w, prefix, layer, x.view(batch, length, -1), state, options)
            if extra is not None:
                index_loss = index_loss + extra
            trunk, mix = self.leave(w, prefix + "hc_attn", trunk, flat, out)
            x, flat = Collapse.apply(trunk, mix, w[prefix + "ffn_norm.weight"], c.rms_norm_eps)
            out, load = self.experts(w, prefix, x, c.num_experts_per_tok)
            loads[prefix + "ffn.gate.bias"] = load
            trunk, mix = self.leave(w, prefix + "hc_ffn", trunk, flat, out)
        hidden, _ = Collapse.apply(trunk, mix, w["norm.weight"], c.rms_norm_eps)
        return Forward(hidden, features, index_loss, loads)

    # Streams.

    def feature(self, trunk: Tensor) -> Tensor:
        """What the drafts read of a target layer: the mean of the streams ``[T, D]``."""
        return trunk.detach().to(torch.float32).mean(1).to(trunk.dtype)

    def enter(self, w: dict[str, Tensor], ids: Tensor) -> tuple[Tensor, Tensor]:
        """Embedding in every stream ``[T, M, D]`` and a mix that reads stream 0."""
        embedding = torch.nn.functional.embedding(ids, w["embed.weight"])
        trunk = embedding[:, None].expand(-1, self.config.hc_mult, -1).contiguous()
        mix = torch.zeros(len(ids), MIX)
        mix[:, 0] = 1.0
        return trunk, mix

    def leave(
        self, w: dict[str, Tensor], name: str, trunk: Tensor, flat: Tensor, out: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Mix a block's output into the streams; returns the streams and the site's mix."""
        c = self.config
        projected = trunk.flatten(1) @ w[name + "_fn"].t()
        mix = Mix.apply(
            projected, flat, w[name + "_scale"], w[name + "_base"], c.hc_sinkhorn_iters, c.hc_eps
        )
        return Expand.apply(out, trunk, mix), mix

    def quantize(self, x: Tensor, number_format: int = kernels.ACTIVATION) -> Tensor:
        """Pass through a run-time quantizer where this precision has them."""
        return Quantize.apply(x, number_format) if self.precision.activations else x

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm of the last axis."""
        return Norm.apply(x.contiguous(), weight, self.config.rms_norm_eps)

    def turns(self, compressed: bool, count: int, step: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine ``[count, R/2]`` of the positions ``0, step, 2 step, ...``."""
        key = (compressed, count, step)
        if key not in self._turns:
            position = step * torch.arange(count, dtype=torch.float32)
            angle = position[:, None] * rope_frequencies(self.config, compressed)
            angle = angle.double()
            self._turns[key] = (angle.cos().float(), angle.sin().float())
        return self._turns[key]

    def turned(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Rotate ``[B, P, D]`` forward."""
        return Rope.apply(x.contiguous(), cosine, sine, 1.0)

    # Attention.

    def attention(
        self,
        w: dict[str, Tensor],
        prefix: str,
        layer: LayerSpec,
        x: Tensor,
        state: Published,
        options: Options,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of a layer: ``[B, T, D]`` to ``[B * T, D]``, and the loss of its indexer."""
        c = self.config
        batch, length, _ = x.shape
        prefix += "attn."
        cosine, sine = self.turns(layer.ratio > 0, length, 1)
        latent, query, near = self.queries_and_keys(w, prefix, x, cosine, sine)
        if layer.owns_kv:
            self.compress(w, prefix, layer, x, state)
        loss = None
        if layer.owns_index:
            loss = self.index(w, prefix, layer, x, latent, query, state, options)
        far, mask = near[:, :0], torch.zeros(batch, length, 0, dtype=torch.uint8)
        if layer.ratio > 0:
            assert state.compressed is not None
            assert state.mask is not None
            far, mask = state.compressed, state.mask
        out = Attend.apply(
            query,
            near,
            far,
            mask,
            w[prefix + "attn_sink"],
            c.sliding_window,
            layer.ratio,
            c.softmax_scale,
        )
        return self.project(w, prefix, out, cosine, sine), loss

    def queries_and_keys(
        self, w: dict[str, Tensor], prefix: str, x: Tensor, cosine: Tensor, sine: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Latents ``[B, T, Q]``, queries ``[B, T, H, Dh]`` and window keys ``[B, T, Dh]``."""
        c = self.config
        both = self.quantize(x) @ w[prefix + "wqkv_a"].t()
        first, second = both.split((c.q_lora_rank, c.head_dim), -1)
        latent = self.quantize(self.norm(first, w[prefix + "q_norm.weight"]))
        query = (latent @ w[prefix + "wq_b"].t()).unflatten(-1, (-1, c.head_dim))
        query = Rope.apply(query.contiguous(), cosine, sine, 1.0)
        near = Rope.apply(self.norm(second, w[prefix + "kv_norm.weight"]), cosine, sine, 1.0)
        return latent, query, self.quantize(near)

    def project(
        self, w: dict[str, Tensor], prefix: str, out: Tensor, cosine: Tensor, sine: Tensor
    ) -> Tensor:
        """Output projection ``[B, T, H, Dh]`` to ``[B * T, D]``."""
        c = self.config
        out = self.quantize(Rope.apply(out, cosine, sine, -1.0))
        grouped = out.view(-1, c.o_groups, c.o_group_width)
        weight = w[prefix + "wo_a"].view(c.o_groups, c.o_lora_rank, c.o_group_width)
        parts = [grouped[:, g] @ weight[g].t() for g in range(c.o_groups)]
        return self.quantize(torch.cat(parts, 1)) @ w[prefix + "wo_b"].t()

    def compress(
        self, w: dict[str, Tensor], prefix: str, layer: LayerSpec, x: Tensor, state: Published
    ) -> None:
        """Publish the compressed keys of this layer's input."""
        state.latent = self.pool(w, prefix, layer, x)
        turns = self.turns(True, state.latent.shape[1], layer.ratio)
        state.compressed = self.turned_entry(state.latent, *turns)

    def pool(self, w: dict[str, Tensor], prefix: str, layer: LayerSpec, x: Tensor) -> Tensor:
        """Normed latents ``[B, T / ratio, Dh]`` of inputs ``[B, T, D]``."""
        prefix += "compressor."
        pooled = x @ w[prefix + "wkv.weight"].t()
        if layer.ratio > 1:
            score = x @ w[prefix + "wgate.weight"].t()
            share = score.unflatten(1, (-1, layer.ratio)).float().softmax(2)
            pooled = (pooled.unflatten(1, (-1, layer.ratio)).float() * share).sum(2).to(x.dtype)
        return self.norm(pooled, w[prefix + "norm.weight"])

    def turned_entry(self, latent: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Compressed keys of latents."""
        return self.quantize(Rope.apply(latent, cosine, sine, 1.0), kernels.COMPRESSED_KEY)

    # Indexer.

    def index(
        self,
        w: dict[str, Tensor],
        prefix: str,
        layer: LayerSpec,
        x: Tensor,
        latent: Tensor,
        query: Tensor,
        state: Published,
        options: Options,
    ) -> Tensor | None:
        """Publish the selection of every query; returns the indexer's loss where it learns."""
        c = self.config
        assert state.latent is not None
        assert state.compressed is not None
        batch, length, _ = x.shape
        entries = state.compressed.shape[1]
        if layer.owns_index_k:
            state.index_keys = state.latent.detach()
        if not options.sparse:
            visible = (torch.arange(length)[:, None] + 1) // layer.ratio > torch.arange(entries)
            state.mask = visible.to(torch.uint8).expand(batch, -1, -1).contiguous()
        else:
            with torch.no_grad():
                score = self.scores(w, prefix, layer, x, latent, state, batch).float().contiguous()
            if layer.is_candidate_source:
                state.allowed = self.candidate_blocks(score, layer)
            bounded = layer.candidate_source is not None
            state.mask = self.select(score, state.allowed if bounded else None, layer, c.index_topk)
        if options.index_rows == 0:
            return None
        return self.index_loss(w, prefix, layer, x, latent, query, state, options.index_rows)

    def scores(
        self,
        w: dict[str, Tensor],
        prefix: str,
        layer: LayerSpec,
        x: Tensor,
        latent: Tensor,
        state: Published,
        rows: int,
    ) -> Tensor:
        """Index scores ``[rows, T, m]``, learning nothing but the indexer's own weights."""
        assert state.index_keys is not None
        latents = state.index_keys[:rows]
        keys = self.index_keys(w, layer, latents, *self.turns(True, latents.shape[1], layer.ratio))
        turns = self.turns(True, x.shape[1], 1)
        query = self.index_queries(w, prefix, latent[:rows].detach(), *turns)
        weight = x[:rows].detach() @ w[prefix + "indexer.weights_proj.weight"].t()
        return self.index_products(query, keys, weight)

    def index_keys(
        self, w: dict[str, Tensor], layer: LayerSpec, latent: Tensor, cosine: Tensor, sine: Tensor
    ) -> Tensor:
        """Index keys ``[B, m, Di]`` of latents, with the weights of the layer's key source."""
        own = f"layers.{layer.index_k_source}.attn.indexer."
        keys = self.norm(latent @ w[own + "wk.weight"].t(), w[own + "k_norm.weight"])
        return self.quantize(Rope.apply(keys, cosine, sine, 1.0), kernels.INDEX_OPERAND)

    def index_queries(
        self, w: dict[str, Tensor], prefix: str, latent: Tensor, cosine: Tensor, sine: Tensor
    ) -> Tensor:
        """Index queries ``[B, T, Hi, Di]``."""
        c = self.config
        query = latent @ w[prefix + "indexer.wq_b"].t()
        query = query.unflatten(-1, (c.index_n_heads, c.index_head_dim)).contiguous()
        return self.quantize(Rope.apply(query, cosine, sine, 1.0), kernels.INDEX_OPERAND)

    def index_products(self, query: Tensor, keys: Tensor, weight: Tensor) -> Tensor:
        """Scores ``[B, T, m]``: weighted sum of the heads' positive products."""
        batch, length, heads, _ = query.shape
        dot = torch.bmm(query.flatten(1, 2), keys.transpose(1, 2)).relu()
        dot = dot.view(batch, length, heads, -1)
        total = dot[:, :, 0] * weight[:, :, 0, None]
        for head in range(1, heads):
            total = total + dot[:, :, head] * weight[:, :, head, None]
        return total

    def select(self, score: Tensor, allowed: Tensor | None, layer: LayerSpec, limit: int) -> Tensor:
        """The best visible entries of every query: uint8 ``[B, T, m]``."""
        mask = torch.empty(score.shape, dtype=torch.uint8)
        rows, entries = score.shape[0] * score.shape[1], score.shape[2]
        call(
            "select_entries",
            None,
            score,
            allowed,
            mask,
            rows,
            entries,
            score.shape[1],
            layer.ratio,
            limit,
        )
        return mask

    def candidate_blocks(self, score: Tensor, layer: LayerSpec) -> Tensor:
        """The entries inside every query's best blocks: uint8 ``[B, T, m]``."""
        c = self.config
        _, length, entries = score.shape
        size = c.candidate_block_size
        visible = (torch.arange(length) + 1) // layer.ratio
        hidden = torch.arange(entries) >= visible[:, None]
        padded = score.masked_fill(hidden, -math.inf)
        padded = torch.nn.functional.pad(padded, (0, -entries % size), value=-math.inf)
        best = padded.unflatten(2, (-1, size)).amax(3)
        last = (visible - 1) // size
        best[:, torch.arange(length), last] = math.inf
        if best.shape[2] > c.candidate_topk_blocks:
            order = best.argsort(dim=2, descending=True, stable=True)[
                ..., : c.candidate_topk_blocks
            ]
            kept = torch.zeros(best.shape, dtype=torch.uint8).scatter_(2, order, 1)
        else:
            kept = torch.ones(best.shape, dtype=torch.uint8)
        return kept.repeat_interleave(size, 2)[..., :entries].contiguous()

    def index_loss(
        self,
        w: dict[str, Tensor],
        prefix: str,
        layer: LayerSpec,
        x: Tensor,
        latent: Tensor,
        query: Tensor,
        state: Published,
        rows: int,
    ) -> Tensor:
        """Cross-entropy of the indexer to where the attention of this layer looks."""
        assert state.compressed is not None
        assert state.mask is not None
        far, mask = state.compressed[:rows].detach(), state.mask[:rows].bool()
        with torch.no_grad():
            logits = torch.bmm(query[:rows].flatten(1, 2), far.transpose(1, 2)).float()
            logits = logits.view(*query[:rows].shape[:3], -1) * self.config.softmax_scale
            seen = mask.any(-1)
            wanted = logits.masked_fill(~mask[:, :, None], -1e30).softmax(-1).mean(2)
        score = self.scores(w, prefix, layer, x, latent, state, rows).float()
        guess = score.masked_fill(~mask, -1e30).log_softmax(-1)
        loss = -(wanted * guess.masked_fill(~mask, 0.0)).sum(-1)
        return loss[seen].mean()

    # Experts.

    def experts(
        self, w: dict[str, Tensor], prefix: str, y: Tensor, slots: int
    ) -> tuple[Tensor, Tensor]:
        """Shared and routed experts ``[T, D]``, and how many tokens each expert got."""
        c = self.config
        prefix += "ffn."
        gate = w[prefix + "gate.weight"].float()
        score = torch.nn.functional.softplus(y.float() @ gate.t()).sqrt()
        with torch.no_grad():
            chosen = (score + w[prefix + "gate.bias"]).topk(slots, 1).indices
            load = torch.bincount(chosen.flatten(), minlength=score.shape[1])
            order = chosen.flatten().argsort(dim=0, stable=True)
            place = torch.empty_like(order)
            place[order] = torch.arange(len(order))
        share = score.gather(1, chosen)
        share = share / (share.sum(1, keepdim=True) + 1e-20) * c.routed_scaling_factor
        x = self.quantize(y)
        quantize, limit = self.precision.activations, c.swiglu_limit
        h = Grouped.apply(
            Gather.apply(x, order, place, slots), w[prefix + "experts.w13"], load.tolist()
        )
        h = SwiGLU.apply(h, share.flatten()[order], limit, quantize)
        routed = Grouped.apply(h, w[prefix + "experts.w2"], load.tolist())
        routed = Scatter.apply(routed, order, place, slots)
        h = x @ w[prefix + "shared_experts.w13"].t()
        h = SwiGLU.apply(h, torch.ones(len(h)), limit, quantize)
        shared = h @ w[prefix + "shared_experts.w2"].t()
        return (shared + routed).to(y.dtype), load

    # Engram.

    def engram_rows(self, layer: int, ids: Tensor) -> Tensor:
        """Table rows ``[B, T, columns]`` of an Engram layer."""
        assert self.hasher is not None
        layout = self.hasher.layout
        multipliers = torch.from_numpy(layout.multipliers[layer].copy())
        folded = self.compressed_ids[ids]
        padded = torch.nn.functional.pad(folded, (len(multipliers) - 1, 0), value=self.hasher.pad)
        length = ids.shape[1]
        reach = len(multipliers) - 1
        mixed = folded * multipliers[0]
        columns = []
        for back in range(1, reach + 1):
            mixed = mixed ^ (padded[:, reach - back : reach - back + length] * multipliers[back])
            primes = torch.from_numpy(layout.primes[layer, back - 1].copy())
            offsets = torch.from_numpy(layout.offsets[layer, back - 1].copy())
            columns.append(mixed[..., None] % primes + offsets)
        return torch.cat(columns, -1)

    def engram(self, w: dict[str, Tensor], prefix: str, trunk: Tensor, rows: Tensor) -> Tensor:
        """Add the gated memory of table rows ``[T, columns]`` to the streams ``[T, M, D]``."""
        c = self.config
        fetched = torch.nn.functional.embedding(rows, w[prefix + "engram.embed"])
        fetched = self.quantize(fetched).flatten(1)
        kv = (fetched @ w[prefix + "engram.wkv"].t()).unflatten(1, (c.hc_mult + 1, -1))
        weight = w[prefix + "engram.q_weight"] * w[prefix + "engram.k_weight"]
        return Engram.apply(trunk, kv, weight, c.rms_norm_eps)


def network_for(config: ModelConfig, hasher: EngramHasher | None, precision: Precision) -> Network:
    """The network of a configuration; Engram's folded vocabulary comes from its hasher."""
    table = torch.zeros(0, dtype=torch.int64)
    if hasher is not None:
        table = torch.from_numpy(hasher.compress(np.arange(config.vocab_size)).astype(np.int64))
    return Network(config, hasher, table, precision)

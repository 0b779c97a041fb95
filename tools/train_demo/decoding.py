"""Greedy continuations of many prompts of one length, token by token with plain caches."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepinfer_neuron.checkpoint.config import LayerSpec
from tools.train_demo.functions import Collapse
from tools.train_demo.network import Network


@dataclass
class LayerCache:
    """Keys of one layer for all sequences; unused parts are empty tensors."""

    near: Tensor
    far: Tensor
    index_keys: Tensor
    before: Tensor
    """Input of the position before, for pooling pairs."""


@dataclass
class Decoder:
    """Runs a batch of sequences in step; all of them have the same length at any time."""

    network: Network
    weights: dict[str, Tensor]
    batch: int
    length: int
    caches: list[LayerCache] = field(default_factory=list)
    position: int = 0

    def __post_init__(self) -> None:
        c, dtype = self.network.config, self.network.precision.dtype
        self.ids = torch.zeros(self.batch, self.length, dtype=torch.int64)
        for layer in c.layers:
            entries = self.length // layer.ratio if layer.owns_kv else 0
            keys = self.length // layer.ratio if layer.owns_index_k else 0
            self.caches.append(
                LayerCache(
                    torch.zeros(self.batch, self.length, c.head_dim, dtype=dtype),
                    torch.zeros(self.batch, entries, c.head_dim, dtype=dtype),
                    torch.zeros(self.batch, keys, c.index_head_dim, dtype=dtype),
                    torch.zeros(self.batch, 1, c.hidden_size, dtype=dtype),
                )
            )
        width = c.hidden_size * (len(c.draft.target_layer_ids) if c.draft else 0)
        self.features = torch.zeros(self.batch, self.length, width, dtype=dtype)
        full = self.network.turns(False, self.length, 1), self.network.turns(True, self.length, 1)
        self._turns = full

    @torch.no_grad()
    def step(self, ids: Tensor) -> Tensor:
        """Feed one token per sequence ``[B]``; returns the normed hidden states ``[B, D]``."""
        net, w, c = self.network, self.weights, self.network.config
        self.ids[:, self.position] = ids
        trunk, mix = net.enter(w, ids)
        reach = max(0, self.position - 3)
        recent = self.ids[:, reach : self.position + 1]
        mask = allowed = None
        features: list[Tensor] = []
        targets = c.draft.target_layer_ids if c.draft is not None else ()
        for layer in c.layers:
            prefix = f"layers.{layer.index}."
            if layer.engram is not None:
                rows = net.engram_rows(layer.engram, recent)[:, -1]
                trunk = net.engram(w, prefix, trunk, rows)
            if layer.index in targets:
                features.append(net.feature(trunk))
            x, flat = Collapse.apply(trunk, mix, w[prefix + "attn_norm.weight"], c.rms_norm_eps)
            out, mask, allowed = self._attention(prefix + "attn.", layer, x, mask, allowed)
            trunk, mix = net.leave(w, prefix + "hc_attn", trunk, flat, out)
            x, flat = Collapse.apply(trunk, mix, w[prefix + "ffn_norm.weight"], c.rms_norm_eps)
            out, _ = net.experts(w, prefix, x, c.num_experts_per_tok)
            trunk, mix = net.leave(w, prefix + "hc_ffn", trunk, flat, out)
        if features:
            self.features[:, self.position] = torch.cat(features, 1)
        self.position += 1
        hidden, _ = Collapse.apply(trunk, mix, w["norm.weight"], c.rms_norm_eps)
        return hidden

    def _attention(
        self,
        prefix: str,
        layer: LayerSpec,
        x: Tensor,
        mask: Tensor | None,
        allowed: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        net, w, at = self.network, self.weights, self.position
        cache, x = self.caches[layer.index], x[:, None]
        turns = self._turn(layer.ratio > 0, at)
        latent, query, near = net.queries_and_keys(w, prefix, x, *turns)
        cache.near[:, at] = near[:, 0]
        if layer.owns_kv:
            self._compress(prefix, layer, x)
        if layer.owns_index:
            mask, allowed = self._select(prefix, layer, x, latent, turns, allowed)
        first = max(0, at - net.config.sliding_window + 1)
        keys, hidden = cache.near[:, first : at + 1], None
        visible = (at + 1) // layer.ratio if layer.ratio else 0
        if visible:
            assert layer.kv_source is not None
            keys = torch.cat((keys, self.caches[layer.kv_source].far[:, :visible]), 1)
            if mask is not None:
                shown = torch.ones(len(x), at + 1 - first, dtype=torch.bool)
                hidden = ~torch.cat((shown, mask), 1)
        out = self._attend(query[:, 0], keys, hidden, w[prefix + "attn_sink"])
        return net.project(w, prefix, out[:, None], *turns), mask, allowed

    def _turn(self, compressed: bool, position: int) -> tuple[Tensor, Tensor]:
        cosine, sine = self._turns[compressed]
        return cosine[position : position + 1].contiguous(), sine[
            position : position + 1
        ].contiguous()

    def _compress(self, prefix: str, layer: LayerSpec, x: Tensor) -> None:
        """Store the entry that this position completes, if it does."""
        net, w, at, ratio = self.network, self.weights, self.position, layer.ratio
        cache = self.caches[layer.index]
        pair = x if ratio == 1 else torch.cat((cache.before, x), 1)
        cache.before = x
        if (at + 1) % ratio:
            return
        entry, turns = at // ratio, self._turn(True, at + 1 - ratio)
        latent = net.pool(w, prefix, layer, pair)
        cache.far[:, entry] = net.turned_entry(latent, *turns)[:, 0]
        if layer.owns_index_k:
            cache.index_keys[:, entry] = net.index_keys(w, layer, latent, *turns)[:, 0]

    def _select(
        self,
        prefix: str,
        layer: LayerSpec,
        x: Tensor,
        latent: Tensor,
        turns: tuple[Tensor, Tensor],
        allowed: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Selected entries ``[B, visible]`` (``None``: all of them), and the candidates."""
        net, w, c = self.network, self.weights, self.network.config
        visible = (self.position + 1) // layer.ratio
        if visible <= c.index_topk and not layer.is_candidate_source:
            return None, allowed
        assert layer.index_k_source is not None
        keys = self.caches[layer.index_k_source].index_keys[:, :visible]
        query = net.index_queries(w, prefix, latent, *turns)
        weight = x @ w[prefix + "indexer.weights_proj.weight"].t()
        score = net.index_products(query, keys, weight)[:, 0].float()
        if layer.is_candidate_source:
            allowed = self._candidates(score)
        elif layer.candidate_source is not None and allowed is not None:
            score = score.masked_fill(~allowed, -torch.inf)
        if visible <= c.index_topk:
            return None, allowed
        best = score.argsort(dim=1, descending=True, stable=True)[:, : c.index_topk]
        return torch.zeros(score.shape, dtype=torch.bool).scatter_(1, best, True), allowed

    def _candidates(self, score: Tensor) -> Tensor:
        c = self.network.config
        size, visible = c.candidate_block_size, score.shape[1]
        padded = torch.nn.functional.pad(score, (0, -visible % size), value=-torch.inf)
        best = padded.unflatten(1, (-1, size)).amax(2)
        best[:, -1] = torch.inf
        order = best.argsort(dim=1, descending=True, stable=True)[:, : c.candidate_topk_blocks]
        kept = torch.zeros(best.shape, dtype=torch.bool).scatter_(1, order, True)
        return kept.repeat_interleave(size, 1)[:, :visible]

    def _attend(self, query: Tensor, keys: Tensor, hidden: Tensor | None, sink: Tensor) -> Tensor:
        logits = torch.bmm(query, keys.transpose(1, 2)).float() * self.network.config.softmax_scale
        if hidden is not None:
            logits = logits.masked_fill(hidden[:, None], -torch.inf)
        rest = sink[None, :, None].expand(len(query), -1, 1)
        share = torch.cat((logits, rest), 2).softmax(2)[..., :-1]
        return torch.bmm(share.to(keys.dtype), keys)


@torch.no_grad()
def continue_greedily(
    network: Network, weights: dict[str, Tensor], prompts: Tensor, length: int
) -> tuple[Tensor, Tensor]:
    """Continue prompts ``[B, P]`` at temperature 0.

    Returns:
        ids int64 ``[B, length]``, and the features for the drafts ``[B, length, targets * D]``
        (zeros at the last position, which is not run).
    """
    decoder = Decoder(network, weights, len(prompts), length)
    for at in range(length - 1):
        known = prompts[:, at] if at < prompts.shape[1] else decoder.ids[:, at]
        hidden = decoder.step(known)
        if at + 1 >= prompts.shape[1]:
            decoder.ids[:, at + 1] = (hidden @ weights["head.weight"].t()).argmax(1)
    return decoder.ids, decoder.features

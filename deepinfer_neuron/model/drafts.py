"""Draft blocks: propose the next tokens of a sequence from what the backbone knew of its past.

While the backbone runs, the blocks keep one window key per token, made from the trunk that enters
the target layers (:meth:`DraftBlocks.remember`). A block of drafts then attends to those keys and,
in both directions, to itself; its own keys are never stored. The heads turn the hidden states into
tokens one after the other, because each draft changes the logits of the next one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from deepinfer_neuron.cache.pools import LayerCache
from deepinfer_neuron.checkpoint.config import ModelConfig
from deepinfer_neuron.checkpoint.config_types import DraftConfig
from deepinfer_neuron.model.attention import Projections
from deepinfer_neuron.model.blocks import MixtureOfExperts, Site
from deepinfer_neuron.model.matrix import WeightSource, WideLinear
from deepinfer_neuron.model.step import DraftStep, WindowPlan
from deepinfer_neuron.ops.attention import sink_attention
from deepinfer_neuron.ops.draft_input import confidence
from deepinfer_neuron.ops.gather import gather_rows
from deepinfer_neuron.ops.graph_select import argmax
from deepinfer_neuron.ops.hyper import collapse
from deepinfer_neuron.ops.norm import rms_norm
from deepinfer_neuron.ops.quant import q8


class DraftAttention(Projections):
    """Window attention without a causal mask inside the block."""

    def remember(self, y: Tensor, turns: Tensor, plan: WindowPlan, cache: LayerCache) -> None:
        """Store the keys of the backbone's tokens.

        All rows of a step are stored, also drafts that will be rejected: their positions are
        written again before anything reads them.

        Args:
            y: quantized main states ``[n, D]``.
            turns: ``[n, R]`` rotary rows.
            plan: where keys go.
            cache: of this block; written.
        """
        records = cache.window.codec.pack(self.window_keys(y, turns))
        cache.window.write(plan.store_places, records[plan.store_rows])
        cache.pages.write(plan.page_places, records[plan.page_rows])

    def forward(self, y: Tensor, step: DraftStep, turns: Tensor, cache: LayerCache) -> Tensor:
        """Attention output ``[n, D]`` of normed hidden states ``[n, D]``."""
        a = q8(y, self.arithmetic)
        query = self.query(self.latent(a), turns)
        codec = cache.window.codec
        own = codec.unpack(codec.pack(self.window_keys(a, turns)))
        keys = torch.cat((cache.window.load(step.history_places), own))
        out = sink_attention(
            query, keys, step.key_index, keys[:0], step.key_index[:, :0],
            self.sink, self.config.softmax_scale, self.arithmetic,
        )  # fmt: skip
        return self.project(out, turns)


class DraftBlock(nn.Module):
    """Attention site and feed-forward site of one draft layer."""

    def __init__(
        self, config: ModelConfig, draft: DraftConfig, index: int, source: WeightSource
    ) -> None:
        super().__init__()
        block = f"mtp.{index}"
        self.attention_site = Site(config, block, "attn", source)
        self.attention = DraftAttention(config, block, source)
        self.ffn_site = Site(config, block, "ffn", source)
        self.moe = MixtureOfExperts(
            config, block, draft.n_routed_experts, draft.num_experts_per_tok, source
        )

    def forward(
        self, trunk: Tensor, pre: Tensor, step: DraftStep, turns: Tensor, cache: LayerCache
    ) -> tuple[Tensor, Tensor]:
        """Trunk ``[n, M, D]`` and carried mix ``[n, M]`` to those of the next block."""
        trunk, pre = self.attention_site(
            trunk, pre, lambda y: self.attention(y, step, turns, cache)
        )
        trunk, pre = self.ffn_site(trunk, pre, self.moe)
        return trunk, pre


class DraftHeads(nn.Module):
    """From the hidden states of a block to its tokens: post norm, Markov bias, confidence."""

    def __init__(self, config: ModelConfig, draft: DraftConfig, source: WeightSource) -> None:
        super().__init__()
        last = f"mtp.{draft.num_layers - 1}"
        self.eps, self.arithmetic = config.rms_norm_eps, source.arithmetic
        self.norm = nn.Buffer(source.plain(f"{last}.norm.weight"), persistent=False)
        markov = source.plain(f"{last}.markov_head.embed.weight")
        self.markov_embed = nn.Buffer(markov, persistent=False)
        self.markov_head = source.wide(f"{last}.markov_head.head")
        weight = source.plain(f"{last}.confidence_head.proj.weight")
        self.confidence_weight = nn.Buffer(weight[0], persistent=False)

    def start(self, hidden: Tensor, head: WideLinear) -> Tensor:
        """fp32 logits ``[n, V]`` without the Markov bias of hidden states ``[n, D]``."""
        return head(rms_norm(hidden, self.norm, self.eps, self.arithmetic))

    def advance(
        self, logits: Tensor, hidden: Tensor, previous: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One step of the chain.

        Args:
            logits: fp32 ``[s, V]`` of this place of every block.
            hidden: ``[s, D]``, before the post norm.
            previous: int64 ``[s]`` tokens before this place.
            temperature: fp32 scalar, of the confidence at this place.

        Returns:
            logits with the bias that the previous token gives, and fp32 ``[s]`` confidence that
            the draft of this place is accepted if all before it are.
        """
        markov = gather_rows(self.markov_embed, previous).to(self.arithmetic.dtype)
        biased = logits + self.markov_head(markov)
        trust = confidence(
            hidden, self.confidence_weight, temperature, self.arithmetic.order, markov
        )
        return biased, trust

    def greedy(
        self, hidden: Tensor, golden: Tensor, temperatures: Tensor, head: WideLinear
    ) -> tuple[Tensor, Tensor]:
        """The whole chain with the most probable token at every place.

        Nothing in it leaves the device, so it can be captured as one region.

        Args:
            hidden: ``[s * n, D]``, before the post norm.
            golden: int64 ``[s]`` last token of every sequence.
            temperatures: fp32 ``[n]``.
            head: of the backbone.

        Returns:
            int64 tokens ``[s, n]`` and fp32 confidences ``[s, n]``.
        """
        block = temperatures.shape[0]
        logits = self.start(hidden, head).unflatten(0, (-1, block))
        places = hidden.unflatten(0, (-1, block))
        previous, tokens, trusts = golden, [], []
        for place in range(block):
            biased, trust = self.advance(
                logits[:, place], places[:, place], previous, temperatures[place]
            )
            previous = argmax(biased) if self.arithmetic.graph else biased.argmax(-1)
            tokens.append(previous)
            trusts.append(trust)
        return torch.stack(tokens, dim=1), torch.stack(trusts, dim=1)


class DraftBlocks(nn.Module):
    """The draft layers of a checkpoint with their heads."""

    def __init__(self, config: ModelConfig, draft: DraftConfig, source: WeightSource) -> None:
        super().__init__()
        self.config, self.draft, self.arithmetic = config, draft, source.arithmetic
        self.targets = frozenset(draft.target_layer_ids)
        self.main_proj = source.fp8("mtp.0.main_proj")
        self.main_norm = nn.Buffer(source.plain("mtp.0.main_norm.weight"), persistent=False)
        self.blocks = nn.ModuleList(
            DraftBlock(config, draft, index, source) for index in range(draft.num_layers)
        )
        self.heads = DraftHeads(config, draft, source)

    def remember(
        self, features: Tensor, turns: Tensor, plan: WindowPlan, caches: Sequence[LayerCache]
    ) -> None:
        """Keep the window keys of a step's rows.

        Args:
            features: trunk means entering the target layers ``[n, targets * D]``.
            turns: ``[n, R]`` rotary rows.
            plan: where keys go.
            caches: of the draft blocks; written.
        """
        x = self.main_proj(q8(features, self.arithmetic))
        y = rms_norm(x, self.main_norm, self.config.rms_norm_eps, self.arithmetic)
        main = q8(y, self.arithmetic)
        for block, cache in zip(self.blocks, caches, strict=True):
            assert isinstance(block, DraftBlock)
            block.attention.remember(main, turns, plan, cache)

    def forward(
        self,
        trunk: Tensor,
        pre: Tensor,
        step: DraftStep,
        turns: Tensor,
        caches: Sequence[LayerCache],
    ) -> Tensor:
        """Hidden states before the post norm ``[n, D]`` of embedded rows ``[n, M, D]``."""
        for block, cache in zip(self.blocks, caches, strict=True):
            trunk, pre = block(trunk, pre, step, turns, cache)
        return collapse(trunk, pre, self.arithmetic)

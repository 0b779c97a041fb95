"""The draft module over one sequence: proposals for the tokens behind the newest one.

Notation: ``n`` drafts, hidden size ``D``, head width ``Dh``, vocabulary ``V``, window ``W``. The
*golden* token is the last one of the prefix. It is committed, but has not been through the network
yet. With ``p`` its position, a block takes the positions ``p .. p + n - 1``: the golden token and
``n - 1`` noise tokens go in, and the row at position ``p + i`` predicts the token at
``p + i + 1``.

A draft layer has keys of two kinds. Those of the positions before the golden token come from the
network's trunk (*main keys*), those of the block from the block itself. All rows of a block see
the same keys: the main keys of the last ``W`` positions and every key of the block, so a row also
sees the rows behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_neuron.checkpoint.config import DraftConfig
from deepinfer_neuron.checkpoint.schedule import LayerSpec, Role
from deepinfer_neuron.errors import ConfigError, RequestError
from deepinfer_neuron.reference.attention import Attention, Shared, rope_frequencies
from deepinfer_neuron.reference.network import LayerTrace, Network, Trace, lowest_maximum
from deepinfer_neuron.reference.weights import Weights


@dataclass(frozen=True)
class DraftBlock:
    """One greedy draft block."""

    tokens: Tensor
    """Likeliest token of every row, the lowest id among equals: int64 ``[n]``."""
    confidence: Tensor
    """Estimates that draft ``i`` is accepted if those before it are: fp32 ``[n]``."""
    logits: Tensor
    """With the bias of the token before: fp32 ``[n, V]``."""
    hidden: Tensor
    """What the confidence head reads, before the last norm: bf16 values ``[n, D]``."""
    trace: Trace
    """What entered and left every draft layer."""


@dataclass(frozen=True)
class Drafts:
    """The draft module of a checkpoint, with the rounding and the reductions of its network.

    Raises:
        ConfigError: the checkpoint has no draft layers.
    """

    network: Network

    def __post_init__(self) -> None:
        if self.network.config.draft is None:
            raise ConfigError(
                f"{self.network.checkpoint.directory}: num_nextn_predict_layers is 0; "
                f"drafts need a checkpoint with draft layers."
            )

    @property
    def config(self) -> DraftConfig:
        """The draft part of the configuration."""
        draft = self.network.config.draft
        assert draft is not None
        return draft

    def block(
        self,
        token_ids: Sequence[int],
        nextn: int,
        forced: Sequence[int] | None = None,
        temperatures: float | Sequence[float] = 1.0,
    ) -> DraftBlock:
        """Draft behind a prefix, whose last token is the golden one.

        Args:
            token_ids: the prefix, at least the golden token.
            nextn: number of drafts, at least 1.
            forced: ``nextn`` tokens that take the place of the drafts where a draft is the token
                before; the drafts themselves when not given.
            temperatures: of the confidence head; one for all drafts, or one for each.

        Raises:
            RequestError: as :meth:`Network.logits`, or a count does not fit.
        """
        ids = self.network.checked(token_ids)
        position = len(ids) - 1
        main = [torch.zeros(0, self.network.config.head_dim)] * self.config.num_layers
        if position > 0:
            trace = Trace()
            self.network.logits(token_ids[:-1], trace)
            main = self.main_keys(self.features(trace), torch.arange(position))
        return self.draft(int(ids[-1]), position, main, nextn, forced, temperatures)

    def draft(
        self,
        golden: int,
        position: int,
        main: Sequence[Tensor],
        nextn: int,
        forced: Sequence[int] | None = None,
        temperatures: float | Sequence[float] = 1.0,
    ) -> DraftBlock:
        """Draft behind a golden token whose main keys are known; see :meth:`block`.

        Args:
            golden: the golden token.
            position: its position.
            main: per draft layer, the main keys ``[position, Dh]`` of everything before it.
        """
        if nextn < 1:
            raise RequestError(f"a draft block holds at least one token, got nextn {nextn}")
        noise = [self.config.noise_token_id] * (nextn - 1)
        trace = Trace()
        hidden = self.hidden([golden, *noise], position, main, trace)
        return self.heads(hidden, golden, forced, temperatures, trace)

    # Main keys.

    def features(self, trace: Trace) -> Tensor:
        """Mean over the streams of the trunk that enters each target layer's attention site.

        Args:
            trace: of a run of the network over ``T`` tokens.

        Returns:
            bf16 values ``[T, targets * D]``, target by target.
        """
        columns = []
        for target in self.config.target_layer_ids:
            trunk = trace.layers[target].entered
            total = self.network.ops.sum(trunk.transpose(1, 2))
            columns.append(self.network.rounding.bf16(total * (1.0 / trunk.shape[1])))
        return torch.cat(columns, 1)

    def main_keys(self, features: Tensor, position: Tensor) -> list[Tensor]:
        """Dequantized main keys of every draft layer.

        Args:
            features: bf16 values ``[T, targets * D]``, at least one row.
            position: int64 ``[T]``.

        Returns:
            one ``[T, Dh]`` per draft layer.
        """
        network, weights = self.network, Weights(self.network.checkpoint, "mtp.0.")
        quantize = network.rounding.activation
        x = network.ops.matmul(quantize(features), weights.fp8("main_proj"))
        y = network.norm(network.rounding.bf16(x), weights.plain("main_norm.weight"))
        y, frequency = quantize(y), rope_frequencies(network.config, compressed=False)
        return [
            self._attention(layer).window_keys(y, position, frequency)
            for layer in range(self.config.num_layers)
        ]

    # Draft layers.

    def hidden(
        self, ids: Sequence[int], position: int, main: Sequence[Tensor], trace: Trace
    ) -> Tensor:
        """Run the draft layers over the tokens of a block.

        Args:
            ids: golden token and noise.
            position: of the golden token.
            main: per draft layer, the main keys ``[position, Dh]``.
            trace: filled with the intermediate values.

        Returns:
            ``[n, D]`` bf16 values: the last trunk, collapsed with the mix of the last site.
        """
        trunk, pre = self.network.embed(self.network.checked(ids))
        places = position + torch.arange(len(ids))
        for layer in range(self.config.num_layers):
            trunk, pre = self._layer(layer, trunk, pre, places, main[layer], trace)
        return self.network.collapse(trunk, pre)

    def _layer(
        self, layer: int, trunk: Tensor, pre: Tensor, position: Tensor, main: Tensor, trace: Trace
    ) -> tuple[Tensor, Tensor]:
        network, weights = self.network, Weights(self.network.checkpoint, f"mtp.{layer}.")
        attention, ffn = self._attention(layer), weights.below("ffn.")
        slots, route = self.config.num_experts_per_tok, list[Tensor]()
        start, start_pre = trunk, pre
        trunk, pre = network.site(
            weights, "attn", trunk, pre, lambda x: self._attend(attention, x, position, main), trace
        )
        middle, middle_pre = trunk, pre
        trunk, pre = network.site(
            weights, "ffn", trunk, pre, lambda y: network.moe(ffn, y, slots, route), trace
        )
        trace.layers.append(
            LayerTrace(
                trunk_in=start,
                entered=start,
                pre_in=start_pre,
                shared=Shared(),
                trunk_after_attention=middle,
                pre_after_attention=middle_pre,
                trunk_out=trunk,
                pre_out=pre,
                route=route[0],
                engram_gate=None,
            )
        )
        return trunk, pre

    def _attention(self, layer: int) -> Attention:
        """The attention of a draft layer, which has a window and nothing else."""
        network = self.network
        spec = LayerSpec(
            index=network.config.num_hidden_layers + layer,
            role=Role.SWA,
            ratio=0,
            kv_source=None,
            index_k_source=None,
            index_source=None,
            owns_kv=False,
            owns_index_k=False,
            owns_index=False,
            is_candidate_source=False,
            candidate_source=None,
            engram=None,
        )
        weights = Weights(network.checkpoint, f"mtp.{layer}.attn.")
        return Attention(network.config, spec, weights, network.rounding, network.ops)

    def _attend(self, attention: Attention, x: Tensor, position: Tensor, main: Tensor) -> Tensor:
        """Attention of a block, all rows over the same keys in the order of their positions.

        Args:
            attention: of the layer.
            x: normed hidden states ``[n, D]``, bf16 values.
            position: int64 ``[n]``.
            main: main keys ``[position[0], Dh]``.

        Returns:
            ``[n, D]``, bf16 values.
        """
        config = self.network.config
        frequency = rope_frequencies(config, compressed=False)
        a = self.network.rounding.activation(x)
        _, query = attention.queries(a, position, frequency)
        own = attention.window_keys(a, position, frequency)
        keys = torch.cat((main[-config.sliding_window :], own))
        rows = [attention.attend_row(q, keys, keys[:0]) for q in query]
        return attention.output(torch.stack(rows), position, frequency)

    # Heads.

    def heads(
        self,
        hidden: Tensor,
        golden: int,
        forced: Sequence[int] | None,
        temperatures: float | Sequence[float],
        trace: Trace,
    ) -> DraftBlock:
        """Choose the drafts one after the other; each is biased by the token before it.

        Args:
            hidden: ``[n, D]``, bf16 values.
            golden: the token before the first draft.
            forced: as for :meth:`block`.
            temperatures: as for :meth:`block`.
            trace: handed on.
        """
        network, count = self.network, len(hidden)
        if forced is not None and len(network.checked(forced)) != count:
            raise RequestError(f"expected {count} forced draft tokens, got {len(forced)}")
        scales = _one_each(temperatures, count)
        weights = Weights(network.checkpoint, f"mtp.{self.config.num_layers - 1}.")
        normed = network.norm(hidden, weights.plain("norm.weight"))
        unbiased = network.ops.matmul(normed, Weights(network.checkpoint).plain("head.weight"))
        embedding = weights.plain("markov_head.embed.weight")
        bias_weight = weights.plain("markov_head.head.weight")

        tokens, confidence, logits, previous = [], [], [], golden
        for row in range(count):
            e = embedding[previous : previous + 1]
            logits.append(unbiased[row] + network.ops.matmul(e, bias_weight)[0])
            confidence.append(self.confidence(weights, hidden[row : row + 1], e, scales[row]))
            tokens.append(lowest_maximum(logits[-1]))
            previous = tokens[-1] if forced is None else forced[row]
        return DraftBlock(
            torch.tensor(tokens), torch.cat(confidence), torch.stack(logits), hidden, trace
        )

    def confidence(self, weights: Weights, hidden: Tensor, e: Tensor, scale: Tensor) -> Tensor:
        """Confidence of one draft, fp32 ``[1]``.

        Args:
            weights: tensors of the last draft layer.
            hidden: ``[1, D]``, bf16 values.
            e: Markov embedding of the token before the draft ``[1, rank]``.
            scale: temperature, fp32 without axes.
        """
        ops, weight = self.network.ops, weights.plain("confidence_head.proj.weight")
        width = hidden.shape[1]
        score = ops.matmul(hidden, weight[:, :width]) + ops.matmul(e, weight[:, width:])
        return ops.sigmoid((score[0] / scale.clamp(min=1e-5)).clamp(-60.0, 60.0))


def _one_each(temperatures: float | Sequence[float], count: int) -> Tensor:
    """Temperatures of ``count`` drafts, fp32 ``[count]``."""
    if isinstance(temperatures, (int, float)):
        temperatures = [temperatures] * count
    if len(temperatures) != count:
        raise RequestError(
            f"expected one confidence temperature or one for each of {count} drafts, "
            f"got {len(temperatures)}"
        )
    return torch.tensor(temperatures, dtype=torch.float32)

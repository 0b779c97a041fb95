"""The whole network over one sequence: no cache, no batch, every formula where it is used.

This is the oracle of the project. It is written for reading and shares no operator with the
engine; only the checkpoint readers and number codecs are common.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deepinfer_neuron.checkpoint.config import LayerSpec, ModelConfig
from deepinfer_neuron.checkpoint.engram import EngramHasher
from deepinfer_neuron.checkpoint.reader import Checkpoint
from deepinfer_neuron.errors import RequestError
from deepinfer_neuron.reference.attention import Attention, Shared, rms_norm, square_root
from deepinfer_neuron.reference.primitives import PlainPrimitives, Primitives
from deepinfer_neuron.reference.rounding import Rounding
from deepinfer_neuron.reference.weights import Weights


@dataclass
class Mix:
    """Coefficients of one hyper-connection site, fp32."""

    pre: Tensor
    """``[n, M]``: weights of the streams in the *next* site's input."""
    post: Tensor
    """``[n, M]``: share of this site's output in every stream."""
    comb: Tensor
    """``[n, M, M]``: from input stream (row) to output stream (column)."""


@dataclass
class LayerTrace:
    """What entered and left one layer; for comparing an engine layer by layer."""

    trunk_in: Tensor
    """``[n, M, D]`` before the Engram update."""
    entered: Tensor
    """``[n, M, D]`` at the attention site: behind the Engram update, where there is one."""
    pre_in: Tensor
    """``[n, M]`` carried mix."""
    shared: Shared
    """The published values as this layer's attention left them."""
    trunk_after_attention: Tensor
    pre_after_attention: Tensor
    trunk_out: Tensor
    pre_out: Tensor
    route: Tensor
    """Chosen experts ``[n, k]`` in slot order."""
    engram_gate: Tensor | None
    """``[n, M]`` gates of an Engram layer."""


@dataclass
class Trace:
    """Record of one run."""

    layers: list[LayerTrace] = field(default_factory=list)
    mixes: list[Mix] = field(default_factory=list)
    """Attention and FFN mixes, alternating, layer by layer."""


@dataclass(frozen=True)
class Network:
    """The text network of a checkpoint.

    Args:
        checkpoint: an opened checkpoint.
        rounding: ``Rounding(enabled=False)`` leaves out every rounding point.
        ops: order of the reductions; torch's own when not given.
    """

    checkpoint: Checkpoint
    rounding: Rounding = field(default_factory=Rounding)
    ops: Primitives = field(default_factory=PlainPrimitives)

    @property
    def config(self) -> ModelConfig:
        """Configuration of the checkpoint."""
        return self.checkpoint.config

    def logits(self, token_ids: Sequence[int], trace: Trace | None = None) -> Tensor:
        """Logits of every position.

        Args:
            token_ids: ids in ``[0, vocab_size)``, at least one.
            trace: filled with the intermediate values when given.

        Returns:
            fp32 ``[n, vocab_size]``.

        Raises:
            RequestError: no tokens, or an id outside the vocabulary.
        """
        ids = self.checked(token_ids)
        weights = Weights(self.checkpoint)
        trunk, pre = self.embed(ids)
        engram_rows = self._engram_rows(ids)
        shared = Shared()
        for layer in self.config.layers:
            rows = engram_rows[layer.engram] if layer.engram is not None else None
            trunk, pre = self._layer(layer, trunk, pre, rows, shared, trace)
        hidden = self.norm(self.collapse(trunk, pre), weights.plain("norm.weight"))
        return self.ops.matmul(hidden, weights.plain("head.weight"))

    def checked(self, token_ids: Sequence[int]) -> Tensor:
        """Token ids as int64 ``[n]``. Raises :class:`RequestError` as :meth:`logits` does."""
        ids = torch.tensor(list(token_ids), dtype=torch.int64)
        vocabulary = self.config.vocab_size
        if ids.numel() == 0 or int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
            raise RequestError(
                f"the reference needs at least one token id in [0, {vocabulary}), "
                f"got {ids.tolist()[:8]}"
            )
        return ids

    def embed(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """What enters a stack of layers: the embedding in every stream, and the first mix.

        Args:
            ids: int64 ``[n]``.

        Returns:
            trunk ``[n, M, D]`` and a mix ``[n, M]`` that reads stream 0 only.
        """
        embedding = self.checkpoint.tensor("embed.weight")[ids].to(torch.float32)
        pre = torch.zeros(len(ids), self.config.hc_mult)
        pre[:, 0] = 1.0
        return embedding[:, None, :].repeat(1, self.config.hc_mult, 1), pre

    # Layer: Engram update, attention site, feed-forward site.

    def _layer(
        self,
        layer: LayerSpec,
        trunk: Tensor,
        pre: Tensor,
        engram_rows: Tensor | None,
        shared: Shared,
        trace: Trace | None,
    ) -> tuple[Tensor, Tensor]:
        weights = Weights(self.checkpoint, f"layers.{layer.index}.")
        attention = Attention(self.config, layer, weights.below("attn."), self.rounding, self.ops)
        route: list[Tensor] = []
        start, start_pre, gate = trunk, pre, None
        if engram_rows is not None:
            trunk, gate = self.engram(weights, trunk, engram_rows)
        entered = trunk
        trunk, pre = self.site(weights, "attn", trunk, pre, lambda x: attention(x, shared), trace)
        middle, middle_pre = trunk, pre
        slots, ffn = self.config.num_experts_per_tok, weights.below("ffn.")
        trunk, pre = self.site(
            weights, "ffn", trunk, pre, lambda y: self.moe(ffn, y, slots, route), trace
        )
        if trace is not None:
            trace.layers.append(
                LayerTrace(
                    start,
                    entered,
                    start_pre,
                    Shared(**vars(shared)),
                    middle,
                    middle_pre,
                    trunk,
                    pre,
                    route[0],
                    gate,
                )
            )
        return trunk, pre

    def site(
        self,
        weights: Weights,
        name: str,
        trunk: Tensor,
        pre: Tensor,
        block: Callable[[Tensor], Tensor],
        trace: Trace | None,
    ) -> tuple[Tensor, Tensor]:
        """Collapse with the previous site's mix, run the block, expand with this site's.

        Args:
            weights: tensors below ``layers.L.`` or ``mtp.L.``.
            name: ``attn`` or ``ffn``.
            trunk: ``[n, M, D]`` bf16 values.
            pre: ``[n, M]``, the previous site's.
            block: normed hidden states ``[n, D]`` to the block's output ``[n, D]``.
            trace: receives the coefficients when given.

        Returns:
            the trunk behind the site and this site's ``pre``.
        """
        x = self.collapse(trunk, pre)
        mix = self.mix(weights, name, trunk)
        out = block(self.norm(x, weights.plain(f"{name}_norm.weight")))
        if trace is not None:
            trace.mixes.append(mix)
        return self._expand(out, trunk, mix), mix.pre

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm in fp32 with one rounding, after the weight."""
        return rms_norm(x, weight, self.config.rms_norm_eps, self.rounding, self.ops)

    # Hyper-connections.

    def mix(self, weights: Weights, name: str, trunk: Tensor) -> Mix:
        """Coefficients of a site from the flattened trunk ``[n, M, D]``.

        The projection comes first and is then scaled by the trunk's RMS; ``comb`` is made doubly
        stochastic by Sinkhorn steps that end with the columns.
        """
        c, ops, streams = self.config, self.ops, self.config.hc_mult
        flat = trunk.flatten(1)
        projected = ops.matmul_wide(flat, weights.plain(f"hc_{name}_fn"))
        mean_square = ops.sum(flat * flat) / flat.shape[1]
        projected = projected * square_root(mean_square + c.rms_norm_eps).reciprocal()[:, None]
        scale = weights.plain(f"hc_{name}_scale").repeat_interleave(
            torch.tensor([streams, streams, streams * streams])
        )
        base = weights.plain(f"hc_{name}_base")
        z = (projected.double() * scale.double() + base.double()).float()
        pre = ops.sigmoid(z[:, :streams].contiguous()) + c.hc_eps
        post = 2.0 * ops.sigmoid(z[:, streams : 2 * streams].contiguous())
        comb = self.sinkhorn(z[:, 2 * streams :].unflatten(1, (streams, streams)))
        return Mix(pre, post, comb)

    def sinkhorn(self, x: Tensor) -> Tensor:
        """Softmax over columns, then alternating column and row normalizations ``[n, M, M]``."""
        eps, total = self.config.hc_eps, self.ops.sum

        def by_columns(m: Tensor) -> Tensor:
            return m / (total(m.transpose(1, 2))[:, None, :] + eps)

        def by_rows(m: Tensor) -> Tensor:
            return m / (total(m)[:, :, None] + eps)

        x = self.ops.exp(x - x.amax(2, keepdim=True))
        x = by_columns(x / total(x)[:, :, None] + eps)
        for _ in range(self.config.hc_sinkhorn_iters - 1):
            x = by_columns(by_rows(x))
        return x

    def collapse(self, trunk: Tensor, pre: Tensor) -> Tensor:
        """``sum_m pre[m] * trunk[m]`` with fused multiply-adds, stream 0 first, one rounding."""
        total = torch.zeros_like(trunk[:, 0])
        for stream in range(trunk.shape[1]):
            total = _fused(pre[:, stream, None], trunk[:, stream], total)
        return self.rounding.bf16(total)

    def _expand(self, out: Tensor, trunk: Tensor, mix: Mix) -> Tensor:
        """New streams: ``post[j] * out + sum_i comb[i, j] * trunk[i]``, one rounding each."""
        streams = []
        for j in range(trunk.shape[1]):
            total = mix.post[:, j, None] * out
            for i in range(trunk.shape[1]):
                total = _fused(mix.comb[:, i, j, None], trunk[:, i], total)
            streams.append(self.rounding.bf16(total))
        return torch.stack(streams, 1)

    # Mixture of experts.

    def moe(self, weights: Weights, y: Tensor, slots: int, route: list[Tensor]) -> Tensor:
        """Shared expert plus the routed ones, added in slot order, one rounding at the end.

        Args:
            weights: tensors below ``ffn.``.
            y: ``[n, D]`` bf16 values.
            slots: routed experts per token.
            route: receives the chosen experts ``[n, k]``.
        """
        chosen, share = self.gate(weights, y, slots)
        route.append(chosen)
        x = self.rounding.activation(y)
        shared_weights = weights.below("shared_experts.")
        ones = torch.ones(len(y), 1)
        total = self._expert(x, ones, *[shared_weights.fp8(m) for m in ("w1", "w3", "w2")])
        out = torch.zeros(*chosen.shape, y.shape[1])
        for expert in chosen.unique().tolist():
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            matrices = [weights.fp4(f"experts.{expert}.{m}") for m in ("w1", "w3", "w2")]
            out[token, slot] = self._expert(x[token], share[token, slot, None], *matrices)
        for slot in range(chosen.shape[1]):
            total = total + out[:, slot]
        return self.rounding.bf16(total)

    def gate(self, weights: Weights, y: Tensor, slots: int) -> tuple[Tensor, Tensor]:
        """The ``k = slots`` experts ``[n, k]`` in descending rank and their weights ``[n, k]``.

        The bias moves the selection only. The weights are the unbiased scores over their sum.
        """
        score = square_root(self.ops.softplus(self.ops.matmul(y, weights.plain("gate.weight"))))
        rank = score + weights.plain("gate.bias")
        chosen = torch.argsort(rank, dim=1, descending=True, stable=True)[:, :slots]
        share = score.gather(1, chosen)
        total = _butterfly_sum(share) + 1e-20
        return chosen, share / total[:, None] * self.config.routed_scaling_factor

    def _expert(self, x: Tensor, share: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
        """SwiGLU with clamps; the routing weight enters before the product is quantized."""
        bf16, limit = self.rounding.bf16, self.config.swiglu_limit
        gate = bf16(self.ops.matmul(x, w1)).clamp(max=limit)
        up = bf16(self.ops.matmul(x, w3)).clamp(-limit, limit)
        product = gate / (1.0 + self.ops.exp(-gate)) * up * share
        return bf16(self.ops.matmul(self.rounding.activation(product), w2))

    # Engram.

    def _engram_rows(self, ids: Tensor) -> Tensor:
        """Table rows of every Engram layer: int64 ``[layers, n, columns]``."""
        engram = self.config.engram
        if engram is None:
            return torch.empty(0, len(ids), 0, dtype=torch.int64)
        hasher = EngramHasher.from_config(engram, self.checkpoint.directory / "tokenizer.json")
        windows = hasher.windows(hasher.compress(ids.numpy()))
        return torch.from_numpy(hasher.rows(windows).astype(np.int64))

    def engram(self, weights: Weights, trunk: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Add the gated memory to every stream; returns the trunk and the gates ``[n, M]``."""
        c, ops = self.config, self.ops
        fetched = weights.engram_rows(rows).flatten(1)
        kv = self.rounding.bf16(ops.matmul(fetched, weights.fp8("engram.wkv")))
        kv = kv.unflatten(1, (c.hc_mult + 1, c.hidden_size))
        key, value = kv[:, : c.hc_mult], kv[:, c.hc_mult]
        weight = weights.plain("engram.q_weight") * weights.plain("engram.k_weight")

        def inverse_rms(x: Tensor) -> Tensor:
            return square_root(ops.sum(x * x) / c.hidden_size + c.rms_norm_eps).reciprocal()

        dot = ops.sum(trunk * weight * key)
        dot = dot * inverse_rms(trunk) * inverse_rms(key) * c.hidden_size**-0.5
        gate = ops.sigmoid(torch.copysign(square_root(dot.abs().clamp(min=1e-6)), dot))
        return self.rounding.bf16(trunk + gate[..., None] * value[:, None]), gate


def _fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` rounded once; the fp32 product is exact in fp64."""
    return (a.double() * b.double() + c.double()).float()


def _butterfly_sum(x: Tensor) -> Tensor:
    """Sum of ``[n, k]`` over ``k``: halves of the zero-padded power of two folded together."""
    width = 1 << (x.shape[1] - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, width - x.shape[1]))
    while x.shape[1] > 1:
        x = x[:, : x.shape[1] // 2] + x[:, x.shape[1] // 2 :]
    return x[:, 0]


def forward(model_dir: str | Path, token_ids: Sequence[int]) -> Tensor:
    """Logits of a full sequence, straight from the files.

    Args:
        model_dir: checkpoint directory.
        token_ids: ids in ``[0, vocab_size)``, at least one.

    Returns:
        fp32 ``[n, vocab_size]``.

    Raises:
        CheckpointError, ConfigError, RequestError: as :meth:`Checkpoint.open` and
            :meth:`Network.logits` do.
    """
    with Checkpoint.open(model_dir) as checkpoint:
        return Network(checkpoint).logits(token_ids)


def lowest_maximum(logits: Tensor) -> int:
    """Index of the largest value of a vector, the lowest among equal ones."""
    return int((logits == logits.amax()).nonzero()[0])


def greedy_tokens(network: Network, prompt: Sequence[int], count: int) -> list[int]:
    """The ``count`` tokens that follow a prompt when the likeliest one is always taken.

    Every token costs a run over the whole sequence. Raises :class:`RequestError` like
    :meth:`Network.logits`.
    """
    ids = list(prompt)
    for _ in range(count):
        ids.append(lowest_maximum(network.logits(ids)[-1]))
    return ids[len(prompt) :]

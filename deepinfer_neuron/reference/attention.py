"""One attention sub-layer over a whole sequence: window, compressed keys, indexer, candidates.

Notation: ``n`` tokens, position ``p``, compression ratio ``r``, window ``W``. An entry ``j`` of the
compressed keys pools the tokens ``r*j .. r*j + r-1``, carries the position of the first, and is
visible to the query ``p`` once its last token is at or before ``p``: ``j < (p + 1) // r``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_neuron.checkpoint.config import LayerSpec, ModelConfig
from deepinfer_neuron.reference.primitives import Primitives
from deepinfer_neuron.reference.rounding import Rounding
from deepinfer_neuron.reference.weights import Weights


@dataclass
class Shared:
    """What a source layer publishes for the layers after it; the latest writer is the source."""

    compressed: Tensor | None = None
    """Dequantized compressed keys ``[m, Dh]``."""
    index_keys: Tensor | None = None
    """Dequantized index keys ``[m, Di]``."""
    latent: Tensor | None = None
    """Normed latent before RoPE ``[m, Dh]``."""
    selected: list[Tensor] | None = None
    """Per query, the selected entries in ascending order (int64)."""
    candidates: Tensor | None = None
    """Per query, the entries inside the kept blocks: bool ``[n, m]``."""
    scores: Tensor | None = None
    """Index scores of the latest index source ``[n, m]``, -inf where invisible."""


def rope_frequencies(config: ModelConfig, compressed: bool) -> Tensor:
    """Inverse frequencies, fp32 ``[R/2]``: plain for window-only layers, YaRN for compressed ones.

    YaRN interpolates the slow rotations by ``factor`` and leaves the fast ones, with a linear ramp
    between the two pair indices whose wavelengths match ``beta_fast`` and ``beta_slow`` rotations
    over the original context. There is no magnitude factor.
    """
    width = config.qk_rope_head_dim
    base = config.compress_rope_theta if compressed else config.rope_theta
    frequency = 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    scaling = config.rope_scaling
    if not compressed or scaling is None:
        return frequency

    def pair_with(rotations: float) -> float:
        turns = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return width * math.log(turns) / (2 * math.log(base))

    low = max(math.floor(pair_with(scaling.beta_fast)), 0)
    high = float(min(math.ceil(pair_with(scaling.beta_slow)), width - 1))
    if low == high:
        high += 0.001
    pair = torch.arange(width // 2, dtype=torch.float32)
    ramp = ((pair - low) / (high - low)).clamp(0, 1)
    return frequency / scaling.factor * ramp + frequency * (1 - ramp)


def rotate(x: Tensor, position: Tensor, frequency: Tensor, inverse: bool = False) -> Tensor:
    """RoPE on the last channels, interleaved pairs, one fused multiply-add per output.

    Args:
        x: fp32 ``[n, ..., D]``; the last ``2 * len(frequency)`` channels turn.
        position: int64 ``[n]``.
        frequency: fp32 ``[R/2]``. The angle is the fp32 product position x frequency.
        inverse: rotate back.
    """
    width = 2 * frequency.numel()
    angle = position.to(torch.float32)[:, None] * frequency
    angle = angle.view(len(angle), *[1] * (x.dim() - 2), angle.shape[1]).double()
    # fp64 functions, rounded once, give the same bits wherever an element stands in a loop.
    cos, sin = angle.cos().float(), angle.sin().float()
    if inverse:
        sin = -sin
    still, turning = x[..., :-width], x[..., -width:]
    a, b = turning[..., 0::2], turning[..., 1::2]
    # fp64 holds the fp32 product exactly, so one rounding of the sum is the fused operation.
    first = (a.double() * cos.double() - (b * sin).double()).float()
    second = (a.double() * sin.double() + (b * cos).double()).float()
    return torch.cat((still, torch.stack((first, second), -1).flatten(-2)), -1)


@dataclass(frozen=True)
class Attention:
    """Attention of one layer. ``weights`` holds the tensors below ``layers.L.attn.``."""

    config: ModelConfig
    layer: LayerSpec
    weights: Weights
    rounding: Rounding
    ops: Primitives

    def __call__(self, x: Tensor, shared: Shared) -> Tensor:
        """Attention output of a whole sequence.

        Args:
            x: normed hidden states, fp32 holding bf16 values, ``[n, D]``.
            shared: what earlier sources published; updated by source layers.

        Returns:
            ``[n, D]``, bf16 values.
        """
        position = torch.arange(x.shape[0])
        frequency = rope_frequencies(self.config, compressed=self.layer.ratio > 0)
        a = self.rounding.activation(x)
        query_latent, query = self.queries(a, position, frequency)
        window = self.window_keys(a, position, frequency)

        if self.layer.owns_kv:
            self.compress(x, shared, frequency)
        if self.layer.owns_index_k:
            self.make_index_keys(shared, frequency)
        if self.layer.owns_index:
            self.select(x, query_latent, position, shared, frequency)

        return self.output(self.attend(query, window, shared), position, frequency)

    def queries(self, a: Tensor, position: Tensor, frequency: Tensor) -> tuple[Tensor, Tensor]:
        """Quantized query latents and rotated queries: ``[n, D]`` to ``[n, Q]``, ``[n, H, Dh]``."""
        w = self.weights
        latent = self.norm(self.linear(a, w.fp8("wq_a")), w.plain("q_norm.weight"))
        latent = self.rounding.activation(latent)
        query = self.linear(latent, w.fp8("wq_b")).view(len(a), -1, self.config.head_dim)
        return latent, self.rounding.bf16(rotate(query, position, frequency))

    def window_keys(self, a: Tensor, position: Tensor, frequency: Tensor) -> Tensor:
        """Dequantized window keys of quantized inputs: ``[n, D]`` to ``[n, Dh]``."""
        w = self.weights
        keys = self.norm(self.linear(a, w.fp8("wkv")), w.plain("kv_norm.weight"))
        return self.rounding.activation(self.rounding.bf16(rotate(keys, position, frequency)))

    def output(self, out: Tensor, position: Tensor, frequency: Tensor) -> Tensor:
        """Rotate the attended values ``[n, H, Dh]`` back and project them: ``[n, D]``."""
        out = self.rounding.bf16(out)
        out = self.rounding.bf16(rotate(out, position, frequency, inverse=True))
        return self.project(self.rounding.activation(out))

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Matrix product rounded to bf16: ``[n, K] x [N, K] -> [n, N]``."""
        return self.rounding.bf16(self.ops.matmul(x, weight))

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm in fp32 with one rounding, after the weight."""
        return rms_norm(x, weight, self.config.rms_norm_eps, self.rounding, self.ops)

    def compress(self, x: Tensor, shared: Shared, frequency: Tensor) -> None:
        """Publish the pooled, normed, rotated and quantized entries of this layer's input.

        With ratio 2 the two tokens of a group are mixed channel by channel by a softmax of their
        gate scores, all in fp32; a trailing odd token makes no entry.
        """
        w, ratio = self.weights.below("compressor."), self.layer.ratio
        entries = len(x) // ratio
        if ratio == 1:
            pooled = self.linear(x, w.plain("wkv.weight"))
        else:
            tokens = x[: ratio * entries]
            score = self.ops.matmul(tokens, w.plain("wgate.weight")).unflatten(0, (-1, 2))
            value = self.ops.matmul(tokens, w.plain("wkv.weight")).unflatten(0, (-1, 2))
            share = self.ops.exp(score - score.amax(1, keepdim=True))
            share = share / (share[:, :1] + share[:, 1:])
            pooled = self.rounding.bf16(value[:, 0] * share[:, 0] + value[:, 1] * share[:, 1])
        shared.latent = self.norm(pooled, w.plain("norm.weight"))
        position = ratio * torch.arange(entries)
        rotated = self.rounding.bf16(rotate(shared.latent, position, frequency))
        shared.compressed = self.rounding.compressed_key(rotated)

    def make_index_keys(self, shared: Shared, frequency: Tensor) -> None:
        """Publish the index keys, projected from the latent before RoPE."""
        w = self.weights.below("indexer.")
        assert shared.latent is not None
        keys = self.norm(self.linear(shared.latent, w.plain("wk.weight")), w.plain("k_norm.weight"))
        position = self.layer.ratio * torch.arange(len(keys))
        keys = self.rounding.bf16(rotate(keys, position, frequency))
        shared.index_keys = self.rounding.index_operand(keys)

    def select(
        self, x: Tensor, latent: Tensor, position: Tensor, shared: Shared, frequency: Tensor
    ) -> None:
        """Publish, for every query, the entries it attends to (and the candidate blocks)."""
        c, w = self.config, self.weights.below("indexer.")
        assert shared.index_keys is not None
        query = self.linear(latent, w.fp8("wq_b")).view(len(x), c.index_n_heads, c.index_head_dim)
        query = self.rounding.bf16(rotate(query, position, frequency))
        query = self.rounding.index_operand(query)
        head_weight = self.linear(x, w.plain("weights_proj.weight"))

        visible = (position + 1) // self.layer.ratio
        entry = torch.arange(len(shared.index_keys))
        score = self.index_scores(query, shared.index_keys, head_weight)
        score = score.masked_fill(entry >= visible[:, None], -math.inf)
        if self.layer.is_candidate_source:
            shared.candidates = self.keep_blocks(score, visible)
        elif self.layer.candidate_source is not None:
            assert shared.candidates is not None
            score = score.masked_fill(~shared.candidates, -math.inf)
        shared.scores = score
        shared.selected = [best_entries(row, c.index_topk) for row in score]

    def index_scores(self, query: Tensor, keys: Tensor, head_weight: Tensor) -> Tensor:
        """Scores ``sum_h relu(q_h . k) * w_h``: ``[n, Hi, Di] x [m, Di] -> [n, m]``.

        Each dot product is rounded to bf16 after the ReLU. Head ``h`` adds to the bf16
        accumulator ``h mod 4`` in ascending order, and the four are joined as ``(0+2) + (1+3)``.
        """
        bf16 = self.rounding.bf16
        dot = bf16(self.ops.matmul(query, keys).relu())
        lanes = [torch.zeros(len(query), len(keys)) for _ in range(4)]
        for head in range(query.shape[1]):
            lane = head % 4
            lanes[lane] = bf16(lanes[lane] + dot[:, head] * head_weight[:, head, None])
        return bf16(bf16(lanes[0] + lanes[2]) + bf16(lanes[1] + lanes[3]))

    def keep_blocks(self, score: Tensor, visible: Tensor) -> Tensor:
        """The entries inside each query's best blocks: ``[n, m]`` scores to bool ``[n, m]``.

        A block scores as its best entry; the last visible block is always kept.
        """
        size, limit = self.config.candidate_block_size, self.config.candidate_topk_blocks
        kept = torch.zeros(score.shape, dtype=torch.bool)
        for row, (scores, count) in enumerate(zip(score, visible.tolist(), strict=True)):
            blocks = [scores[at : min(at + size, count)].amax() for at in range(0, count, size)]
            if not blocks:
                continue
            blocks[-1] = torch.tensor(math.inf)
            for block in best_entries(torch.stack(blocks), limit).tolist():
                kept[row, block * size : (block + 1) * size] = True
        return kept

    def attend(self, query: Tensor, window: Tensor, shared: Shared) -> Tensor:
        """Softmax attention with a sink: ``[n, H, Dh]`` queries, the keys are the values.

        A query sees the last ``W`` window keys including its own, then its selected compressed
        entries. The sink is one more logit per head, without a value and without the scale.
        """
        rows = []
        for p, q in enumerate(query):
            near = window[max(0, p - self.config.sliding_window + 1) : p + 1]
            far = window[:0]
            if self.layer.ratio > 0:
                assert shared.compressed is not None
                assert shared.selected is not None
                far = shared.compressed[shared.selected[p]]
            rows.append(self.attend_row(q, near, far))
        return torch.stack(rows)

    def attend_row(self, q: Tensor, near: Tensor, far: Tensor) -> Tensor:
        """One query ``[H, Dh]`` over its keys ``[l, Dh]`` of two kinds: values ``[H, Dh]``."""
        scale, ops, sink = self.config.softmax_scale, self.ops, self.weights.plain("attn_sink")
        near_logit = ops.matmul(q, near) * scale
        far_logit = ops.matmul(q, far) * scale
        top = torch.cat((near_logit, far_logit, sink[:, None]), 1).amax(1, keepdim=True)
        near_part, far_part = ops.exp(near_logit - top), ops.exp(far_logit - top)
        total = ops.sum(near_part) + ops.sum(far_part) + ops.exp(sink - top[:, 0])
        value = ops.weighted_sum(near_part, near) + ops.weighted_sum(far_part, far)
        return value / total[:, None]

    def project(self, out: Tensor) -> Tensor:
        """Output projection: groups of heads through ``wo_a``, all groups through ``wo_b``."""
        c, w = self.config, self.weights
        grouped = out.view(len(out), c.o_groups, -1)
        group_weight = w.fp8("wo_a").view(c.o_groups, c.o_lora_rank, -1)
        parts = [self.linear(grouped[:, g], group_weight[g]) for g in range(c.o_groups)]
        return self.linear(self.rounding.activation(torch.cat(parts, 1)), w.fp8("wo_b"))


def best_entries(scores: Tensor, limit: int) -> Tensor:
    """Ascending indices of the ``limit`` largest scores of a vector; -inf never counts.

    Among equal scores the lower index wins.
    """
    order = torch.argsort(scores, descending=True, stable=True)[:limit]
    return order[scores[order] > -math.inf].sort().values


def square_root(x: Tensor) -> Tensor:
    """fp32 square root through fp64, because torch's fp32 one is not always correctly rounded."""
    return x.double().sqrt().float()


def rms_norm(x: Tensor, weight: Tensor, eps: float, rounding: Rounding, ops: Primitives) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` along the last axis, one rounding at the end."""
    mean_square = ops.sum(x * x) / x.shape[-1]
    scale = square_root(mean_square + eps).reciprocal()
    return rounding.bf16(x * scale[..., None] * weight)

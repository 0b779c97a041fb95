"""What a decode step has to read, and what a prompt has to compute.

Bytes of one decode step over ``B`` sequences, each read once:

* *dense*: every weight of the text layers that each row meets, whatever the token: attention,
  shared experts, routers, hyper-connections, compressors, Engram projections, norms, head. The
  query side of an indexer is read only if some sequence has more entries than it may select;
* *experts*: the matrices of the routed experts that any of the ``B`` rows chose, per layer;
* *rows*: one embedding row per token, and the distinct Engram table rows;
* *caches*: per layer the window keys in sight, per selection the chosen compressed keys, and the
  index keys of all visible entries where they are scored.

Activations, cache writes and intermediate copies are left out: they are small, and whoever reads a
weight twice shall look slower for it, not busier. Packed weights count as stored, codes and scales;
expanded ones as they lie in memory.

Floating-point operations of a prompt are two per weight and token that it meets, plus those of
the attention and index scores over visible keys only, plus one row of the head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer_neuron.cache.records import CodecSet
from deepinfer_neuron.checkpoint.config import LayerSpec, ModelConfig
from deepinfer_neuron.checkpoint.names import ITEM_BYTES, TensorSpec, inventory
from deepinfer_neuron.model.footprint import measure_parts, text_parts

_EXPERT_ROLE = "expert"
_ROW_ROLES = frozenset({"embed", "engram_table"})
_UNREAD = ("image_start", "image_end", "image_newline", ".gate.bias_vl")
_INDEX_QUERY = (".indexer.wq_b.weight", ".indexer.wq_b.scale", ".indexer.weights_proj.weight")
_FACTORS = (".engram.q_weight", ".engram.k_weight")
"""Matrices in shape only: they scale values element by element."""


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one decode step reads."""

    dense: float
    experts: float
    rows: float
    caches: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.dense + self.experts + self.rows + self.caches


class Traffic:
    """Counts for one model with packed or expanded weights."""

    def __init__(self, config: ModelConfig, *, expanded: bool) -> None:
        self._config, self._expanded = config, expanded
        self._specs = [
            spec
            for spec in inventory(config)
            if text_parts(measure_parts([spec]), drafts=False) and not spec.name.endswith(_UNREAD)
        ]
        self.expert_bytes = self._held([spec for spec in self._specs if _is_first_expert(spec)])
        """Bytes of the three matrices of one routed expert."""

    def decode_bytes(self, lengths: Sequence[int], experts: float, engram_rows: float) -> StepBytes:
        """Bytes of a step that decodes one token for each of several sequences.

        Args:
            lengths: tokens of each sequence, the new one included.
            experts: distinct routed experts, summed over the layers.
            engram_rows: distinct Engram table rows, summed over the tables.
        """
        c = self._config
        table_row = 0 if c.engram is None else c.engram.head_dim + c.engram.head_dim // 32
        return StepBytes(
            dense=self.dense_bytes(lengths),
            experts=experts * self.expert_bytes,
            rows=len(lengths) * c.hidden_size * ITEM_BYTES["BF16"] + engram_rows * table_row,
            caches=sum(self._cache_bytes(length) for length in lengths),
        )

    def dense_bytes(self, lengths: Sequence[int]) -> int:
        """Bytes of the weights that every token meets, for sequences of these lengths."""
        unread = tuple(
            f"layers.{layer.index}.attn{suffix}"
            for layer in self._config.layers
            if layer.owns_index and not any(self._scores(layer, n) for n in lengths)
            for suffix in _INDEX_QUERY
        )
        met = [s for s in self._specs if s.role not in _ROW_ROLES and s.role != _EXPERT_ROLE]
        return self._held([spec for spec in met if spec.name not in unread])

    def prefill_flops(self, tokens: int) -> float:
        """Floating-point operations of a prompt of that many tokens."""
        c = self._config
        per_expert = sum(_elements(spec) for spec in self._specs if _is_first_expert(spec))
        total = 2.0 * tokens * len(c.layers) * c.num_experts_per_tok * per_expert
        total += 2.0 * c.vocab_size * c.hidden_size
        total += sum(self._matrix_flops(spec, tokens) for spec in self._specs)
        return total + sum(self._attention_flops(layer, tokens) for layer in c.layers)

    def _matrix_flops(self, spec: TensorSpec, tokens: int) -> float:
        """Operations of a matrix that every token, or every compressed entry, meets."""
        if spec.role in _ROW_ROLES or spec.role in (_EXPERT_ROLE, "head"):
            return 0.0
        rows = float(tokens)
        if spec.role == "indexer":
            layer = self._config.layers[int(spec.name.split(".")[1])]
            if spec.name.endswith(".wk.weight"):
                rows = float(tokens // layer.ratio)
            elif not self._scores(layer, tokens):
                rows = 0.0
        return 2.0 * rows * _elements(spec)

    def _attention_flops(self, layer: LayerSpec, tokens: int) -> float:
        """Operations of the scores, the weighted sums and the index scores of one layer."""
        c = self._config
        keys = sum(min(c.sliding_window, length) for length in range(1, tokens + 1))
        visible = [length // layer.ratio for length in range(1, tokens + 1)] if layer.ratio else []
        keys += sum(min(c.index_topk, count) for count in visible)
        total = 4.0 * c.num_attention_heads * c.head_dim * keys
        if layer.owns_index and self._scores(layer, tokens):
            total += 2.0 * c.index_n_heads * c.index_head_dim * sum(visible)
        return total

    def _cache_bytes(self, length: int) -> int:
        """Records that one new token of a sequence of ``length`` tokens looks at."""
        c = self._config
        codecs = CodecSet.of(c.head_dim, c.index_head_dim, True)
        window = len(c.layers) * (min(c.sliding_window, length) - 1)
        chosen = scored = 0
        for layer in c.layers:
            if not layer.owns_index:
                continue
            chosen += min(c.index_topk, length // layer.ratio)
            scored += length // layer.ratio if self._scores(layer, length) else 0
        return (
            window * codecs.window.width
            + chosen * codecs.compressed.width
            + scored * codecs.index.width
        )

    def _scores(self, layer: LayerSpec, length: int) -> bool:
        """Whether an indexer has more entries than it may select."""
        return length // layer.ratio > self._config.index_topk

    def _held(self, specs: Sequence[TensorSpec]) -> int:
        """Bytes of tensors in memory."""
        parts = measure_parts(specs)
        return sum(part.expanded if self._expanded else part.packed for part in parts)


def _is_first_expert(spec: TensorSpec) -> bool:
    """All routed experts have the same size, so one stands for all."""
    return spec.name.startswith("layers.0.ffn.experts.0.")


def _elements(spec: TensorSpec) -> int:
    """Weights of a matrix; 0 for scales, vectors and element-wise factors."""
    if len(spec.shape) != 2 or spec.dtype == "F8_E8M0" or spec.name.endswith(_FACTORS):
        return 0
    return math.prod(spec.shape) * (2 if spec.dtype == "I8" else 1)

"""The text network over one step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from tqdm import tqdm

from deepinfer_neuron.cache.pools import CacheShape, LayerCache, allocate_layer
from deepinfer_neuron.cache.records import CodecSet
from deepinfer_neuron.checkpoint.config import ModelConfig
from deepinfer_neuron.model.attention import Published, Turns
from deepinfer_neuron.model.blocks import Layer
from deepinfer_neuron.model.drafts import DraftBlocks
from deepinfer_neuron.model.matrix import WeightSource
from deepinfer_neuron.model.step import DraftStep, StepTensors
from deepinfer_neuron.ops.gather import gather_rows
from deepinfer_neuron.ops.hyper import collapse, stream_mean
from deepinfer_neuron.ops.norm import rms_norm
from deepinfer_neuron.ops.rope import Yarn, rope_table


def rotary_tables(config: ModelConfig, length: int) -> tuple[Tensor, Tensor]:
    """Rotary tables fp32 ``[length, R]`` of the window-only and of the compressed layers."""
    width, scaling = config.qk_rope_head_dim, config.rope_scaling
    yarn = None
    if scaling is not None:
        yarn = Yarn(
            scaling.factor, scaling.beta_fast, scaling.beta_slow,
            scaling.original_max_position_embeddings,
        )  # fmt: skip
    base = rope_table(length, width, config.rope_theta, None)
    return base, rope_table(length, width, config.compress_rope_theta, yarn)


class TextNetwork(nn.Module):
    """Embedding, layers, final norm and head.

    Args:
        config: model configuration.
        source: weights.
        max_length: exclusive upper bound of every position.
        progress: show a bar while loading.
        drafts: load the draft blocks too.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        max_length: int,
        progress: bool = False,
        drafts: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.arithmetic = config, source.arithmetic
        self.embed = nn.Buffer(source.plain("embed.weight"), persistent=False)
        self.layers = nn.ModuleList(
            Layer(config, spec, source)
            for spec in tqdm(config.layers, "loading", unit="layer", disable=not progress)
        )
        self.norm = nn.Buffer(source.plain("norm.weight"), persistent=False)
        self.head = source.wide("head")
        self.drafts: DraftBlocks | None = None
        if drafts and config.draft is not None:
            self.drafts = DraftBlocks(config, config.draft, source)
        base, compressed = rotary_tables(config, max_length)
        self.base_table = nn.Buffer(base, persistent=False)
        self.compressed_table = nn.Buffer(compressed, persistent=False)

    def allocate_caches(self, shape: CacheShape) -> list[LayerCache]:
        """Zeroed caches of every layer, those of the draft blocks last."""
        c = self.config
        codecs = CodecSet.of(c.head_dim, c.index_head_dim, self.arithmetic.rounding)
        backbone = [
            allocate_layer(
                shape, codecs, spec.ratio, owns_compressed=spec.owns_kv,
                owns_index=spec.owns_index_k,
            )
            for spec in c.layers
        ]  # fmt: skip
        blocks = len(self.drafts.blocks) if self.drafts is not None else 0
        window_only = [
            allocate_layer(shape, codecs, 0, owns_compressed=False, owns_index=False)
            for _ in range(blocks)
        ]
        return backbone + window_only

    def start(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Trunk ``[n, M, D]`` of the embeddings, and the first mix: stream 0 alone ``[n, M]``."""
        embedded = gather_rows(self.embed, token_ids).to(self.arithmetic.dtype)
        trunk = embedded[:, None, :].repeat(1, self.config.hc_mult, 1)
        pre = torch.zeros(len(token_ids), self.config.hc_mult)
        pre[:, 0] = 1.0
        return trunk, pre

    def turns(self, step: StepTensors) -> Turns:
        """Rotary rows of a step."""
        return Turns(
            window=self.base_table[step.positions],
            compressed=self.compressed_table[step.positions],
            entries={r: self.compressed_table[p.positions] for r, p in step.entries.items()},
        )

    def finish(self, trunk: Tensor, pre: Tensor) -> Tensor:
        """Final hidden states ``[n, D]`` of the last trunk ``[n, M, D]`` and mix ``[n, M]``."""
        collapsed = collapse(trunk, pre, self.arithmetic)
        return rms_norm(collapsed, self.norm, self.config.rms_norm_eps, self.arithmetic)

    def forward(self, step: StepTensors, caches: Sequence[LayerCache]) -> Tensor:
        """Run a step: fp32 logits ``[o, V]`` of ``step.output_rows``. See :meth:`hidden`."""
        return self.head(self.hidden(step, caches))

    def hidden(self, step: StepTensors, caches: Sequence[LayerCache]) -> Tensor:
        """Run a step.

        Args:
            step: its rows.
            caches: of every layer; written.

        Returns:
            final hidden states ``[o, D]`` of ``step.output_rows``.
        """
        trunk, pre = self.start(step.token_ids)
        turns, published = self.turns(step), Published()
        backbone = caches[: len(self.layers)]
        features: list[Tensor] = []
        for layer, cache in zip(self.layers, backbone, strict=True):
            assert isinstance(layer, Layer)
            trunk = layer.remember(trunk, step)
            if self.drafts is not None and layer.spec.index in self.drafts.targets:
                features.append(stream_mean(trunk, self.arithmetic))
            trunk, pre = layer(trunk, pre, step, turns, cache, published)
        if self.drafts is not None:
            joined = torch.cat(features, dim=1)
            self.drafts.remember(joined, turns.window, step.window, caches[len(self.layers) :])
        return self.finish(trunk[step.output_rows], pre[step.output_rows])

    def draft_hidden(self, step: DraftStep, caches: Sequence[LayerCache]) -> Tensor:
        """Run the draft blocks over one block of drafts per sequence.

        Args:
            step: rows of the blocks.
            caches: of every layer; only the draft blocks' own are read, none is written.

        Returns:
            hidden states before the post norm ``[n, D]``.
        """
        assert self.drafts is not None
        trunk, pre = self.start(step.token_ids)
        turns = self.base_table[step.positions]
        drafted: Tensor = self.drafts(trunk, pre, step, turns, caches[len(self.layers) :])
        return drafted

"""Hyper-connection sites, mixture of experts, Engram, and a whole layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from deepinfer_neuron.cache.pools import LayerCache
from deepinfer_neuron.checkpoint.config import LayerSpec, ModelConfig
from deepinfer_neuron.checkpoint.formats import dequantize_fp8_rows
from deepinfer_neuron.checkpoint.reader import Checkpoint
from deepinfer_neuron.model.attention import Attention, Published, Turns
from deepinfer_neuron.model.matrix import ExpertBank, WeightSource
from deepinfer_neuron.model.step import StepTensors
from deepinfer_neuron.ops.engram import engram_update
from deepinfer_neuron.ops.hyper import Mix, collapse, expand, mix_coefficients
from deepinfer_neuron.ops.moe import combine, route, swiglu
from deepinfer_neuron.ops.norm import rms_norm
from deepinfer_neuron.ops.quant import q8


class Site(nn.Module):
    """One hyper-connection site: collapse, norm, block, expand."""

    def __init__(self, config: ModelConfig, block: str, name: str, source: WeightSource) -> None:
        super().__init__()
        prefix = f"{block}."
        self.config, self.arithmetic = config, source.arithmetic
        self.fn = nn.Buffer(source.plain(f"{prefix}hc_{name}_fn"), persistent=False)
        self.base = nn.Buffer(source.plain(f"{prefix}hc_{name}_base"), persistent=False)
        self.scale = nn.Buffer(source.plain(f"{prefix}hc_{name}_scale"), persistent=False)
        self.norm = nn.Buffer(source.plain(f"{prefix}{name}_norm.weight"), persistent=False)

    def forward(
        self, trunk: Tensor, pre: Tensor, block: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Run a block between this site's mixes.

        Args:
            trunk: ``[n, M, D]``.
            pre: fp32 ``[n, M]``, the mix of the previous site.
            block: normed ``[n, D]`` to output ``[n, D]``.

        Returns:
            the new trunk and this site's ``pre``, for the next site.
        """
        mix = self.mix(trunk)
        x = collapse(trunk, pre, self.arithmetic)
        out = block(rms_norm(x, self.norm, self.config.rms_norm_eps, self.arithmetic))
        return expand(out, trunk, mix, self.arithmetic), mix.pre

    def mix(self, trunk: Tensor) -> Mix:
        """This site's coefficients."""
        c = self.config
        return mix_coefficients(
            trunk, self.fn, self.base, self.scale,
            norm_eps=c.rms_norm_eps, eps=c.hc_eps, iterations=c.hc_sinkhorn_iters,
            arithmetic=self.arithmetic,
        )  # fmt: skip


class MixtureOfExperts(nn.Module):
    """Routed experts and the shared one.

    Args:
        config: the model.
        block: prefix of the block, such as ``layers.3``.
        experts: routed experts of the block.
        chosen: how many of them a token takes.
        source: weights.
    """

    def __init__(
        self, config: ModelConfig, block: str, experts: int, chosen: int, source: WeightSource
    ) -> None:
        super().__init__()
        name = f"{block}.ffn"
        self.config, self.arithmetic, self.chosen = config, source.arithmetic, chosen
        self.gate = source.wide(f"{name}.gate")
        self.bias = nn.Buffer(source.plain(f"{name}.gate.bias"), persistent=False)
        self.shared = nn.ModuleDict(
            {part: source.fp8(f"{name}.shared_experts.{part}") for part in ("w1", "w3", "w2")}
        )
        self.experts = ExpertBank(f"{name}.experts", experts, source)

    def forward(self, y: Tensor) -> Tensor:
        """``[n, D]`` normed hidden states to ``[n, D]``."""
        c, arithmetic = self.config, self.arithmetic
        chosen, share = route(
            y, self.gate.weight, self.bias, self.chosen, c.routed_scaling_factor,
            arithmetic,
        )  # fmt: skip
        x = q8(y, arithmetic)
        shared = self.shared
        one = torch.ones(1, 1)
        hidden = swiglu(shared["w1"](x), shared["w3"](x), one, c.swiglu_limit, arithmetic)
        return combine(shared["w2"](hidden), self._routed(x, chosen, share), arithmetic)

    def _routed(self, x: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
        """Outputs of every slot ``[n, k, D]``, one expert at a time over its rows."""
        slots = chosen.shape[1]
        order = torch.argsort(chosen.flatten(), stable=True)
        used, counts = chosen.unique(return_counts=True)
        out = torch.empty(chosen.numel(), x.shape[1], dtype=x.dtype)
        flat_share = share.flatten()
        for expert, places in zip(used.tolist(), order.split(counts.tolist()), strict=True):
            gate, up, down = self.experts.matrices(expert)
            rows = x[places // slots]
            hidden = swiglu(
                gate.apply(rows, self.arithmetic),
                up.apply(rows, self.arithmetic),
                flat_share[places, None],
                self.config.swiglu_limit,
                self.arithmetic,
            )
            out[places] = down.apply(hidden, self.arithmetic)
        return out.view(*chosen.shape, -1)


class Engram(nn.Module):
    """Memory lookup and gate of an Engram layer; table rows are fetched from the files."""

    def __init__(self, config: ModelConfig, layer: int, source: WeightSource) -> None:
        super().__init__()
        self.name = f"layers.{layer}.engram"
        self.config, self.arithmetic = config, source.arithmetic
        self.checkpoint: Checkpoint = source.checkpoint
        self.wkv = source.fp8(f"{self.name}.wkv")
        weight = source.fp32(f"{self.name}.q_weight") * source.fp32(f"{self.name}.k_weight")
        self.weight = nn.Buffer(weight, persistent=False)

    def forward(self, trunk: Tensor, rows: Tensor) -> Tensor:
        """Update ``[n, M, D]`` with the memory of int64 ``[n, columns]`` table rows.

        Rows of -1 (image positions) leave the trunk as it is.
        """
        c = self.config
        kv = self.wkv(self._fetch(rows)).view(len(rows), c.hc_mult + 1, c.hidden_size)
        updated = engram_update(trunk, kv, self.weight, c.rms_norm_eps, self.arithmetic)
        return torch.where((rows[:, :1] < 0)[..., None], trunk, updated)

    def _fetch(self, rows: Tensor) -> Tensor:
        """Table rows as stored, decoded: ``[n, columns]`` to ``[n, columns * d]``."""
        wanted = rows.clamp(min=0).flatten()
        codes = self.checkpoint.rows(f"{self.name}.embed.weight", wanted)
        scale = self.checkpoint.rows(f"{self.name}.embed.scale", wanted)
        values = dequantize_fp8_rows(codes, scale).view(*rows.shape, -1)
        return values.masked_fill((rows < 0)[..., None], 0).flatten(1).to(self.arithmetic.dtype)


class Layer(nn.Module):
    """Engram update (where the layer has one), attention site, feed-forward site."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, source: WeightSource) -> None:
        super().__init__()
        block = f"layers.{spec.index}"
        self.spec = spec
        self.engram = Engram(config, spec.index, source) if spec.engram is not None else None
        self.attention_site = Site(config, block, "attn", source)
        self.attention = Attention(config, spec, source)
        self.ffn_site = Site(config, block, "ffn", source)
        self.moe = MixtureOfExperts(
            config, block, config.n_routed_experts, config.num_experts_per_tok, source
        )

    def remember(self, trunk: Tensor, step: StepTensors) -> Tensor:
        """The trunk ``[n, M, D]`` after this layer's Engram update, where it has one."""
        if self.engram is None or self.spec.engram is None:
            return trunk
        updated: Tensor = self.engram(trunk, step.engram_rows[self.spec.engram])
        return updated

    def forward(
        self,
        trunk: Tensor,
        pre: Tensor,
        step: StepTensors,
        turns: Turns,
        cache: LayerCache,
        published: Published,
    ) -> tuple[Tensor, Tensor]:
        """Remembered trunk ``[n, M, D]`` and carried mix ``[n, M]`` to those of the next layer."""
        trunk, pre = self.attention_site(
            trunk, pre, lambda y: self.attention(y, step, turns, cache, published)
        )
        trunk, pre = self.ffn_site(trunk, pre, self.moe)
        return trunk, pre

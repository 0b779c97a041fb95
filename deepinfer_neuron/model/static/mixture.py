"""Mixture of experts and Engram of one layer as regions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepinfer_neuron.checkpoint.config import ModelConfig
from deepinfer_neuron.checkpoint.formats import dequantize_fp8_rows
from deepinfer_neuron.model.blocks import Site
from deepinfer_neuron.model.matrix import ExpertMatrix, WeightSource
from deepinfer_neuron.model.static.caches import WORD
from deepinfer_neuron.ops import graph_formats
from deepinfer_neuron.ops.engram import engram_update
from deepinfer_neuron.ops.graph_math import byte_words, gather_bytes
from deepinfer_neuron.ops.moe import combine, route, swiglu
from deepinfer_neuron.ops.quant import q8
from deepinfer_neuron.platform.regions import RegionModule, Regions, region

_PARTS = ("w1", "w3", "w2")


class ExpertStack(nn.Module):
    """The routed experts that this process holds, in two tensors per kind of matrix: the packed
    ones with their scales, and those that were expanded.

    Args:
        name: their common prefix, such as ``layers.3.ffn.experts``.
        experts: which of the checkpoint's experts.
        source: weights.
    """

    def __init__(self, name: str, experts: range, source: WeightSource) -> None:
        super().__init__()
        self.arithmetic, self.count = source.arithmetic, len(experts)
        self._places: dict[str, tuple[tuple[bool, int], ...]] = {}
        for part in _PARTS:
            matrices = [source.expert(f"{name}.{expert}.{part}") for expert in experts]
            packed = [matrix for matrix in matrices if matrix.scale is not None]
            wide = [matrix.weight for matrix in matrices if matrix.scale is None]
            self._places[part] = _places([matrix.scale is None for matrix in matrices])
            self._keep(part, [matrix.weight for matrix in packed])
            self._keep(f"{part}_scale", [m.scale for m in packed if m.scale is not None])
            self._keep(f"{part}_wide", wide)

    def matrix(self, part: str, expert: int) -> ExpertMatrix:
        """One matrix of the ``expert``-th expert held here."""
        is_wide, place = self._places[part][expert]
        if is_wide:
            return ExpertMatrix(getattr(self, f"{part}_wide")[place], None)
        return ExpertMatrix(getattr(self, part)[place], getattr(self, f"{part}_scale")[place])

    def _keep(self, name: str, matrices: list[Tensor]) -> None:
        stacked = torch.stack(matrices) if matrices else None
        self.register_buffer(name, stacked, persistent=False)

    def forward(self, x: Tensor, expert: int, share: Tensor, limit: float) -> Tensor:
        """Output ``[n, D]`` of an expert for all rows ``[n, D]`` with shares ``[n, 1]``."""
        gate = self.matrix("w1", expert).apply(x, self.arithmetic)
        up = self.matrix("w3", expert).apply(x, self.arithmetic)
        hidden = swiglu(gate, up, share, limit, self.arithmetic)
        return self.matrix("w2", expert).apply(hidden, self.arithmetic)


def _places(wide: list[bool]) -> tuple[tuple[bool, int], ...]:
    """Per expert, in which of the two tensors it is, and at which place."""
    counts = {True: 0, False: 0}
    places = []
    for is_wide in wide:
        places.append((is_wide, counts[is_wide]))
        counts[is_wide] += 1
    return tuple(places)


class StaticMixture(nn.Module):
    """Hyper-connection site and mixture of experts: every expert held here runs on all rows.

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
        self.site = Site(config, block, "ffn", source)
        self.gate = source.wide(f"{name}.gate")
        self.bias = nn.Buffer(source.plain(f"{name}.gate.bias"), persistent=False)
        self.shared = nn.ModuleDict(
            {part: source.fp8(f"{name}.shared_experts.{part}") for part in _PARTS}
        )
        held = source.held(experts)
        self.experts = ExpertStack(f"{name}.experts", held, source)
        # Which expert comes first differs between ranks, so the graph reads it from a buffer.
        first = torch.full((1,), held.start, dtype=torch.int32)
        self.first_expert = nn.Buffer(first, persistent=False)

    def forward(self, trunk: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
        """Trunk ``[n, M, D]`` and carried mix ``[n, M]`` to those of the next layer."""
        mixed: tuple[Tensor, Tensor] = self.site(trunk, pre, self._mixture)
        return mixed

    def _mixture(self, y: Tensor) -> Tensor:
        c, arithmetic = self.config, self.arithmetic
        chosen, share = route(
            y, self.gate.weight, self.bias, self.chosen, c.routed_scaling_factor, arithmetic
        )
        x = q8(y, arithmetic)
        one = torch.ones(1, 1, device=x.device)
        gate, up = self.shared["w1"](x), self.shared["w3"](x)
        shared = self.shared["w2"](swiglu(gate, up, one, c.swiglu_limit, arithmetic))
        routed = torch.zeros(*chosen.shape, x.shape[1], dtype=x.dtype, device=x.device)
        for expert in range(self.experts.count):
            taken = chosen == self.first_expert + expert
            own = torch.where(taken, share, 0.0).sum(dim=1, keepdim=True)
            out = self.experts(x, expert, own, c.swiglu_limit)
            routed = torch.where(taken[..., None], out[:, None, :], routed)
        return combine(shared, routed, arithmetic)


class LayerMixture(RegionModule):
    """Feed-forward half of a backbone layer."""

    def __init__(
        self, config: ModelConfig, index: int, source: WeightSource, regions: Regions
    ) -> None:
        super().__init__(regions)
        self.mixture = StaticMixture(
            config, f"layers.{index}", config.n_routed_experts, config.num_experts_per_tok, source
        )

    @region
    def mix(self, trunk: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`StaticMixture`."""
        mixed: tuple[Tensor, Tensor] = self.mixture(trunk, pre)
        return mixed


class StaticEngram(RegionModule):
    """Memory lookup and gate of an Engram layer; this process's table rows are on the device.

    Args:
        config: the model.
        index: of the layer.
        source: weights.
        regions: where regions run.
    """

    def __init__(
        self, config: ModelConfig, index: int, source: WeightSource, regions: Regions
    ) -> None:
        super().__init__(regions)
        name = f"layers.{index}.engram"
        self.config, self.arithmetic = config, source.arithmetic
        self.wkv = source.fp8(f"{name}.wkv")
        weight = source.fp32(f"{name}.q_weight") * source.fp32(f"{name}.k_weight")
        self.weight = nn.Buffer(weight, persistent=False)
        codes, scale = source.plain(f"{name}.embed.weight"), source.plain(f"{name}.embed.scale")
        self.width, self.groups = codes.shape[1], scale.shape[1]
        # The layers' tables differ by a few rows; one length lets them share a graph.
        assert config.engram is not None
        count = max(config.engram.num_embeddings)
        self.codes = nn.Buffer(table_words(codes, count), persistent=False)
        self.scale = nn.Buffer(table_words(scale, count), persistent=False)

    @region
    def remember(self, trunk: Tensor, rows: Tensor) -> Tensor:
        """Update ``[n, M, D]`` with the memory of int32 ``[n, columns]`` table rows.

        Rows of -1 (image positions) leave the trunk as it is.
        """
        c = self.config
        kv = self.wkv(self._fetch(rows)).view(rows.shape[0], c.hc_mult + 1, c.hidden_size)
        updated = engram_update(trunk, kv, self.weight, c.rms_norm_eps, self.arithmetic)
        return torch.where((rows[:, :1] < 0)[..., None], trunk, updated)

    def _fetch(self, rows: Tensor) -> Tensor:
        """Decoded table rows: ``[n, columns]`` to ``[n, columns * d]``."""
        codes = gather_bytes(self.codes, rows)[..., : self.width].contiguous()
        scale = gather_bytes(self.scale, rows)[..., : self.groups].contiguous()
        graph = self.arithmetic.graph
        decode = graph_formats.dequantize_fp8_rows if graph else dequantize_fp8_rows
        values = decode(codes, scale).masked_fill((rows < 0)[..., None], 0)
        return values.flatten(1).to(self.arithmetic.dtype)


def table_words(table: Tensor, count: int) -> Tensor:
    """A table of bytes ``[rows, width]`` as int32 words ``[count, words]``, zeros behind; on the
    host, at load."""
    octets = table.view(torch.uint8)
    missing, short = -table.shape[1] % WORD, count - table.shape[0]
    padded = F.pad(octets, (0, missing, 0, short)) if missing or short else octets
    return byte_words(padded.contiguous())

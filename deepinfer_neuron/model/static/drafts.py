"""Draft blocks as regions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepinfer_neuron.checkpoint.config import ModelConfig
from deepinfer_neuron.checkpoint.config_types import DraftConfig
from deepinfer_neuron.model.attention import Projections
from deepinfer_neuron.model.blocks import Site
from deepinfer_neuron.model.drafts import DraftHeads
from deepinfer_neuron.model.matrix import WeightSource, WideLinear
from deepinfer_neuron.model.static.caches import WindowCache, WordCodecs
from deepinfer_neuron.model.static.heads import token_at
from deepinfer_neuron.model.static.mixture import StaticMixture
from deepinfer_neuron.model.static.preparation import Preparation, table_rows
from deepinfer_neuron.model.static.step import DraftRows
from deepinfer_neuron.ops.attention import sink_attention
from deepinfer_neuron.ops.hyper import collapse, stream_mean
from deepinfer_neuron.ops.norm import rms_norm
from deepinfer_neuron.ops.quant import q8
from deepinfer_neuron.platform.regions import RegionModule, Regions, region


def draft_rows(nextn: int) -> int:
    """Rows of a block of ``nextn`` drafts: the next power of two."""
    return 1 << (nextn - 1).bit_length()


class StaticDraftLayer(RegionModule):
    """One draft layer: attention over the kept window and the whole block, then experts.

    Args:
        config: the model.
        draft: of the model.
        index: of the layer.
        source: weights.
        regions: where regions run.
    """

    rows_pow2 = True

    def __init__(
        self,
        config: ModelConfig,
        draft: DraftConfig,
        index: int,
        source: WeightSource,
        regions: Regions,
    ) -> None:
        super().__init__(regions)
        block = f"mtp.{index}"
        self.config, self.arithmetic = config, source.arithmetic
        self.codec = WordCodecs.of(config, source.arithmetic).window
        self.site = Site(config, block, "attn", source)
        self.own = Projections(config, block, source)
        self.mixture = StaticMixture(
            config, block, draft.n_routed_experts, draft.num_experts_per_tok, source
        )

    @region
    def draft(
        self, trunk: Tensor, pre: Tensor, rows: DraftRows, ring: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Trunk ``[n, M, D]`` and carried mix ``[n, M]`` to those of the next layer.

        Args:
            trunk: of the blocks' rows.
            pre: their mix.
            rows: keys that they see.
            ring: int32 ``[slots * ring, words]`` window keys of this layer; only read.
        """

        def attention(y: Tensor) -> Tensor:
            a = q8(y, self.arithmetic)
            query = self.own.query(self.own.latent(a), rows.turns)
            words = self.codec.pack(self.own.window_keys(a, rows.turns))
            keys = self.codec.unpack(torch.cat((F.embedding(rows.history, ring), words)))
            out = sink_attention(
                query, keys, rows.keys, keys[:0], rows.keys[:, :0],
                self.own.sink, self.config.softmax_scale, self.arithmetic,
            )  # fmt: skip
            return self.own.project(out, rows.turns)

        trunk, pre = self.site(trunk, pre, attention)
        mixed: tuple[Tensor, Tensor] = self.mixture(trunk, pre)
        return mixed


class StaticDrafts(RegionModule):
    """Everything of the draft blocks around their layers.

    Args:
        config: the model.
        draft: of the model.
        layers: the draft layers, which keep the window keys.
        nextn: drafts per sequence.
        preparation: of the backbone, for its rotary table.
        head: of the backbone.
        temperatures: fp32 ``[nextn]`` divisors of the confidence logits.
        source: weights.
        regions: where regions run.
    """

    def __init__(
        self,
        config: ModelConfig,
        draft: DraftConfig,
        layers: nn.ModuleList,
        nextn: int,
        preparation: Preparation,
        head: WideLinear,
        temperatures: Tensor,
        source: WeightSource,
        regions: Regions,
    ) -> None:
        super().__init__(regions)
        self.config, self.arithmetic = config, source.arithmetic
        self.nextn, self.noise = nextn, draft.noise_token_id
        self.codec = WordCodecs.of(config, source.arithmetic).window
        self.main_proj = source.fp8("mtp.0.main_proj")
        self.main_norm = nn.Buffer(source.plain("mtp.0.main_norm.weight"), persistent=False)
        self.layers = layers
        self.heads = DraftHeads(config, draft, source)
        self.preparation, self.head = preparation, head
        self.temperatures = nn.Buffer(temperatures, persistent=False)

    @region
    def remember(
        self,
        trunks: tuple[Tensor, ...],
        turns: Tensor,
        places: Tensor,
        page_places: Tensor,
        caches: tuple[WindowCache, ...],
    ) -> None:
        """Keep the window keys of a pass in every draft layer.

        Args:
            trunks: ``[n, M, D]`` entering the target layers.
            turns: fp32 ``[n, R]`` rotary rows.
            places: int32 ``[n]`` ring places.
            page_places: int32 ``[n]`` page places.
            caches: of the draft layers; written.
        """
        means = [stream_mean(trunk, self.arithmetic) for trunk in trunks]
        x = self.main_proj(q8(torch.cat(means, dim=1), self.arithmetic))
        y = rms_norm(x, self.main_norm, self.config.rms_norm_eps, self.arithmetic)
        main = q8(y, self.arithmetic)
        for layer, cache in zip(self.layers, caches, strict=True):
            assert isinstance(layer, StaticDraftLayer)
            words = self.codec.pack(layer.own.window_keys(main, turns))
            cache.ring.index_put_((places,), words)
            cache.pages.index_put_((page_places,), words)

    @region
    def begin(
        self, tokens: Tensor, accepted: Tensor, next_position: Tensor, history: Tensor
    ) -> DraftRows:
        """Rows of the next blocks, ``K'`` (``nextn`` made a power of two) per sequence.

        Args:
            tokens: int32 ``[S, O]`` tokens of the pass.
            accepted: int32 ``[S]``: the newest token of a sequence is ``tokens[s, accepted[s]]``.
            next_position: int32 ``[S]`` position behind the first output row.
            history: int32 ``[S, W + K]`` ring places from ``W`` positions before that on.
        """
        golden = token_at(tokens, accepted).clamp(min=0)
        anchor = next_position + accepted
        place = torch.arange(self.rows, dtype=torch.int32, device=golden.device)
        ids = torch.where(place == 0, golden[:, None], self.noise).to(torch.int32)
        table = self.preparation.base_table
        positions = (anchor[:, None] + place).clamp(max=table.shape[0] - 1)
        keys, read = self._keys(anchor, accepted, history)
        turns = table_rows(table, positions.flatten())
        return DraftRows(turns, keys, read, golden, ids.flatten())

    @property
    def rows(self) -> int:
        """Rows of a block, padding included."""
        return draft_rows(self.nextn)

    def _keys(self, anchor: Tensor, accepted: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
        """Keys of every row ``[S * K', W + K']`` and ring places read ``[S * W]``.

        A sequence's keys are its last ``W`` positions, as far as they exist, then its block.
        """
        window, sequences = self.config.sliding_window, anchor.shape[0]
        column = torch.arange(window + self.rows, dtype=torch.int32, device=anchor.device)
        sequence = torch.arange(sequences, dtype=torch.int32, device=anchor.device)[:, None]
        kept = anchor.clamp(max=window)[:, None]
        before = sequence * window + (window - kept) + column
        within = sequences * window + sequence * self.rows + (column - kept)
        index = torch.where(column < kept, before, within)
        index = torch.where(column < kept + self.nextn, index, -1)
        places = sequence * history.shape[1] + accepted[:, None] + column[:window]
        read = F.embedding(places.flatten(), history.view(-1, 1))[:, 0]
        return index.repeat_interleave(self.rows, dim=0), read

    @region
    def propose(
        self,
        trunk: Tensor,
        pre: Tensor,
        golden: Tensor,
        tokens: Tensor,
        accepted: Tensor,
    ) -> Tensor:
        """The whole chain of most probable drafts, joined with the pass's tokens for download.

        Args:
            trunk: ``[S * K', M, D]`` behind the last layer.
            pre: its mix.
            golden: int32 ``[S]`` newest tokens.
            tokens: int32 ``[S, O]`` of the pass.
            accepted: int32 ``[S]``.

        Returns:
            int32 ``[S, O + 1 + 2 K]``: tokens, accepted drafts, next drafts, and the bits of their
            fp32 confidences.
        """
        hidden = collapse(trunk, pre, self.arithmetic)
        blocks = hidden.view(golden.shape[0], self.rows, -1)[:, : self.nextn]
        drafts, trust = self.heads.greedy(
            blocks.flatten(0, 1), golden, self.temperatures, self.head
        )
        bits = trust.contiguous().view(torch.int32)
        return torch.cat((tokens, accepted[:, None], drafts.to(torch.int32), bits), dim=1)

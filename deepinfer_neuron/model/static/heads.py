"""Last regions of the backbone: head, verification of drafts, logits for the host."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepinfer_neuron.checkpoint.config import ModelConfig
from deepinfer_neuron.model.matrix import WeightSource
from deepinfer_neuron.model.static.step import OutputRows
from deepinfer_neuron.ops.graph_select import argmax
from deepinfer_neuron.ops.hyper import collapse
from deepinfer_neuron.ops.norm import rms_norm
from deepinfer_neuron.platform.regions import RegionModule, Regions, region

INVALID = -1
"""Token of a row whose logits are NaN or infinite."""


class StaticHead(RegionModule):
    """Final norm and head.

    Args:
        config: the model.
        source: weights.
        regions: where regions run.
    """

    def __init__(self, config: ModelConfig, source: WeightSource, regions: Regions) -> None:
        super().__init__(regions)
        self.eps, self.arithmetic = config.rms_norm_eps, source.arithmetic
        self.norm = nn.Buffer(source.plain("norm.weight"), persistent=False)
        self.head = source.wide("head")

    @region
    def logits(self, trunk: Tensor, pre: Tensor, rows: Tensor) -> Tensor:
        """fp32 logits ``[o, V]`` of int32 rows ``[o]``, for a choice made on the host."""
        return self._logits(trunk, pre, rows)

    @region
    def verify(self, trunk: Tensor, pre: Tensor, outputs: OutputRows) -> tuple[Tensor, Tensor]:
        """Most probable tokens, and how many drafts they confirm.

        Args:
            trunk: ``[n, M, D]``.
            pre: fp32 ``[n, M]``.
            outputs: rows and drafts, ``O`` rows per sequence.

        Returns:
            int32 ``[S, O]`` tokens, :data:`INVALID` where logits are not finite, and int32 ``[S]``
            accepted drafts: the longest run of drafts that are the most probable tokens.
        """
        logits = self._logits(trunk, pre, outputs.rows)
        finite = torch.isfinite(logits.amax(dim=1))
        # A row that is not finite has no largest logit to look for.
        safe = torch.where(finite[:, None], logits, 0.0)
        best = torch.where(finite, argmax(safe), INVALID)
        tokens = best.view(outputs.proposals.shape[0], -1)
        return tokens, accepted_drafts(tokens, outputs)

    @region
    def chosen(self, joined: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens int32 ``[S, O]`` and accepted drafts ``[S]`` that the host chose, uploaded as
        int32 ``[S, O + 1]``."""
        # With one sequence the slices pass for contiguous but keep the strides of the block.
        plain = torch.contiguous_format
        return joined[:, :-1].clone(memory_format=plain), joined[:, -1].clone(memory_format=plain)

    @region
    def joined(self, tokens: Tensor, accepted: Tensor) -> Tensor:
        """The opposite of :meth:`chosen`, for a download without drafts."""
        return torch.cat((tokens, accepted[:, None]), dim=1)

    def _logits(self, trunk: Tensor, pre: Tensor, rows: Tensor) -> Tensor:
        wide = F.embedding(rows, trunk.flatten(1)).view(-1, *trunk.shape[1:])
        hidden = collapse(wide, F.embedding(rows, pre), self.arithmetic)
        logits: Tensor = self.head(rms_norm(hidden, self.norm, self.eps, self.arithmetic))
        return logits


def accepted_drafts(tokens: Tensor, outputs: OutputRows) -> Tensor:
    """Leading drafts that equal the tokens at their places: int32 ``[S]``.

    Args:
        tokens: int32 ``[S, O]``.
        outputs: the drafts.
    """
    going_on = torch.ones_like(outputs.proposals)
    accepted = torch.zeros_like(outputs.proposals)
    if outputs.proposed is None:
        return accepted
    for place in range(outputs.proposed.shape[1]):
        same = tokens[:, place] == outputs.proposed[:, place]
        going_on = going_on * (same & (outputs.proposals > place)).to(torch.int32)
        accepted = accepted + going_on
    return accepted


def token_at(tokens: Tensor, place: Tensor) -> Tensor:
    """``tokens[s, place[s]]`` for int32 ``[S, O]`` and ``[S]``, by comparison."""
    column = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
    chosen = torch.where(column == place[:, None], tokens.to(torch.float32), 0.0)
    # Token ids are exact in fp32; integer sums are not what a device adds well.
    return chosen.sum(dim=1).to(torch.int32)

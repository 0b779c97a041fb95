"""Scores of experts, their replicas, and random choices for timing runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_neuron.errors import ConfigError

_REPLICA_STEP = 23333
"""Spreads neighbouring tokens over the replicas of an expert."""


@dataclass(frozen=True)
class Replicas:
    """Where the copies of each logical expert live.

    Attributes:
        physical: int32 ``[E, R]``, physical experts of a logical one.
        count: int32 ``[E]``, how many of a row's entries are in use.
        rank: of this process; the first token starts with this replica.
    """

    physical: Tensor
    count: Tensor
    rank: int = 0

    def place(self, chosen: Tensor) -> Tensor:
        """Physical experts of int64 logical ones ``[n, k]``; rows are tokens in order."""
        token = torch.arange(chosen.shape[0], dtype=torch.int32, device=chosen.device)
        # int32 that wraps, and a remainder with the sign of the dividend.
        turn = (self.rank + token * _REPLICA_STEP).to(torch.int32)[:, None]
        count = self.count[chosen]
        replica = torch.fmod(turn.expand_as(chosen), count)
        # A wrapped number gives a negative remainder, which is no replica: take the congruent one.
        replica = torch.where(replica < 0, replica + count, replica)
        return self.physical[chosen, replica.to(torch.int64)].to(torch.int64)

    def experts(self) -> int:
        """How many physical experts are in use."""
        column = torch.arange(self.physical.shape[1], device=self.physical.device)
        used = self.physical.masked_fill(column >= self.count[:, None], -1)
        return int(used.max()) + 1


def gate_scores(logits: Tensor) -> Tensor:
    """``sqrt(log(1 + e^x))`` correctly rounded (fp64 inside): fp32, same shape."""
    wide = logits.to(torch.float64)
    softplus = wide.clamp(min=0.0) + (-wide.abs()).exp().log1p()
    return softplus.sqrt().to(torch.float32)


def random_choice(rows: int, experts: int, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct uniform experts and positive weights, for timing runs.

    Returns:
        int64 ``[rows, count]`` and fp32 ``[rows, count]`` on the device of ``like``.
    """
    if count > experts:
        raise ConfigError(f"{count} distinct experts were asked of {experts}; ask for fewer.")
    draw = torch.rand(rows, experts, device=like.device)
    weights = torch.rand(rows, count, device=like.device) + 0.5
    return draw.argsort(dim=1)[:, :count], weights

"""Muon for the matrices inside the layers, Adam for everything else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tools.train_demo.weights import Kind

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ROUNDS = 5


@dataclass(frozen=True)
class Rates:
    """Peak learning rates and the other constants of a run."""

    matrix: float
    vector: float
    embedding: float
    momentum: float
    weight_decay: float
    clip: float


def schedule(step: int, steps: int, warmup: int, decay: int, floor: float) -> float:
    """Factor on all rates: linear warmup, constant, linear decay to ``floor`` at the end.

    Only the last ``decay`` steps depend on how many steps there are.
    """
    rise = min(1.0, (step + 1) / max(warmup, 1))
    fall = max(0.0, (step - (steps - decay)) / max(decay, 1))
    return rise * (1.0 - fall * (1.0 - floor))


def group_of(name: str, kind: Kind, shape: torch.Size | tuple[int, ...]) -> str:
    """``matrix``, ``embedding`` or ``vector``: which rate and rule a weight follows."""
    if kind is Kind.TABLE or name in ("embed.weight", "head.weight") or "markov_head" in name:
        return "embedding"
    plain = kind in (Kind.FP8, Kind.FP4) or (kind is Kind.BF16 and "compressor" in name)
    return "matrix" if plain and len(shape) >= 2 and "indexer" not in name else "vector"


def orthogonal(batch: Tensor) -> Tensor:
    """Newton-Schulz: matrices ``[n, R, C]`` with singular values near 1 and the same directions."""
    x = batch.to(torch.bfloat16)
    tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if tall else x
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_ROUNDS):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.transpose(1, 2) if tall else x).to(torch.float32)


@dataclass
class Optimizer:
    """Moments of all trained weights. ``step`` counts the updates for Adam's bias correction."""

    rates: Rates
    kinds: Mapping[str, Kind]
    step: int = 0
    first: dict[str, Tensor] = field(default_factory=dict)
    second: dict[str, Tensor] = field(default_factory=dict)

    def allocate(self, masters: Mapping[str, Tensor]) -> None:
        """Make the moments of all trained weights, in shared memory."""
        for name, master in masters.items():
            self.first[name] = torch.zeros_like(master).share_memory_()
            if group_of(name, self.kinds[name], master.shape) != "matrix":
                self.second[name] = torch.zeros_like(master).share_memory_()

    def cost(self, name: str, master: Tensor) -> float:
        """Rough work of one update."""
        if group_of(name, self.kinds[name], master.shape) != "matrix":
            return 10.0 * master.numel()
        return 15.0 * master.numel() * min(master.shape[-2:]) / 32 + 4.0 * master.numel()

    @torch.no_grad()
    def update(
        self,
        masters: dict[str, Tensor],
        grads: Mapping[str, Tensor],
        factor: float,
        clip: float,
        count: int,
    ) -> None:
        """Change weights in place.

        Args:
            masters: fp32 weights.
            grads: of the weights to change.
            factor: on all rates.
            clip: factor on all gradients.
            count: number of this update, from 1.
        """
        matrices: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for name, raw in grads.items():
            grad, master = raw * clip, masters[name]
            group = group_of(name, self.kinds[name], master.shape)
            if group == "matrix":
                self._collect(name, master, grad, matrices)
            else:
                rate = self.rates.embedding if group == "embedding" else self.rates.vector
                self._adam(name, master, grad, rate * factor, count)
        for shape, members in matrices.items():
            self._muon(shape, members, self.rates.matrix * factor)

    def _collect(
        self,
        name: str,
        master: Tensor,
        grad: Tensor,
        matrices: dict[tuple[int, int], list[tuple[Tensor, Tensor]]],
    ) -> None:
        moment = self.first[name]
        moment.lerp_(grad, 1.0 - self.rates.momentum)
        look = grad.lerp(moment, self.rates.momentum)
        rows, columns = master.shape[-2:]
        views = master.view(-1, rows, columns), look.view(-1, rows, columns)
        matrices[rows, columns].append(views)

    def _muon(
        self, shape: tuple[int, int], members: list[tuple[Tensor, Tensor]], rate: float
    ) -> None:
        direction = orthogonal(torch.cat([look for _, look in members]))
        size = rate * max(1.0, shape[0] / shape[1]) ** 0.5
        at = 0
        for master, look in members:
            master.mul_(1.0 - rate * self.rates.weight_decay)
            master.add_(direction[at : at + len(look)], alpha=-size)
            at += len(look)

    def _adam(self, name: str, master: Tensor, grad: Tensor, rate: float, count: int) -> None:
        first, second = self.first[name], self.second[name]
        first.lerp_(grad, 0.1)
        second.lerp_(grad.square(), 0.02)
        correction = (1 - 0.98**count) ** 0.5 / (1 - 0.9**count)
        master.addcdiv_(first, second.sqrt().add_(1e-10), value=-rate * correction)

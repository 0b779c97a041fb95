"""What a run keeps between two starts, and its log."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tools.train_demo.optimizer import Optimizer


@dataclass
class State:
    """Weights, moments and progress of one training."""

    masters: dict[str, Tensor]
    optimizer: Optimizer
    step: int = 0
    seen: dict[int, int] = field(default_factory=dict)
    """Sequences used so far, by context length."""
    seconds: float = 0.0

    def save(self, path: Path) -> None:
        """Write the state; a reader finds the old or the new one, never half of it."""
        record = {
            "masters": self.masters,
            "first": self.optimizer.first,
            "second": self.optimizer.second,
            "updates": self.optimizer.step,
            "step": self.step,
            "seen": self.seen,
            "seconds": self.seconds,
        }
        partial = path.with_suffix(".partial")
        torch.save(record, partial)
        partial.replace(path)

    def restore(self, path: Path) -> bool:
        """Take over a saved state; returns whether there was one."""
        if not path.exists():
            return False
        record = torch.load(path, weights_only=True)
        pairs = (
            (self.masters, record["masters"]),
            (self.optimizer.first, record["first"]),
            (self.optimizer.second, record["second"]),
        )
        for kept, saved in pairs:
            for name, tensor in kept.items():
                tensor.copy_(saved[name])
        self.optimizer.step = record["updates"]
        self.step, self.seen = record["step"], record["seen"]
        self.seconds = record["seconds"]
        return True


@dataclass
class Log:
    """One JSON object per line."""

    path: Path

    def write(self, part: str, step: int, values: Mapping[str, float]) -> None:
        """Append a line, numbers rounded to five digits."""
        short = {key: float(f"{value:.5g}") for key, value in values.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"part": part, "step": step, **short}) + "\n")

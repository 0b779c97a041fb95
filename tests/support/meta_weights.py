"""Weights that have shapes but no values, so that a network of any size can be built."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_neuron.checkpoint.config import ModelConfig
from deepinfer_neuron.checkpoint.names import inventory

META = torch.device("meta")

_TYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


class MetaCheckpoint:
    """Stands for an opened checkpoint of a configuration; codes and scales are bytes."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._specs = {spec.name: spec for spec in inventory(config)}

    def tensor(self, name: str) -> Tensor:
        """A tensor of the inventory."""
        spec = self._specs[name]
        return torch.empty(spec.shape, dtype=_TYPES.get(spec.dtype, torch.uint8), device=META)

    read = tensor

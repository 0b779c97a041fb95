"""What the engine needs to know about a device."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class Platform(ABC):
    """A device with its number format and its memory."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name a user gives as ``device``."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where weights, caches and activations live."""

    @property
    def dtype(self) -> torch.dtype:
        """Format of the activations between operators; the checkpoints are made for bfloat16."""
        return torch.bfloat16

    @abstractmethod
    def total_memory_bytes(self) -> int:
        """Memory of the device, in bytes."""

    @abstractmethod
    def available_memory_bytes(self) -> int:
        """Memory that can be allocated now without driving out anything else, in bytes."""

"""The host processor and its main memory."""

from __future__ import annotations

import psutil
import torch

from deepinfer_neuron.platform.base import Platform


class CpuPlatform(Platform):
    """The CPU, with the memory figures of the operating system."""

    @property
    def name(self) -> str:
        """``"cpu"``."""
        return "cpu"

    @property
    def device(self) -> torch.device:
        """The CPU device of torch."""
        return torch.device("cpu")

    def total_memory_bytes(self) -> int:
        """Main memory of the machine, in bytes."""
        return int(psutil.virtual_memory().total)

    def available_memory_bytes(self) -> int:
        """Main memory that is free or can be freed without swapping, in bytes."""
        return int(psutil.virtual_memory().available)

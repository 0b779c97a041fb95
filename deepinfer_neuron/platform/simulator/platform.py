"""The platform of the simulated device."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from deepinfer_neuron.platform.base import CompileMode, Download, check_compile_mode
from deepinfer_neuron.platform.neuron import NeuronPlatform
from deepinfer_neuron.platform.regions import PlainBackend, Regions
from deepinfer_neuron.platform.simulator.backend import SimulatedBackend
from deepinfer_neuron.platform.simulator.device import switch_on
from deepinfer_neuron.platform.simulator.simulator import Simulator


class SimulatedNeuronPlatform(NeuronPlatform):
    """A core of trn2 whose memory is the host's.

    Args:
        compile: ``"off"`` runs every operator of a region by itself.
        simulator: the device; by default one that raises where a rule is broken.

    Raises:
        PlatformError: TorchNeuron is installed, or the device of torch is taken.
    """

    def __init__(
        self, compile: CompileMode = "regions", simulator: Simulator | None = None
    ) -> None:
        self.simulator = simulator or Simulator()
        switch_on(self.simulator)
        super().__init__(torch.get_device_module("neuron"), compile)

    @property
    def collectives_backend(self) -> str:
        """``"gloo"``: the tensors are in main memory."""
        return "gloo"

    @property
    def compile_backend(self) -> str | None:
        """``None``: regions are captured and then run as they are."""
        return None

    def step(self, label: str) -> AbstractContextManager[None]:
        """A step whose copies, launches and memory are counted and checked."""
        return self.simulator.step(label)

    def total_memory_bytes(self) -> int:
        """Memory of one logical core, in bytes."""
        return self.simulator.limits.memory

    def available_memory_bytes(self) -> int:
        """What tensors may still take, in bytes."""
        return self.simulator.limits.usable - self.simulator.memory.now

    def make_regions(self, compile: str | None = None) -> Regions:
        """Captured and checked graphs, or plain calls."""
        mode = self._compile if compile is None else check_compile_mode(compile)
        backend = PlainBackend() if mode == "off" else SimulatedBackend(self.simulator)
        return Regions(backend)

    def start_download(self, tensor: Tensor) -> Download:
        """One copy, done on return."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        host.copy_(tensor, non_blocking=True)
        return Download(host)

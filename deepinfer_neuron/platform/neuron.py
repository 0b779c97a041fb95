"""AWS Trainium through TorchNeuron.

None of this has run on a Trainium chip yet: it follows the published interface of TorchNeuron.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import MutableMapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from deepinfer_neuron.errors import PlatformError
from deepinfer_neuron.platform.base import (
    CompileMode,
    Download,
    Platform,
    Quirks,
    check_compile_mode,
    check_copy,
)
from deepinfer_neuron.platform.neuron_parts import NeuronParts, find_parts, required_environment
from deepinfer_neuron.platform.regions import CompiledBackend, PlainBackend, Regions

CORE_MEMORY_BYTES = 24 * 2**30
"""Memory of one logical core of trn2: two physical cores share one bank."""

TRN2_QUIRKS = Quirks(
    rows_pow2=True,
    int64=False,
    float64=False,
    float8_e4m3fn=False,
    fp8_max=240.0,
    byte_gathers=False,
    eager_casts=False,
    dequant_chunk=2**25,
    most_in_flight=8,
    largest_collective=2**29,
    largest_wide_gather=2**15,
)
"""What trn2 cannot do; the rules of the simulated device say it one by one."""

TRN2_DTYPES = frozenset(
    {
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float8_e5m2,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)
"""What tensors of the device may hold."""


class NeuronPlatform(Platform):
    """One logical core of a Trainium chip.

    Args:
        module: torch's module of the device, such as ``torch.neuron``.
        compile: ``"off"`` runs every operator of a region by itself, which is for debugging.
    """

    def __init__(self, module: Any, compile: CompileMode = "regions") -> None:
        self._module = module
        self._compile = compile

    @classmethod
    def open(
        cls,
        compile: CompileMode = "regions",
        environ: MutableMapping[str, str] | None = None,
        devices: Path = Path("/dev"),
    ) -> NeuronPlatform:
        """The core of this process.

        Sets the variables of :func:`required_environment` that are not set.

        Raises:
            PlatformError: the driver, the package or the cores are missing, the package is made
                for another torch, or a variable contradicts what the results depend on.
        """
        environ = os.environ if environ is None else environ
        parts = find_parts(environ, devices)
        _refuse(parts)
        for name, value in required_environment().items():
            environ.setdefault(name, value)
        return cls(_import_device(), compile)

    @property
    def name(self) -> str:
        """``"neuron"``."""
        return "neuron"

    @property
    def device(self) -> torch.device:
        """The first device: a process sees one core."""
        return torch.device("neuron", 0)

    @property
    def compile_backend(self) -> str | None:
        """``"neuron"``, unless regions are plain calls."""
        return "neuron" if self._compile == "regions" else None

    @property
    def collectives_backend(self) -> str:
        """``"neuron"``."""
        return "neuron"

    @property
    def quirks(self) -> Quirks:
        """Those of trn2."""
        return TRN2_QUIRKS

    @property
    def graph(self) -> bool:
        """Always: other forms do not compile."""
        return True

    def supports(self, dtype: torch.dtype) -> bool:
        """Floats, integers and booleans of at most 32 bits."""
        return dtype in TRN2_DTYPES

    def total_memory_bytes(self) -> int:
        """Memory of one logical core, in bytes."""
        return CORE_MEMORY_BYTES

    def available_memory_bytes(self) -> int:
        """Memory of the core less what torch holds of it, in bytes."""
        return CORE_MEMORY_BYTES - int(self._module.memory_allocated())

    def make_regions(self, compile: str | None = None) -> Regions:
        """Graphs of the Neuron compiler, or plain calls."""
        mode = self._compile if compile is None else check_compile_mode(compile)
        return Regions(PlainBackend() if mode == "off" else CompiledBackend("neuron"))

    def to_device(self, tensor: Tensor) -> Tensor:
        """A copy on the device."""
        if not self.supports(tensor.dtype):
            raise PlatformError(
                f"a tensor of {tensor.dtype} {tuple(tensor.shape)} cannot be held by the Neuron "
                "device; convert it on the host to a dtype of at most 32 bits."
            )
        return tensor.contiguous().to(self.device)

    def upload(self, host: Tensor, device_buffer: Tensor) -> None:
        """One asynchronous copy."""
        check_copy(host, device_buffer)
        device_buffer.copy_(host, non_blocking=True)

    def start_download(self, tensor: Tensor) -> Download:
        """Queue one asynchronous copy behind the work queued so far."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        host.copy_(tensor, non_blocking=True)
        return _QueuedDownload(host, self._module)

    def synchronize(self) -> None:
        """Wait until the queue is empty."""
        self._module.synchronize()


class _QueuedDownload(Download):
    """Complete once the device has passed the point at which the copy was queued."""

    def __init__(self, host: Tensor, module: Any) -> None:
        super().__init__(host)
        # An event waits for this copy only; the whole queue would include the step after.
        event = getattr(module, "Event", None)
        self._wait = module.synchronize
        if event is not None:
            mark = event()
            mark.record()
            self._wait = mark.synchronize

    def wait(self) -> Tensor:
        """The data on the host, complete."""
        self._wait()
        return super().wait()


def _refuse(parts: NeuronParts) -> None:
    """Raise :class:`PlatformError` with the first thing that is missing."""
    for finding in parts.findings():
        if not finding.ok:
            raise PlatformError(
                f"device 'neuron' is not usable here: {finding.what}: {finding.why}. "
                "'deepinfer-neuron doctor' lists everything; use device 'cpu', or simulate=True "
                "for the simulated device."
            )


def _import_device() -> ModuleType:
    """torch's module of the device.

    Raises :class:`PlatformError` if TorchNeuron cannot be loaded or sees no core.
    """
    try:
        importlib.import_module("torch_neuronx")
        module = torch.get_device_module("neuron")
        cores = module.device_count()
    except Exception as error:
        raise PlatformError(
            f"torch_neuronx is installed but cannot be loaded: {error}; run "
            "'deepinfer-neuron doctor'."
        ) from error
    if cores < 1:
        raise PlatformError(
            "torch_neuronx sees no Neuron core; check that no other process holds them "
            "(neuron-ls) and that NEURON_RT_VISIBLE_CORES names one."
        )
    assert isinstance(module, ModuleType)
    return module

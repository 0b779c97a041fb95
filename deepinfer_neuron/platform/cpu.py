"""The host processor and its main memory."""

from __future__ import annotations

import psutil
import torch
from torch import Tensor

from deepinfer_neuron.platform.base import (
    CompileMode,
    Download,
    Platform,
    Quirks,
    check_compile_mode,
    check_copy,
)
from deepinfer_neuron.platform.regions import BackendOptions, CompiledBackend, PlainBackend, Regions

_NO_ARITHMETIC = frozenset({torch.float4_e2m1fn_x2})
_QUIRKS = Quirks()


# Left to itself, inductor keeps fp32 where the model rounds to bf16 between fused operators.
_INDUCTOR: BackendOptions = {"emulate_precision_casts": True}


class CpuPlatform(Platform):
    """The CPU, with the memory figures of the operating system.

    Args:
        compile: ``"regions"`` compiles them with inductor, which needs a C++ compiler.
    """

    def __init__(self, compile: CompileMode = "off") -> None:
        self._compile = compile

    @property
    def name(self) -> str:
        """``"cpu"``."""
        return "cpu"

    @property
    def device(self) -> torch.device:
        """The CPU device of torch."""
        return torch.device("cpu")

    @property
    def compile_backend(self) -> str | None:
        """``"inductor"`` if regions are compiled."""
        return "inductor" if self._compile == "regions" else None

    @property
    def collectives_backend(self) -> str:
        """``"gloo"``."""
        return "gloo"

    @property
    def quirks(self) -> Quirks:
        """None."""
        return _QUIRKS

    @property
    def graph(self) -> bool:
        """Whether regions are compiled: a graph has static shapes here as well."""
        return self._compile != "off"

    def supports(self, dtype: torch.dtype) -> bool:
        """Everything but packed 4-bit floats."""
        return dtype not in _NO_ARITHMETIC

    def total_memory_bytes(self) -> int:
        """Main memory of the machine, in bytes."""
        return int(psutil.virtual_memory().total)

    def available_memory_bytes(self) -> int:
        """Main memory that is free or can be freed without swapping, in bytes."""
        return int(psutil.virtual_memory().available)

    def make_regions(self, compile: str | None = None) -> Regions:
        """Plain calls, or graphs of inductor."""
        mode = self._compile if compile is None else check_compile_mode(compile)
        return Regions(PlainBackend() if mode == "off" else CompiledBackend("inductor", _INDUCTOR))

    def to_device(self, tensor: Tensor) -> Tensor:
        """``tensor`` itself."""
        return tensor

    def upload(self, host: Tensor, device_buffer: Tensor) -> None:
        """One copy within main memory."""
        check_copy(host, device_buffer)
        device_buffer.copy_(host)

    def start_download(self, tensor: Tensor) -> Download:
        """One copy within main memory, done on return."""
        return Download(tensor.clone())

    def synchronize(self) -> None:
        """Nothing is pending."""

"""What the engine needs to know about a device, and how it talks to one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from deepinfer_neuron.errors import PlatformError
from deepinfer_neuron.platform.regions import Regions

CompileMode = Literal["off", "regions"]
"""Whether regions are plain calls, or one compiled graph each."""

COMPILE_MODES: tuple[CompileMode, ...] = get_args(CompileMode)


@dataclass(frozen=True)
class Quirks:
    """In what a device differs from a general-purpose processor.

    Attributes:
        rows_pow2: the rows of a sparse attention step must be a power of two.
        int64: 64-bit integers are computed with.
        float64: 64-bit floats are computed with.
        float8_e4m3fn: the OCP format with its maximum of 448 exists as a dtype.
        fp8_max: largest finite value of the E4M3 format that products take.
        byte_gathers: rows of large one-byte tables can be gathered as they are.
        eager_casts: dtype casts work outside regions.
        dequant_chunk: weight elements that are decoded at once at most.
        most_in_flight: launches that are queued at most before the host waits.
        largest_collective: bytes that one collective moves at most, or ``None``.
        largest_wide_gather: elements of an axis along which ``gather`` is right, or ``None``.
    """

    rows_pow2: bool = False
    int64: bool = True
    float64: bool = True
    float8_e4m3fn: bool = True
    fp8_max: float = 448.0
    byte_gathers: bool = True
    eager_casts: bool = True
    dequant_chunk: int = 2**25
    most_in_flight: int = 1
    largest_collective: int | None = None
    largest_wide_gather: int | None = None


class Download:
    """A copy to the host that may still be under way.

    Args:
        host: receives the data.
    """

    def __init__(self, host: Tensor) -> None:
        self._host = host

    def wait(self) -> Tensor:
        """The data on the host, complete."""
        return self._host


class Platform(ABC):
    """A device with its number format, its memory, its copies and its compiler."""

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

    @property
    @abstractmethod
    def compile_backend(self) -> str | None:
        """Backend of ``torch.compile`` for regions; ``None`` if they are plain calls."""

    @property
    @abstractmethod
    def collectives_backend(self) -> str:
        """Backend of ``torch.distributed`` for tensors of the device."""

    @property
    @abstractmethod
    def quirks(self) -> Quirks:
        """In what the device differs from a general-purpose processor."""

    @property
    @abstractmethod
    def graph(self) -> bool:
        """Whether operators must take their graph form: static shapes, 32-bit arithmetic."""

    @abstractmethod
    def supports(self, dtype: torch.dtype) -> bool:
        """Whether tensors of ``dtype`` can be computed with."""

    @abstractmethod
    def total_memory_bytes(self) -> int:
        """Memory of the device, in bytes."""

    @abstractmethod
    def available_memory_bytes(self) -> int:
        """Memory that can be allocated now without driving out anything else, in bytes."""

    @abstractmethod
    def make_regions(self, compile: str | None = None) -> Regions:
        """A registry of regions that run in this platform's way.

        Args:
            compile: ``"off"`` or ``"regions"``; by default what the platform was made with.

        Raises:
            PlatformError: ``compile`` is neither.
        """

    @abstractmethod
    def to_device(self, tensor: Tensor) -> Tensor:
        """A weight or buffer on the device, copied while the model loads; never cast.

        Raises:
            PlatformError: the device does not hold such tensors.
        """

    @abstractmethod
    def upload(self, host: Tensor, device_buffer: Tensor) -> None:
        """Copy ``host`` into ``device_buffer`` without waiting: one copy, same shape and dtype.

        ``host`` must not be written before the work that uses the copy has finished.

        Raises:
            PlatformError: shapes or dtypes differ, or one of the two is not contiguous.
        """

    @abstractmethod
    def start_download(self, tensor: Tensor) -> Download:
        """Begin one copy of ``tensor`` to the host."""

    def download(self, tensor: Tensor) -> Tensor:
        """A copy of ``tensor`` on the host; waits for it."""
        return self.start_download(tensor).wait()

    def step(self, label: str) -> AbstractContextManager[None]:
        """Bracket of what belongs to one step; a simulated device counts and checks it."""
        return nullcontext()

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has finished everything."""


def check_compile_mode(compile: str) -> CompileMode:
    """``compile`` if it is a mode.

    Raises :class:`PlatformError` if it is not.
    """
    for mode in COMPILE_MODES:
        if compile == mode:
            return mode
    raise PlatformError(
        f"compile={compile!r} is not known; use one of {', '.join(map(repr, COMPILE_MODES))}."
    )


def check_copy(source: Tensor, target: Tensor) -> None:
    """Refuse a copy that would have to cast, to broadcast or to gather.

    Raises :class:`PlatformError` for it.
    """
    if source.shape != target.shape or source.dtype != target.dtype:
        raise PlatformError(
            f"a copy of {source.dtype} {tuple(source.shape)} into {target.dtype} "
            f"{tuple(target.shape)} was asked for; shapes and dtypes must be the same."
        )
    if not source.is_contiguous() or not target.is_contiguous():
        raise PlatformError(
            f"a copy of shape {tuple(source.shape)} between host and device was asked for with a "
            "tensor that is not contiguous; make both contiguous."
        )

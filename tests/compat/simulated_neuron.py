"""A pure-Python device called ``neuron`` whose tensors hold a CPU tensor; needs its own process.

``start()`` registers the device and a package ``torch_neuronx``; calls are logged in ``CALLS``.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from torch.utils import backend_registration

CALLS: list[tuple[str, tuple[Any, ...]]] = []
_KEEP: list[Any] = []


class DeviceTensor(torch.Tensor):
    """A tensor that says it is on ``neuron:0``."""

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, dtype=held.dtype, device="neuron:0", strides=held.stride()
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        named = {name: _held(value) for name, value in (kwargs or {}).items()}
        device = named.pop("device", None)
        out = func(*map(_held, args), **named)
        stays = isinstance(out, torch.Tensor) and torch.device(device or "neuron").type == "neuron"
        return DeviceTensor(out) if stays else out


def _held(value: Any) -> Any:
    return value.held if isinstance(value, DeviceTensor) else value


def _empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return DeviceTensor(torch.empty(size, dtype=dtype, device="cpu"))


def _empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    return DeviceTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _copy_from(source, target, non_blocking=False):
    _held(target).copy_(_held(source))
    return target


class _Module(backend_registration._DummyBackendModule):
    """``torch.neuron``."""

    def __init__(self, cores: int) -> None:
        self.cores = cores

    def device_count(self) -> int:
        return self.cores

    def synchronize(self, device: Any = None) -> None:
        CALLS.append(("synchronize", (device,)))

    def set_device(self, device: Any) -> None:
        CALLS.append(("set_device", (device,)))

    def manual_seed_all(self, seed: int) -> None:
        CALLS.append(("manual_seed_all", (seed,)))


def start(cores: int = 1) -> None:
    """Register the device."""
    backend_registration._setup_privateuseone_for_python_backend("neuron", _Module(cores))
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    _KEEP.append(library)
    sys.modules["torch_neuronx"] = types.ModuleType("torch_neuronx")

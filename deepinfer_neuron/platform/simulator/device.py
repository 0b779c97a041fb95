"""A device of torch called ``neuron`` whose memory is the host's.

Its tensors are wrappers around CPU tensors: every operator that is called on one of them, outside
a region, comes to :meth:`DeviceTensor.__torch_dispatch__` and from there to the simulator.
torch allows one such device per process and never takes it back, so :func:`switch_on` registers
it once; the simulator behind it can be replaced.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import backend_registration

from deepinfer_neuron.errors import PlatformError

if TYPE_CHECKING:
    from deepinfer_neuron.platform.simulator.memory import Allocation
    from deepinfer_neuron.platform.simulator.simulator import Simulator

DEVICE = "neuron:0"


class DeviceTensor(Tensor):
    """A tensor on the simulated device.

    Attributes:
        held: the CPU tensor with the values; views share its storage.
        simulator: the device that it lives on.
    """

    held: Tensor
    simulator: Simulator
    allocation: Allocation

    @staticmethod
    def __new__(cls, held: Tensor, simulator: Simulator) -> DeviceTensor:
        # An inference tensor cannot become a view of one that is none.
        with torch.inference_mode(False):
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                held.shape,
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                device=torch.device(DEVICE),
            )
        assert isinstance(made, DeviceTensor)
        made.held = held
        made.simulator = simulator
        made.allocation = simulator.memory.hold(held)
        return made

    # Functions on these tensors need nothing but the dispatch below.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """One operator outside a region."""
        kwargs = kwargs or {}
        simulator = next((tensor.simulator for tensor in device_tensors((args, kwargs))), None)
        with torch.inference_mode(False), torch.no_grad():
            return (simulator or current()).eager.run(func, args, kwargs)

    def tolist(self) -> Any:
        """The values as nested lists, through a copy to the host."""
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """The values, read behind the device's back."""
        return f"{type(self).__name__}({self.held!r}, device='{DEVICE}')"


def device_tensors(values: Any) -> list[DeviceTensor]:
    """Every tensor of the device among nested lists, tuples and dictionaries."""
    if isinstance(values, DeviceTensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return list(itertools.chain.from_iterable(map(device_tensors, values)))


def unwrap(values: Any) -> Any:
    """``values`` with tensors of the device replaced by the CPU tensors that they hold."""
    if isinstance(values, DeviceTensor):
        return values.held
    if isinstance(values, list | tuple):
        return _like(values, map(unwrap, values))
    if type(values) is dict:
        return {name: unwrap(value) for name, value in values.items()}
    return values


def wrap(values: Any, simulator: Simulator) -> Any:
    """``values`` with CPU tensors, also in lists and (named) tuples, put on the device."""
    if isinstance(values, DeviceTensor):
        return values
    if isinstance(values, Tensor):
        return DeviceTensor(values, simulator)
    if isinstance(values, list | tuple):
        return _like(values, (wrap(value, simulator) for value in values))
    return values


def _like(values: Any, parts: Iterable[Any]) -> Any:
    """A list, tuple or named tuple of the type of ``values``."""
    make = getattr(type(values), "_make", type(values))
    return make(tuple(parts))


class _DeviceModule(backend_registration._DummyBackendModule):
    """``torch.neuron``."""

    simulated = True
    """Tells code that looks for hardware that there is none."""

    def synchronize(self, device: object = None) -> None:
        """Nothing is pending."""

    def set_device(self, device: object) -> None:
        """There is one."""

    def memory_allocated(self, device: object = None) -> int:
        """Bytes that tensors take."""
        return current().memory.now

    def max_memory_allocated(self, device: object = None) -> int:
        """Most bytes that tensors took at one time."""
        return current().memory.peak


class _Registration:
    """The one device of this process, and the simulator behind it."""

    def __init__(self) -> None:
        self.library: torch.library.Library | None = None
        self.simulator: Simulator | None = None


_REGISTRATION = _Registration()


def current() -> Simulator:
    """The simulator on which factories put new tensors.

    Raises :class:`PlatformError` if none was switched on.
    """
    if _REGISTRATION.simulator is None:
        raise PlatformError("no simulated device is switched on; use simulate=True.")
    return _REGISTRATION.simulator


def switch_on(simulator: Simulator) -> None:
    """Make ``simulator`` the device behind ``"neuron"``; tensors of another one stay with it.

    Raises:
        PlatformError: TorchNeuron, or another extension of torch, owns the device.
    """
    if _REGISTRATION.library is None:
        _register()
    _REGISTRATION.simulator = simulator


def _register() -> None:
    """Add the device to torch, for the rest of the process."""
    owner = torch._C._get_privateuse1_backend_name()
    if owner != "privateuseone" or _is_installed("torch_neuronx"):
        name = "torch_neuronx" if owner == "privateuseone" else f"the device {owner!r}"
        raise PlatformError(
            f"the simulated device cannot be switched on, because {name} is present and torch "
            "knows one such device; simulate in an environment without it."
        )
    backend_registration._setup_privateuseone_for_python_backend("neuron", _DeviceModule())
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in _kernels().items():
        library.impl(name, kernel, "PrivateUse1")
    _REGISTRATION.library = library


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:
        return True


def _kernels() -> dict[str, Callable[..., Any]]:
    """Operators that reach the device without one of its tensors, or below the dispatch."""
    return {
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "_copy_from": _copy_from,
    }


def _empty(
    size: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: object = None,
    device: object = None,
    pin_memory: object = None,
    memory_format: object = None,
) -> Tensor:
    with torch.inference_mode(False):
        held = torch.empty(size, dtype=dtype, device="cpu")
    return current().eager.created(held)


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: object = None,
    device: object = None,
    pin_memory: object = None,
) -> Tensor:
    with torch.inference_mode(False):
        held = torch.empty_strided(size, stride, dtype=dtype, device="cpu")
    return current().eager.created(held)


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    # torch.tensor(values, device=...) copies with the dispatch to subclasses switched off.
    with torch.inference_mode(False):
        copied: Tensor = current().eager.copy(target, source, non_blocking)
    return copied

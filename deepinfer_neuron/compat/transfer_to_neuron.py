"""Send ``torch.cuda`` calls and ``device="cuda"`` to the Neuron device, or to the host CPU.

Importing this module is enough, and importing it again changes nothing. The target is device
``neuron`` if ``torch_neuronx`` can be imported and sees at least one core, else the CPU.
:func:`uninstall` puts every attribute back, :func:`install` redirects again.

Two mechanisms, because torch has two kinds of entry:

* a torch-function mode translates the device of everything that passes torch's dispatch: all
  factories (also those reached as ``from torch import zeros``), ``Tensor.to``, ``Tensor.cuda`` and
  through them ``Module.to`` and ``Module.cuda``. No factory is replaced, hence
  ``with torch.device(...)``, which recognizes factories by identity, keeps working;
* a table of replaced attributes for what does not pass it (:func:`_replacements`).

``tensor.device`` keeps telling the truth. On the host the index of ``cuda:N`` is dropped and
pinned memory is ordinary memory. Processes started later must import the module themselves.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from deepinfer_neuron.compat.device_calls import accelerator_calls, host_calls

_RECORD = "_deepinfer_neuron_transfer"
"""Attribute of ``torch`` that holds the installation: it outlives a reload of this module."""

_MISSING = object()


@dataclass(frozen=True)
class Target:
    """The device that stands behind ``cuda``: a type, and torch's module for it if it has one."""

    type: str
    module: ModuleType | None = None

    def translate(self, device: object) -> object:
        """``device`` with ``cuda``, ``cuda:N`` and a bare number replaced; all else unchanged."""
        if isinstance(device, str):
            if device != "cuda" and not device.startswith("cuda:"):
                return device
            device = torch.device(device)
        if isinstance(device, torch.device):
            return self._with_index(device.index) if device.type == "cuda" else device
        if isinstance(device, int) and not isinstance(device, bool):
            return self._with_index(device)
        return device

    def _with_index(self, index: int | None) -> torch.device:
        # The host is one device; an index would only make equal devices compare unequal.
        if index is None or self.module is None:
            return torch.device(self.type)
        return torch.device(self.type, index)


@dataclass(frozen=True)
class Replacement:
    """An attribute that is replaced while the redirection is installed, and why."""

    owner: object
    name: str
    value: object
    reason: str


def find_target() -> Target:
    """The Neuron device if there is one, else the CPU."""
    # Placeholder packages of that name exist, and a real one fails in many ways without a driver.
    with contextlib.suppress(Exception):
        importlib.import_module("torch_neuronx")
    with contextlib.suppress(Exception):
        module = getattr(torch, "neuron", None)
        simulated = getattr(module, "simulated", False)
        if module and not simulated and module.device_count() > 0 and torch.device("neuron"):
            return Target("neuron", module)
    return Target("cpu")


class _Redirect(TorchFunctionMode):
    """Translates the device of whatever passes torch's dispatch."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = target
        self.active = True

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not self.active:
            return func(*args, **kwargs)
        if func is torch.Tensor.cuda:
            return _to_target(self.target, *args, **kwargs)
        if self.target.module is None:
            if func is torch.Tensor.pin_memory:
                return args[0]
            if "pin_memory" in kwargs:
                kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self.target.translate(kwargs["device"])}
        # The only function that takes a device by position.
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], self.target.translate(args[1]), *args[2:])
        return func(*args, **kwargs)


def _to_target(
    target: Target,
    tensor: torch.Tensor,
    device: object = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> torch.Tensor:
    """``Tensor.cuda``: to the given or the current device."""
    place = target.translate("cuda" if device is None else device)
    assert isinstance(place, torch.device)
    return tensor.to(device=place, non_blocking=non_blocking, memory_format=memory_format)


def _generator_class(target: Target) -> type:
    """A stand-in for ``torch.Generator`` that makes, and recognizes, plain generators."""
    plain = torch.Generator

    class Meta(type(plain)):  # type: ignore[misc]
        def __call__(cls, device: object = "cpu") -> torch.Generator:
            place = target.translate(device)
            assert isinstance(place, (str, torch.device))
            return plain(device=place)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, plain)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, plain)

    return Meta("Generator", (plain,), {"__module__": "torch", "__doc__": plain.__doc__})


def _device_context_init(target: Target) -> tuple[type, Callable[..., None]] | None:
    """The class behind ``with torch.device(...)`` and a constructor that translates, if any."""
    try:
        # ``import torch`` alone does not load this module.
        context = importlib.import_module("torch.utils._device").DeviceContext
    except ImportError:
        return None
    original = context.__init__

    def __init__(self: object, device: object) -> None:
        original(self, target.translate(device))

    return context, __init__


def _thread_start(redirect: _Redirect) -> Callable[[threading.Thread], None]:
    """A ``Thread.start`` whose thread runs under the mode: torch's mode stack is per thread."""
    original = threading.Thread.start

    def start(self: threading.Thread) -> None:
        run = self.run

        def run_redirected() -> None:
            with _Redirect(redirect.target) if redirect.active else contextlib.nullcontext():
                run()

        self.run = run_redirected  # type: ignore[method-assign]
        try:
            original(self)
        finally:
            # A thread that has not started may be started again; one that has keeps its own copy.
            if not self.is_alive() and self.ident is None:
                del self.run

    return start


def _own(value: object) -> object:
    """A function object of its own: the graph tracer refuses one that has two names in torch."""
    if isinstance(value, type) or not callable(value):
        return value
    call = value

    def own(*args: object, **kwargs: object) -> object:
        return call(*args, **kwargs)

    return own


def _replacements(target: Target, redirect: _Redirect) -> Iterator[Replacement]:
    """Everything that does not pass torch's dispatch, with the reason for each."""
    if target.module is None:
        calls = host_calls()
        yield Replacement(
            torch.Tensor,
            "record_stream",
            lambda self, stream: None,
            "checks the type of the stream before it dispatches",
        )
    else:
        calls = accelerator_calls(target.module, target.translate)
    for name, value in calls.items():
        yield Replacement(torch.cuda, name, _own(value), "calls straight into the CUDA runtime")
    yield Replacement(
        torch.cuda.graphs,
        "is_current_stream_capturing",
        _own(calls["is_current_stream_capturing"]),
        "the same function under the name by which graph code reaches it",
    )
    yield Replacement(
        torch, "Generator", _generator_class(target), "a C type, constructed without dispatch"
    )
    context = _device_context_init(target)
    if context is not None:
        yield Replacement(
            context[0],
            "__init__",
            context[1],
            "adds the default device below every other mode, so no mode sees it",
        )
    yield Replacement(
        threading.Thread, "start", _thread_start(redirect), "new threads begin without modes"
    )


@dataclass
class _Installation:
    """What :func:`uninstall` has to undo."""

    redirect: _Redirect
    originals: list[tuple[object, str, object]]


def install(target: Target | None = None) -> Target:
    """Redirect CUDA; does nothing if it is redirected already.

    Args:
        target: where to; by default what :func:`find_target` finds.

    Returns:
        the target in force.
    """
    installed: _Installation | None = getattr(torch, _RECORD, None)
    if installed is not None:
        return installed.redirect.target
    target = target or find_target()
    redirect = _Redirect(target)
    originals: list[tuple[object, str, object]] = []
    for new in _replacements(target, redirect):
        originals.append((new.owner, new.name, vars(new.owner).get(new.name, _MISSING)))
        setattr(new.owner, new.name, new.value)
    torch._C._push_on_torch_function_stack(redirect)
    setattr(torch, _RECORD, _Installation(redirect, originals))
    return target


def uninstall() -> None:
    """Put back every attribute that :func:`install` replaced; does nothing without it.

    Threads that were started under the redirection keep it until they end.
    """
    installed: _Installation | None = getattr(torch, _RECORD, None)
    if installed is None:
        return
    installed.redirect.active = False
    _remove_mode(installed.redirect)
    for owner, name, value in reversed(installed.originals):
        if value is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
    delattr(torch, _RECORD)


def _remove_mode(redirect: TorchFunctionMode) -> None:
    """Take one mode out of this thread's stack, wherever it stands."""
    above = []
    for _ in range(torch._C._len_torch_function_stack()):
        mode = torch._C._pop_torch_function_stack()
        if mode is redirect:
            break
        above.append(mode)
    for mode in reversed(above):
        torch._C._push_on_torch_function_stack(mode)


install()

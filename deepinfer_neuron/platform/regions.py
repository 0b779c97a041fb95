"""Regions: methods that run as one compiled graph each.

A region is a method of an :class:`nn.Module` that takes and returns tensors of static shapes.
Its graph is compiled once per class, method, kind and signature and serves every layer of that
kind: weights, the rank and whatever else differs between layers enter as buffers or arguments,
never as Python numbers. The one exception is a frozen *static* argument (a :class:`Hashable`
dataclass of sizes), which is part of the signature.

:class:`Regions` is the registry of one process. What a graph is made of is decided by its
:class:`RegionBackend`: plain calls, ``torch.compile`` with some backend, or the simulated device.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from deepinfer_neuron.errors import DeviceRuleError, PlatformError

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound="RegionModule")

Signature = tuple[Hashable, ...]

BackendOptions = dict[str, str | int | bool | Callable[..., Any]]


@dataclass(frozen=True)
class RegionKey:
    """Names a region: class, method, and the structural kind of the module."""

    cls: str
    method: str
    kind: str = ""

    def __str__(self) -> str:
        kind = f"[{self.kind}]" if self.kind else ""
        return f"{self.cls}.{self.method}{kind}"


@dataclass
class RegionRecord:
    """What is known of one graph: a region at one signature."""

    key: RegionKey
    signature: Signature
    first_seconds: float
    """Time of the first call, which includes the compilation."""
    calls: int = 1


class RegionBackend(Protocol):
    """Runs regions."""

    def run(
        self,
        key: RegionKey,
        signature: Signature,
        function: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
    ) -> Any:
        """Call ``function(module, *args)`` in this backend's way."""

    def seal(self) -> None:
        """Warm-up is over: :meth:`run` is not expected to compile any more."""


class PlainBackend:
    """Calls the method as it is."""

    def run(
        self,
        key: RegionKey,
        signature: Signature,
        function: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
    ) -> Any:
        """The plain call."""
        return function(module, *args)

    def seal(self) -> None:
        """Nothing is compiled."""


class CompiledBackend:
    """Calls the method through ``torch.compile``, one graph without a break per signature.

    Args:
        backend: name or function of a ``torch.compile`` backend.
        options: of the backend.
        most_graphs: graphs of one method that may be needed; torch gives up behind its limit.
    """

    def __init__(
        self,
        backend: str | Callable[..., Any],
        options: BackendOptions | None = None,
        most_graphs: int = 256,
    ) -> None:
        self._backend, self._options = backend, options
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, most_graphs)
        config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, most_graphs)

    def run(
        self,
        key: RegionKey,
        signature: Signature,
        function: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
    ) -> Any:
        """The compiled call."""
        if function not in self._compiled:
            self._compiled[function] = torch.compile(
                function,
                backend=self._backend,
                fullgraph=True,
                dynamic=False,
                options=self._options,
            )
        return self._compiled[function](module, *args)

    def seal(self) -> None:
        """A late graph is counted by the registry."""


class Regions:
    """Registry of the regions of one process.

    Args:
        backend: runs them.
    """

    def __init__(self, backend: RegionBackend | None = None) -> None:
        self.backend: RegionBackend = backend if backend is not None else PlainBackend()
        self._records: dict[tuple[RegionKey, Signature], RegionRecord] = {}
        self._sealed = False
        self._late = 0

    @property
    def records(self) -> tuple[RegionRecord, ...]:
        """Graphs in the order of their first call."""
        return tuple(self._records.values())

    @property
    def compiled_late(self) -> int:
        """Graphs that were first needed after :meth:`seal`."""
        return self._late

    @property
    def calls(self) -> int:
        """Regions launched so far."""
        return sum(record.calls for record in self._records.values())

    def seal(self) -> None:
        """Say that warm-up is over: a graph that is new from here on is counted as late."""
        self._sealed = True
        self.backend.seal()

    def call(
        self, module: RegionModule, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> Any:
        """Run a region.

        Raises:
            PlatformError: an argument is not contiguous, or a Python number.
        """
        key = RegionKey(type(module).__name__, function.__name__, module.region_kind)
        signature = signature_of(key, args)
        record = self._records.get((key, signature))
        if record is not None:
            record.calls += 1
            return self.backend.run(key, signature, function, module, args)
        started = time.monotonic()
        result = self.backend.run(key, signature, function, module, args)
        self._late += int(self._sealed)
        self._records[key, signature] = RegionRecord(key, signature, time.monotonic() - started)
        return result


class RegionModule(nn.Module):
    """A module with regions.

    Attributes:
        regions: where its regions run; plain calls until it is told otherwise.
        region_kind: what tells its graphs from those of other modules of the same class.
    """

    def __init__(self, regions: Regions, region_kind: str = "") -> None:
        super().__init__()
        self.regions = regions
        self.region_kind = region_kind


def region(method: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
    """Make a method a region; its arguments must be positional."""

    @functools.wraps(method)
    def launch(self: M, *args: P.args, **kwargs: P.kwargs) -> R:
        if kwargs:
            raise PlatformError(f"region {method.__name__} takes positional arguments only")
        return cast(R, self.regions.call(self, method, args))

    return cast(Callable[Concatenate[M, P], R], launch)


def signature_of(key: RegionKey, args: tuple[Any, ...]) -> Signature:
    """Shapes, strides and dtypes of the tensors, and the static arguments themselves."""
    return tuple(_part(key, arg) for arg in args)


def _part(key: RegionKey, arg: Any) -> Hashable:
    if isinstance(arg, Tensor):
        if not arg.is_contiguous():
            raise DeviceRuleError(
                "G13",
                "inputs of a graph are contiguous",
                f"{key} given a tensor of shape {tuple(arg.shape)} that is not contiguous",
                "",
                "keep caches layer-major and pass one contiguous view per layer",
            )
        return (str(arg.dtype), tuple(arg.shape), arg.stride())
    if isinstance(arg, tuple):
        return tuple(_part(key, item) for item in arg)
    if arg is None:
        return None
    if isinstance(arg, bool | int | float) or not isinstance(arg, Hashable):
        raise DeviceRuleError(
            "G14",
            "inputs of a graph are tensors, not Python numbers",
            f"{key} given {arg!r}",
            "",
            "pass a device tensor, or a frozen dataclass of sizes",
        )
    return arg


def tensors_of(args: Any) -> Iterator[Tensor]:
    """Every tensor among nested tuples."""
    if isinstance(args, Tensor):
        yield args
    elif isinstance(args, tuple | list):
        for item in args:
            yield from tensors_of(item)

"""What ``torch.cuda`` answers when the work is done elsewhere.

:func:`host_calls` is the whole table for the CPU, where every operation has finished when its call
returns: a stream has nothing to wait for and an event is a point in time.
:func:`accelerator_calls` takes each entry from the accelerator's own module (``torch.neuron``).
Where that module has none it keeps the host's entry, but never passes the host's memory or
properties off as the device's.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import psutil
import torch
from torch import Tensor

from deepinfer_neuron.errors import PlatformError

Translate = Callable[[object], object]
"""Turns a CUDA device, however it is written, into the device that does the work."""


class Stream:
    """A queue that is always empty."""

    cuda_stream = 0
    stream_id = 0
    priority = 0
    device = torch.device("cpu")

    def __init__(self, device: object = None, priority: int = 0, **_: object) -> None:
        self._outer: list[Stream] = []

    def synchronize(self) -> None:
        """Nothing is pending."""

    def query(self) -> bool:
        """Whether everything has finished: yes."""
        return True

    def wait_stream(self, stream: object) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: object) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record ``event``, or a new one, now."""
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        self._outer.append(current_stream())
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        set_stream(self._outer.pop())


class Event:
    """A point in time."""

    def __init__(self, enable_timing: bool = False, *_: object, **__: object) -> None:
        self._time: float | None = None

    def record(self, stream: object = None) -> None:
        """Take the time."""
        self._time = time.perf_counter()

    def wait(self, stream: object = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing is pending."""

    def query(self) -> bool:
        """Whether the event has happened: yes."""
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to ``end_event``.

        Raises :class:`PlatformError` if one of the two was never recorded.
        """
        if self._time is None or end_event._time is None:
            raise PlatformError(
                "elapsed_time was asked of an event that was never recorded; both events need "
                "record() before, call it around the work to be timed."
            )
        return (end_event._time - self._time) * 1000.0


@dataclass(frozen=True)
class HostProperties:
    """The fields of CUDA's device properties that make sense for a processor."""

    name: str
    total_memory: int
    multi_processor_count: int
    major: int = 0
    minor: int = 0


_DEFAULT_STREAM = Stream()
_thread = threading.local()


def current_stream(device: object = None) -> Stream:
    """The stream set in this thread."""
    stream = getattr(_thread, "stream", _DEFAULT_STREAM)
    assert isinstance(stream, Stream)
    return stream


def set_stream(stream: Stream) -> None:
    """Make ``stream`` the current one of this thread."""
    _thread.stream = stream


@contextlib.contextmanager
def _stream_scope(stream: Stream | None) -> Iterator[None]:
    """``with torch.cuda.stream(...)``; ``None`` changes nothing."""
    with stream if stream is not None else contextlib.nullcontext():
        yield


def _properties(device: object = None) -> HostProperties:
    return HostProperties(
        name=platform.processor() or platform.machine(),
        total_memory=int(psutil.virtual_memory().total),
        multi_processor_count=len(os.sched_getaffinity(0)),
    )


def _memory_info(device: object = None) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return int(memory.available), int(memory.total)


def _resident(device: object = None) -> int:
    return int(psutil.Process().memory_info().rss)


def _peak_resident(device: object = None) -> int:
    # The kernel counts in KiB and keeps its own peak, which can lag behind by a few pages.
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, _resident())


def _seed(seed: int) -> None:
    # Not torch.manual_seed: that one calls torch.cuda.manual_seed_all and would never end.
    torch.default_generator.manual_seed(int(seed))


def _fresh_seed() -> None:
    torch.default_generator.seed()


def _rng_state(device: object = None) -> Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(state: Tensor, device: object = None) -> None:
    torch.default_generator.set_state(state)


def _set_rng_states(states: list[Tensor]) -> None:
    for state in states:
        torch.default_generator.set_state(state)


class _SyncDebugMode:
    """Remembers the mode; nothing here synchronizes."""

    def __init__(self) -> None:
        self._mode: int | str = 0

    def get(self) -> int | str:
        """The mode set last."""
        return self._mode

    def set(self, debug_mode: int | str) -> None:
        """Remember ``debug_mode``."""
        self._mode = debug_mode


def _ignore(*_: object, **__: object) -> None:
    """A request that has no meaning on a processor."""


def host_calls() -> dict[str, object]:
    """Every replaced attribute of ``torch.cuda`` for the CPU, by name.

    ``is_available`` stays ``False`` and ``device_count`` 0: torch itself, and packages that look
    for a GPU, ask them before they call into CUDA for real.
    """
    sync = _SyncDebugMode()
    return {
        "is_available": lambda: False,
        "device_count": lambda: 0,
        "is_bf16_supported": lambda including_emulation=True: True,
        "init": _ignore,
        "current_device": lambda: 0,
        "set_device": _ignore,
        "device": lambda device=None: contextlib.nullcontext(),
        "device_of": lambda tensor=None: contextlib.nullcontext(),
        "get_device_name": lambda device=None: _properties().name,
        "get_device_capability": lambda device=None: (0, 0),
        "get_device_properties": _properties,
        "synchronize": _ignore,
        "Stream": Stream,
        "Event": Event,
        "stream": _stream_scope,
        "set_stream": set_stream,
        "current_stream": current_stream,
        "default_stream": lambda device=None: _DEFAULT_STREAM,
        "is_current_stream_capturing": lambda: False,
        "get_sync_debug_mode": sync.get,
        "set_sync_debug_mode": sync.set,
        "empty_cache": _ignore,
        "ipc_collect": _ignore,
        "mem_get_info": _memory_info,
        "memory_allocated": _resident,
        "memory_reserved": _resident,
        "max_memory_allocated": _peak_resident,
        "max_memory_reserved": _peak_resident,
        "reset_peak_memory_stats": _ignore,
        "manual_seed": _seed,
        "manual_seed_all": _seed,
        "seed": _fresh_seed,
        "seed_all": _fresh_seed,
        "initial_seed": lambda: torch.default_generator.initial_seed(),
        "get_rng_state": _rng_state,
        "get_rng_state_all": lambda: [_rng_state()],
        "set_rng_state": _set_rng_state,
        "set_rng_state_all": _set_rng_states,
        "default_generators": (torch.default_generator,),
    }


_DEVICE_FIGURES = frozenset(
    {
        "get_device_properties",
        "max_memory_allocated",
        "max_memory_reserved",
        "mem_get_info",
        "memory_allocated",
        "memory_reserved",
    }
)
"""What a caller would take for the device's own: wrong numbers are worse than none."""


def _unknown(name: str) -> Callable[..., object]:
    def unknown(*_: object, **__: object) -> object:
        raise PlatformError(
            f"torch.cuda.{name} was called, and the accelerator's module has no {name}; ask the "
            "accelerator in its own way, or run on the host."
        )

    return unknown


def accelerator_calls(module: ModuleType, translate: Translate) -> dict[str, object]:
    """The same table answered by an accelerator's module, such as ``torch.neuron``.

    Args:
        module: provides at least ``device_count`` and ``synchronize``.
        translate: applied to every argument, so that ``"cuda:1"`` reaches the module as its own.
    """

    def forward(call: Callable[..., object]) -> Callable[..., object]:
        def forwarded(*args: object, **kwargs: object) -> object:
            named = {name: translate(value) for name, value in kwargs.items()}
            return call(*(a if isinstance(a, int) else translate(a) for a in args), **named)

        return forwarded

    calls = host_calls()
    calls["is_available"] = lambda: True
    for name in calls:
        found = getattr(module, name, None)
        if found is None and name in _DEVICE_FIGURES:
            calls[name] = _unknown(name)
        elif found is not None:
            plain = isinstance(found, (type, tuple, list)) or not callable(found)
            calls[name] = found if plain else forward(found)
    return calls

"""Resident memory of this process, and fresh processes to measure it in."""

from __future__ import annotations

import multiprocessing
import resource
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import psutil

P = ParamSpec("P")
T = TypeVar("T")

_MAPPINGS = Path("/proc/self/smaps")
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Resident:
    """Memory of this process that is in RAM right now, in bytes.

    Attributes:
        total: the resident set size (RSS).
        anonymous: pages that belong to no file: heap, activations, caches, decoded weights.
        shards: pages of mapped checkpoint files. Like the pages of libraries, which are the rest,
            they can be dropped and read again at any time, but they count.
    """

    total: int
    anonymous: int
    shards: int


def resident(checkpoint: Path) -> Resident:
    """Resident memory now, with the share of the mapped files of one checkpoint directory.

    Without Linux's counters everything counts as anonymous.
    """
    try:
        lines = _MAPPINGS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        total = int(psutil.Process().memory_info().rss)
        return Resident(total, total, 0)
    inside = f"{checkpoint.resolve()}/"
    total = anonymous = shards = 0
    of_shard = False
    for line in lines:
        words = line.split()
        if not words[0].endswith(":"):
            of_shard = words[-1].startswith(inside)
        elif words[0] == "Rss:":
            total += int(words[1]) * 1024
            shards += int(words[1]) * 1024 * of_shard
        elif words[0] == "Anonymous:":
            anonymous += int(words[1]) * 1024
    return Resident(total, anonymous, shards)


def peak_bytes() -> int:
    """The largest resident size that this process ever had."""
    # The resource module's figure would include the program that this process was forked from.
    if _STATUS.exists():
        for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def in_child(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a module-level function in a fresh interpreter and return its result.

    The interpreter is started anew rather than forked, so it owns none of this one's memory.
    Whatever the function raises is raised here.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(function, *args, **kwargs).result()

"""Facts and quick measurements of this machine, for ``deepinfer-neuron doctor``."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

_FEATURES = frozenset(
    {
        "amx_bf16",
        "amx_int8",
        "amx_tile",
        "asimd",
        "avx2",
        "avx512_bf16",
        "avx512_vnni",
        "avx512f",
        "avx_vnni",
        "bf16",
        "fma",
        "i8mm",
        "sve",
    }
)
_MATMUL_SIZE = 512
_COPY_BYTES = 1 << 28
_MEASURE_SECONDS = 0.3


@dataclass(frozen=True)
class Cpu:
    """The processor: its name and those of its vector features that matter here, sorted."""

    model: str
    features: tuple[str, ...]


def read_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> Cpu:
    """The processor as the kernel describes it; falls back on the architecture's name."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    entries: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        entries.setdefault(key.strip(), value.strip())
    flags = entries.get("flags", entries.get("Features", ""))
    return Cpu(
        model=entries.get("model name") or platform.machine(),
        features=tuple(sorted(_FEATURES.intersection(flags.split()))),
    )


def matmul_gflops() -> float:
    """Speed of a bf16 matrix product in 10^9 floating-point operations per second."""
    a = torch.ones(_MATMUL_SIZE, _MATMUL_SIZE, dtype=torch.bfloat16)
    b = torch.ones_like(a)
    return 2 * _MATMUL_SIZE**3 / _best_seconds(lambda: a @ b) / 1e9


def copy_gbytes_per_second() -> float:
    """Bytes read plus bytes written per second of a large memory copy, in 10^9."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return 2 * _COPY_BYTES / _best_seconds(lambda: target.copy_(source)) / 1e9


def _best_seconds(work: Callable[[], object]) -> float:
    """Shortest duration of ``work`` among the calls that fit a fixed time, after one warm-up."""
    work()
    best = float("inf")
    end = time.perf_counter() + _MEASURE_SECONDS
    while True:
        start = time.perf_counter()
        work()
        now = time.perf_counter()
        best = min(best, now - start)
        if now >= end:
            return best

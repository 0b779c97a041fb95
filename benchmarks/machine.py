"""What this machine is, and how fast its memory and its matrix products are."""

from __future__ import annotations

import os
import platform
import statistics
from dataclasses import dataclass

import psutil
import torch
import torch.nn.functional as F

from benchmarks.timing import Budget, durations
from deepinfer_neuron.cli.probe import read_cpu


@dataclass(frozen=True)
class ProbeSizes:
    """How large the arrays of the measurements are.

    Attributes:
        copy_bytes: size of each of the two arrays of the copy.
        vector_width: rows and columns of the matrix that is multiplied by a vector.
        matmul_width: rows and columns of the factors of the matrix product.
        budget: repetitions of each measurement.
    """

    copy_bytes: int
    vector_width: int
    matmul_width: int
    budget: Budget


FULL_PROBE = ProbeSizes(1 << 29, 8192, 2048, Budget(9, 4.0))
"""Half a GiB per array and a matrix of 128 MiB: far more than any cache holds."""

QUICK_PROBE = ProbeSizes(1 << 24, 1024, 256, Budget(3, 0.2))
"""Small arrays for a try-out; the figures say little."""


@dataclass(frozen=True)
class Machine:
    """Facts about the machine; speeds are medians, in 10^9 per second."""

    cpu: str
    features: tuple[str, ...]
    cores: int
    threads: int
    """Threads that torch uses."""
    memory_bytes: int
    system: str
    python: str
    torch: str
    load_average: float
    """Processes that ran or waited to run in the minute before, this one included."""
    copy_gbytes: float
    """Bytes read plus bytes written by a large copy."""
    vector_gbytes: float
    """Weight bytes read by a bf16 matrix times one vector: what one token can hope for."""
    matmul_gflops: float
    """Floating-point operations of a square bf16 matrix product."""


def examine(sizes: ProbeSizes, threads: int) -> Machine:
    """Look at the machine and measure it with that many threads."""
    load = os.getloadavg()[0]
    torch.set_num_threads(threads)
    cpu = read_cpu()
    return Machine(
        cpu=cpu.model,
        features=cpu.features,
        cores=os.cpu_count() or 1,
        threads=threads,
        memory_bytes=int(psutil.virtual_memory().total),
        system=platform.platform(),
        python=platform.python_version(),
        torch=torch.__version__,
        load_average=load,
        copy_gbytes=_copy_gbytes(sizes),
        vector_gbytes=_vector_gbytes(sizes),
        matmul_gflops=_matmul_gflops(sizes),
    )


def _copy_gbytes(sizes: ProbeSizes) -> float:
    source = torch.ones(sizes.copy_bytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    seconds = statistics.median(durations(lambda: target.copy_(source), sizes.budget))
    return 2 * sizes.copy_bytes / seconds / 1e9


def _vector_gbytes(sizes: ProbeSizes) -> float:
    weight = torch.ones(sizes.vector_width, sizes.vector_width, dtype=torch.bfloat16)
    vector = torch.ones(1, sizes.vector_width, dtype=torch.bfloat16)
    seconds = statistics.median(durations(lambda: F.linear(vector, weight), sizes.budget))
    return weight.nbytes / seconds / 1e9


def _matmul_gflops(sizes: ProbeSizes) -> float:
    left = torch.ones(sizes.matmul_width, sizes.matmul_width, dtype=torch.bfloat16)
    right = torch.ones_like(left)
    seconds = statistics.median(durations(lambda: left @ right, sizes.budget))
    return 2.0 * sizes.matmul_width**3 / seconds / 1e9

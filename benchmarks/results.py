"""What the measurements give back; all times in seconds, all sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.machine import Machine
from benchmarks.memory import Resident
from benchmarks.traffic import StepBytes
from benchmarks.workload import Sizes


@dataclass(frozen=True)
class Load:
    """Time until a model is ready.

    Attributes:
        cold: with the files dropped from the page cache before, as far as the system does that.
        warm: median of later loads in the same process.
    """

    cold: float
    warm: float


@dataclass(frozen=True)
class Prefill:
    """One prompt, alone.

    Attributes:
        tokens: prompt length.
        seconds: each repetition.
        median: of these.
        tokens_per_second: of the median.
        flops_per_token: floating-point operations that the model asks for.
        gflops: operations per second, in 10^9.
    """

    tokens: int
    seconds: tuple[float, ...]
    median: float
    tokens_per_second: float
    flops_per_token: float
    gflops: float


@dataclass(frozen=True)
class Decode:
    """Steps that decode one token for each of ``batch`` sequences.

    Attributes:
        batch: sequences.
        seconds: each step.
        median: of these.
        tokens_per_second: all sequences together, of the median.
        experts_per_layer: distinct routed experts of a step, mean over layers and recorded steps.
        step_bytes: what one step reads.
        bytes_per_token: the same, divided by ``batch``.
        gbytes: bytes read per second, in 10^9.
    """

    batch: int
    seconds: tuple[float, ...]
    median: float
    tokens_per_second: float
    experts_per_layer: float
    step_bytes: StepBytes
    bytes_per_token: float
    gbytes: float


@dataclass(frozen=True)
class Speed:
    """Prefill and decode with one arithmetic."""

    arithmetic: str
    prefill: Prefill
    decode: tuple[Decode, ...]


@dataclass(frozen=True)
class Touched:
    """Resident memory after some decode steps from an empty cache.

    Attributes:
        steps: decoded tokens.
        experts: the routed experts used so far, per layer.
        bytes: distinct bytes of weights, table rows and cache records that the steps read.
        resident: memory afterwards.
    """

    steps: int
    experts: tuple[tuple[int, ...], ...]
    bytes: float
    resident: Resident

    @property
    def expert_count(self) -> int:
        """Routed experts used so far, all layers together."""
        return sum(len(layer) for layer in self.experts)


@dataclass(frozen=True)
class Memory:
    """Resident memory of one process at its stages.

    Attributes:
        arithmetic: free or fixed.
        base: after importing torch and the package.
        loaded: once the weights are ready and the caches allocated.
        caches: size of the caches.
        touched: after one decode step, and after several.
        prefilled: after a prompt, which meets nearly every expert.
        peak: the largest ever.
    """

    arithmetic: str
    base: Resident
    loaded: Resident
    caches: int
    touched: tuple[Touched, ...]
    prefilled: Resident
    peak: int

    @property
    def allowance(self) -> float:
        """Base, caches, and 1.2 times what the first step touched."""
        return self.base.total + self.caches + 1.2 * self.touched[0].bytes


@dataclass(frozen=True)
class WeightsResult:
    """Everything about one way to hold the weights."""

    weights: str
    load: Load
    memory: tuple[Memory, ...]
    speed: tuple[Speed, ...]


@dataclass(frozen=True)
class ModelResult:
    """Everything about one checkpoint."""

    preset: str
    checkpoint_bytes: int
    experts: int
    """Routed experts, summed over the layers."""
    layers: int
    weights: tuple[WeightsResult, ...]


@dataclass(frozen=True)
class Report:
    """One run of the benchmark."""

    machine: Machine
    sizes: Sizes
    models: tuple[ModelResult, ...]

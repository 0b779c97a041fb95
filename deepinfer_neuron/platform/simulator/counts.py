"""What the simulated device counts, in total and for each step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deepinfer_neuron.platform.simulator.graph_size import GraphSize


@dataclass
class Counts:
    """Running counts.

    Attributes:
        uploads, downloads: copies from and to the host.
        blocking: those of both that waited for the whole queue.
        upload_bytes, download_bytes: what they moved.
        eager: operators launched outside regions.
        regions: regions launched.
        graphs: graphs compiled.
        collectives: collective operations, inside regions and outside.
        collective_bytes: what they moved.
        flops: operations of the matrix products in regions.
        graph_bytes: inputs and outputs of regions.
        converted: elements of packed weights that regions decoded.
        by_operator, by_region: launches by name.
    """

    uploads: int = 0
    downloads: int = 0
    blocking: int = 0
    upload_bytes: int = 0
    download_bytes: int = 0
    eager: int = 0
    regions: int = 0
    graphs: int = 0
    collectives: int = 0
    collective_bytes: int = 0
    flops: int = 0
    graph_bytes: int = 0
    converted: int = 0
    by_operator: dict[str, int] = field(default_factory=dict)
    by_region: dict[str, int] = field(default_factory=dict)

    def minus(self, before: Counts) -> Counts:
        """What was counted since ``before``."""
        parts: dict[str, Any] = {}
        for name, now in vars(self).items():
            then = getattr(before, name)
            parts[name] = _difference(now, then) if isinstance(now, dict) else now - then
        return Counts(**parts)

    def plus(self, other: Counts) -> Counts:
        """Both together."""
        parts: dict[str, Any] = {}
        for name, mine in vars(self).items():
            more = getattr(other, name)
            parts[name] = _sum(mine, more) if isinstance(mine, dict) else mine + more
        return Counts(**parts)

    def copy(self) -> Counts:
        """These counts, which go on by themselves."""
        return dataclasses.replace(
            self, by_operator=dict(self.by_operator), by_region=dict(self.by_region)
        )


def add_one(counts: dict[str, int], name: str) -> None:
    """Count ``name`` once more."""
    counts[name] = counts.get(name, 0) + 1


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


def _difference(now: Mapping[str, int], then: Mapping[str, int]) -> dict[str, int]:
    return {name: n - then.get(name, 0) for name, n in now.items() if n > then.get(name, 0)}


@dataclass(frozen=True)
class Violation:
    """A rule that was broken: its id, what broke it, and where."""

    rule: str
    detail: str
    where: str


@dataclass(frozen=True)
class StepReport:
    """One step.

    Attributes:
        label: what the step was, as its beginner named it.
        counts: of this step alone.
        memory: bytes allocated at its end.
        memory_peak: most bytes allocated at one time during it.
        sequence: regions with their signatures and collectives, in order.
        violations: rules that were broken; those of one cause are listed once.
    """

    label: str
    counts: Counts
    memory: int
    memory_peak: int
    sequence: tuple[str, ...]
    violations: tuple[Violation, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class StepKind:
    """All steps of one label: how many there were, and their counts together."""

    label: str
    steps: int
    counts: Counts


@dataclass(frozen=True)
class GraphReport:
    """One compiled graph.

    Attributes:
        region: class, method and kind.
        signature: shapes and dtypes of its arguments.
        size: what it computes, moves and needs.
        text: digest of the graph, equal on ranks that share one compilation.
    """

    region: str
    signature: str
    size: GraphSize
    text: str


@dataclass(frozen=True)
class SimulatorReport:
    """Everything since the device was switched on; memory in bytes."""

    mode: str
    total: Counts
    steps: int
    kinds: tuple[StepKind, ...]
    last_step: StepReport | None
    graphs: tuple[GraphReport, ...]
    memory: int
    memory_peak: int
    memory_usable: int
    violations: tuple[Violation, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return dataclasses.asdict(self)

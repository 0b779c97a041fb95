"""How long a step takes on a Trainium core: an estimate, never a measurement.

    step   = max(host, device) + drains * drain time     if the host runs ahead of the device
           = host + device + idle + drains * drain time  if it waits for every region
    device = sum over regions of (max(bytes / BW, flops / F, converted * passes / VE) + switch)
             + sum over collectives of (latency + traffic / link bandwidth)
    host   = launches * launch time + eager operators * their time + Python
    idle   = launches * idle time of a synchronous call, which contains the launch

The three engines of a core work side by side within a region, so the slowest one decides. Reading
weights takes HBM bandwidth (BW), products take the matrix unit (F), and turning stored codes into
bf16 takes passes of the vector engine (VE): one to cast, one to scale.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

LABEL = "estimate, not measured"
"""Stands next to every number of this module that is shown to a person."""

GIB = 2**30

Bound = Literal["memory", "compute", "conversion"]
"""The engine that decides how long a region takes."""


@dataclass(frozen=True)
class CoreSpec:
    """Rates and fixed costs of one logical core. Bytes, seconds, and units per second.

    Attributes:
        name: what the numbers belong to.
        hbm_bytes: memory of the core.
        bandwidth: of that memory.
        bf16_flops: of the matrix unit.
        fp32_flops: of the matrix unit.
        vector_elements: elements that the vector engines pass over.
        graph_switch: from one loaded graph to the next.
        launch: host time to enqueue a graph while the device works.
        synchronous_idle: what the device idles per graph if the host waits for each.
        eager_operator: host and device time of an operator outside any region.
        collective_latency: of an exchange between all cores of an instance.
        link_bandwidth: of a core's share of the links.
        drain: a copy in the middle of a step that waits for the whole queue.
    """

    name: str
    hbm_bytes: int
    bandwidth: float
    bf16_flops: float
    fp32_flops: float
    vector_elements: float
    graph_switch: float
    launch: float
    synchronous_idle: float
    eager_operator: float
    collective_latency: float
    link_bandwidth: float
    drain: float


def trn2_core(bandwidth: float = 0.725e12) -> CoreSpec:
    """A logical core of Trainium2: two physical cores that share one bank of memory.

    Published: a quarter of a chip's 96 GiB, 2.9 TB/s, 667 and 181 TFLOPS and 1,024 GB/s of links;
    vector engines of 2 x 0.96 GHz x 256 elements. Reported by others: 0.437 ms idle per synchronous
    call, 0.07 ms per eager operator (taken for a launch too), 20 to 100 us for a graph switch and
    for a small exchange between 64 cores (their geometric mean is taken), 50 to 100 ms per drain
    (the lower end is taken).

    Args:
        bandwidth: the published one; 0.58e12 was observed for a plain sum.
    """
    return CoreSpec(
        name="trn2 logical core",
        hbm_bytes=24 * GIB,
        bandwidth=bandwidth,
        bf16_flops=166.75e12,
        fp32_flops=45.25e12,
        vector_elements=2 * 0.96e9 * 256,
        graph_switch=45e-6,
        launch=70e-6,
        synchronous_idle=437e-6,
        eager_operator=70e-6,
        collective_latency=45e-6,
        link_bandwidth=256e9,
        drain=50e-3,
    )


OBSERVED_BANDWIDTH = 0.58e12
"""Bytes per second that a core of Trainium2 was seen to reach."""


@dataclass(frozen=True)
class RegionCost:
    """What one launch of a region moves and computes.

    Attributes:
        name: of the region.
        count: launches of it.
        bytes: read and written in HBM per launch.
        flops: of the matrix unit per launch, in bf16.
        converted_elements: stored codes turned into bf16 per launch.
        passes: of the vector engine per converted element.
    """

    name: str
    count: int
    bytes: int
    flops: int
    converted_elements: int = 0
    passes: int = 2

    def seconds(self, core: CoreSpec) -> float:
        """Time of one launch, without the switch to it."""
        return max(self._terms(core).values())

    def bound(self, core: CoreSpec) -> Bound:
        """The engine that decides."""
        terms = self._terms(core)
        return max(terms, key=lambda bound: terms[bound])

    def _terms(self, core: CoreSpec) -> dict[Bound, float]:
        return {
            "memory": self.bytes / core.bandwidth,
            "compute": self.flops / core.bf16_flops,
            "conversion": self.converted_elements * self.passes / core.vector_elements,
        }


@dataclass(frozen=True)
class CollectiveCost:
    """Exchanges of one size: ``count`` all-reduces of ``bytes`` between ``ranks`` cores."""

    count: int
    bytes: int
    ranks: int

    def seconds(self, core: CoreSpec) -> float:
        """Time of one: nothing alone, else latency and twice the foreign share over the links."""
        if self.ranks == 1:
            return 0.0
        traffic = 2 * self.bytes * (self.ranks - 1) / self.ranks
        return core.collective_latency + traffic / core.link_bandwidth


@dataclass(frozen=True)
class HostCost:
    """What the host does in a step.

    Attributes:
        eager_operators: operators launched outside regions.
        python: seconds of Python that no launch overlaps.
        drains: copies in the middle of the step, each of which waits for the queue.
        synchronous: the host waits for every region before it launches the next.
    """

    eager_operators: int = 0
    python: float = 0.0
    drains: int = 0
    synchronous: bool = False


@dataclass(frozen=True)
class RegionTime:
    """Estimated seconds of all launches of a region, and what decides them."""

    name: str
    count: int
    seconds: float
    bound: Bound


@dataclass(frozen=True)
class Estimate:
    """Estimated seconds of a step by term. Estimate, not measured."""

    regions: tuple[RegionTime, ...]
    graph_switch: float
    collectives: float
    host: float
    idle: float
    drains: float
    synchronous: bool = False
    label: str = field(default=LABEL, init=False)

    @property
    def device(self) -> float:
        """Regions, switches between them, collectives."""
        return sum(r.seconds for r in self.regions) + self.graph_switch + self.collectives

    @property
    def hidden_host(self) -> float:
        """Host time that the device covers."""
        return 0.0 if self.synchronous else min(self.host, self.device)

    @property
    def total(self) -> float:
        """The step."""
        return self.host - self.hidden_host + self.device + self.idle + self.drains

    @property
    def launches(self) -> int:
        """Regions launched."""
        return sum(region.count for region in self.regions)


def estimate(
    regions: Iterable[RegionCost],
    collectives: Iterable[CollectiveCost],
    host: HostCost,
    core: CoreSpec,
) -> Estimate:
    """Time of a step; see this module's formula.

    Args:
        regions: everything that is launched.
        collectives: exchanges, inside regions or not.
        host: the host's part.
        core: rates.
    """
    times = tuple(
        RegionTime(r.name, r.count, r.count * r.seconds(core), r.bound(core)) for r in regions
    )
    launches = sum(time.count for time in times)
    work = host.eager_operators * core.eager_operator + host.python
    return Estimate(
        regions=times,
        graph_switch=launches * core.graph_switch,
        collectives=sum(c.count * c.seconds(core) for c in collectives),
        host=work if host.synchronous else launches * core.launch + work,
        idle=launches * core.synchronous_idle if host.synchronous else 0.0,
        drains=host.drains * core.drain,
        synchronous=host.synchronous,
    )


@dataclass(frozen=True)
class Figure:
    """A reported time of some system, and what that system is assumed to have done for it."""

    name: str
    reported: float
    regions: tuple[RegionCost, ...]
    collectives: tuple[CollectiveCost, ...]
    host: HostCost


@dataclass(frozen=True)
class Calibration:
    """How much of a reported time the model accounts for, in seconds."""

    figure: Figure
    estimate: Estimate

    @property
    def explained(self) -> float:
        """What the model computes; more than was reported if its assumptions are too harsh."""
        return self.estimate.total

    @property
    def unexplained(self) -> float:
        """The rest, which only a trace on a device can attribute."""
        return self.figure.reported - self.explained


def calibrate(figures: Iterable[Figure], core: CoreSpec) -> tuple[Calibration, ...]:
    """The model next to reported times; it is not fitted to them."""
    return tuple(
        Calibration(figure, estimate(figure.regions, figure.collectives, figure.host, core))
        for figure in figures
    )

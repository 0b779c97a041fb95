"""Estimated time of a decode step of a configuration, with its composition. Not a measurement.

The work of every region (:mod:`deepinfer_neuron.engine.step_work`), the choice of which matrices to
expand (:mod:`deepinfer_neuron.model.weight_path`) and the model of a core
(:mod:`deepinfer_neuron.platform.simulator.cost`) come together here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deepinfer_neuron.checkpoint.config import ModelConfig
from deepinfer_neuron.engine.layout import Layout
from deepinfer_neuron.engine.step_work import (
    ACTIVATIONS,
    CACHE_READS,
    PASSES,
    RegionWork,
    StepWork,
    Work,
    step_work,
)
from deepinfer_neuron.model.rank_weights import COMPONENTS, Component
from deepinfer_neuron.model.shapes import PassShape
from deepinfer_neuron.model.weight_path import WeightPath, choose_weight_path
from deepinfer_neuron.platform.simulator.cost import (
    Bound,
    CoreSpec,
    Estimate,
    HostCost,
    RegionCost,
    estimate,
)
from deepinfer_neuron.runner.worker import blocks_for


@dataclass(frozen=True)
class ComponentTime:
    """A component's share of a step.

    Attributes:
        name: of the component.
        bytes: moved in HBM.
        flops: of the matrix unit.
        converted_elements: stored codes turned into bf16.
        seconds: share of its regions' time, in proportion to what decides that time.
    """

    name: Component
    bytes: int
    flops: int
    converted_elements: int
    seconds: float


@dataclass(frozen=True)
class Forecast:
    """An estimated step.

    Attributes:
        shape: of the backbone's pass.
        components: shares of the regions' time; they add up to it.
        launches: regions launched, by name.
        collectives: exchanges between cores.
        path: which matrices are expanded.
        estimate: all terms.
    """

    shape: PassShape
    components: tuple[ComponentTime, ...]
    launches: tuple[tuple[str, int], ...]
    collectives: int
    path: WeightPath
    estimate: Estimate

    @property
    def milliseconds(self) -> float:
        """The whole step."""
        return self.estimate.total * 1e3


def decode_shape(
    config: ModelConfig, layout: Layout, sequences: int = 1, context: int = 1
) -> PassShape:
    """The pass of a decode step with ``context`` tokens per sequence before it."""
    blocks = min(blocks_for(context + 1 + layout.nextn), blocks_for(layout.max_model_len))
    return layout.ladder(config).decode_shape(sequences, layout.nextn, blocks)


def forecast(
    config: ModelConfig,
    layout: Layout,
    shape: PassShape,
    spare_bytes: int,
    core: CoreSpec,
    path: WeightPath | None = None,
) -> Forecast:
    """Estimate a step whose matrices are expanded as far as that helps and fits.

    Args:
        config: the model.
        layout: how it is spread.
        shape: of the backbone's pass.
        spare_bytes: memory of a core that expanded matrices may take.
        core: rates.
        path: which matrices are expanded, if another step has decided that already.
    """
    work = step_work(config, layout, shape)
    loads = [region.load() for region in work.regions]
    if path is None:
        path = choose_weight_path(loads, spare_bytes, core)
    costs = [load.cost(path.families) for load in loads]
    # An embedding in host memory takes a download of the ids and an upload of the rows.
    host = HostCost(drains=int(layout.host_embed))
    grouped = _grouped(costs)
    return Forecast(
        shape=shape,
        components=_components(work, costs, path.families, core),
        launches=tuple(_launches(work.regions).items()),
        collectives=sum(cost.count for cost in work.collectives if cost.ranks > 1),
        path=path,
        estimate=estimate(grouped, work.collectives, host, core),
    )


def _launches(regions: Iterable[RegionWork]) -> dict[str, int]:
    """How often each region is launched, in order of first appearance."""
    counts: dict[str, int] = {}
    for region in regions:
        counts[region.name] = counts.get(region.name, 0) + 1
    return counts


def _grouped(costs: Iterable[RegionCost]) -> list[RegionCost]:
    """Equal launches as one cost with a count."""
    counts: dict[RegionCost, int] = {}
    for cost in costs:
        counts[cost] = counts.get(cost, 0) + 1
    return [
        RegionCost(c.name, n, c.bytes, c.flops, c.converted_elements, c.passes)
        for c, n in counts.items()
    ]


def _components(
    work: StepWork, costs: Iterable[RegionCost], families: frozenset[str], core: CoreSpec
) -> tuple[ComponentTime, ...]:
    """Every component's work and its share of the regions' time."""
    totals: dict[Component, Work] = {}
    seconds: dict[Component, float] = {}
    for region, cost in zip(work.regions, costs, strict=True):
        bound, time = cost.bound(core), cost.seconds(core)
        parts = _parts(region, families)
        whole = sum(_measure(part, bound) for part in parts.values())
        for name, part in parts.items():
            total = totals.setdefault(name, Work())
            total.bytes += part.bytes
            total.flops += part.flops
            total.converted += part.converted
            share = _measure(part, bound) / whole if whole else 0.0
            seconds[name] = seconds.get(name, 0.0) + time * share
    order = (*COMPONENTS, CACHE_READS, ACTIVATIONS)
    return tuple(
        ComponentTime(name, totals[name].bytes, totals[name].flops, totals[name].converted,
                      seconds[name])
        for name in order
        if name in totals
    )  # fmt: skip


def _parts(region: RegionWork, families: frozenset[str]) -> dict[Component, Work]:
    """A region's work by component, its matrices included."""
    parts = {
        name: Work(work.bytes, work.flops, work.converted) for name, work in region.work.items()
    }
    for name, matrix in region.matrices:
        part = parts[name]
        if matrix.family in families:
            part.bytes += matrix.expanded_bytes
        else:
            part.bytes += matrix.packed_bytes
            part.converted += matrix.values
    return parts


def _measure(work: Work, bound: Bound) -> int:
    """What of a component counts for the engine that decides."""
    if bound == "memory":
        return work.bytes
    return work.flops if bound == "compute" else work.converted * PASSES

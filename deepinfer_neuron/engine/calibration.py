"""How far the performance model explains times that were reported for another engine.

A port of DeepInfer to Trainium was reported with a handful of times for the released model on 64
cores, 512 tokens in and 128 out. The model is not fitted to them. What that port did is assumed
from its own notes, once for all figures (:class:`PortHabits`); the part of a time that these
assumptions do not reach is *unexplained*, and only a trace on a device could attribute it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deepinfer_neuron.checkpoint.config import ModelConfig
from deepinfer_neuron.engine.layout import Layout, make_layout
from deepinfer_neuron.engine.step_work import step_work
from deepinfer_neuron.model.shapes import PassShape
from deepinfer_neuron.platform.simulator.cost import (
    LABEL,
    Calibration,
    CoreSpec,
    Figure,
    HostCost,
    RegionCost,
    calibrate,
    trn2_core,
)


@dataclass(frozen=True)
class PortHabits:
    """What the port is assumed to have done.

    Attributes:
        converted_bytes: written and read again per weight value, since chunks were converted to
            fp32 in memory.
        regions_per_region: graphs where this engine launches one: ten per layer, each awaited.
        eager_operators: outside graphs in a step: metadata, casts, sampling.
        draft_operators: more of them before the chain of drafts became one graph.
    """

    converted_bytes: int = 8
    regions_per_region: int = 5
    eager_operators: int = 1000
    draft_operators: int = 230


@dataclass(frozen=True)
class _Reported:
    """A reported time in seconds, and the state of the port at that time."""

    name: str
    seconds: float
    rows: int
    nextn: int
    eager_chain: bool
    host_embedding: bool


_CONTEXT_BLOCKS = 128
"""Block table of 16384 tokens, the narrowest that the model allows."""

_TOKENS_PER_STEP = 1.025 / 0.2682
"""Accepted tokens of a step: the reported step over the reported time per token."""

_REPORTED = (
    _Reported("step without drafts, 433 ms", 0.433, 1, 0, False, True),
    _Reported("step of 1025 ms, TPOT 268.2 ms", 1.025, 8, 5, True, True),
    _Reported(
        "TPOT 264.0 ms: chain of drafts in one graph", 0.264 * _TOKENS_PER_STEP, 8, 5, False, True
    ),
    _Reported("step of 907 ms, TPOT 234.7 ms: embedding on device", 0.907, 8, 5, False, False),
    _Reported("TTFT 5.44 s", 5.44, 512, 5, False, True),
    _Reported("TTFT 5.01 s: embedding on device", 5.01, 512, 5, False, False),
)


def calibration(
    config: ModelConfig, core: CoreSpec | None = None, habits: PortHabits | None = None
) -> tuple[Calibration, ...]:
    """The reported times next to what the model makes of them.

    Args:
        config: of the released model.
        core: rates; Trainium2 if left out.
        habits: assumptions about the port.
    """
    core = trn2_core() if core is None else core
    habits = PortHabits() if habits is None else habits
    return calibrate([_figure(config, reported, core, habits) for reported in _REPORTED], core)


def _figure(config: ModelConfig, reported: _Reported, core: CoreSpec, habits: PortHabits) -> Figure:
    layout = make_layout(
        {
            "cores": "64",
            "nextn": str(reported.nextn),
            "max_num_seqs": "1",
            "max_model_len": str(_CONTEXT_BLOCKS * 128),
        },
        config,
    )
    outputs = 1 if reported.rows > 8 else min(reported.rows, 1 + reported.nextn)
    shape = PassShape(1, reported.rows, _CONTEXT_BLOCKS, outputs)
    work = step_work(config, layout, shape)
    regions = [region.load().cost() for region in work.regions]
    operators = habits.eager_operators + habits.draft_operators * reported.eager_chain
    return Figure(
        name=reported.name,
        reported=reported.seconds,
        regions=tuple(_as_in_the_port(regions, core, habits)),
        collectives=work.collectives,
        host=HostCost(
            eager_operators=operators,
            drains=_embeddings(layout) if reported.host_embedding else 0,
            synchronous=True,
        ),
    )


def _embeddings(layout: Layout) -> int:
    """Look-ups of a step, each of which drained the queue: of its rows, and of the drafts."""
    return 1 + (layout.nextn > 0)


def _as_in_the_port(
    regions: Iterable[RegionCost], core: CoreSpec, habits: PortHabits
) -> Iterable[RegionCost]:
    """Regions in smaller pieces that multiply in fp32 what they converted through memory."""
    pieces = habits.regions_per_region
    for region in regions:
        moved = region.bytes + habits.converted_bytes * region.converted_elements
        flops = int(region.flops * core.bf16_flops / core.fp32_flops)
        yield RegionCost(
            region.name, pieces, moved // pieces, flops // pieces,
            region.converted_elements // pieces, region.passes,
        )  # fmt: skip


def calibration_table(found: Iterable[Calibration]) -> str:
    """A Markdown table of reported, explained and unexplained milliseconds by term."""
    heading = (
        "reported", "regions", "switches", "exchanges", "host", "idle", "drains", "explained",
        "unexplained",
    )  # fmt: skip
    lines = [
        f"Explained: {LABEL}. All numbers in ms.",
        "",
        f"| figure | {' | '.join(heading)} |",
        "|---|" + "---:|" * len(heading),
    ]
    for one in found:
        step = one.estimate
        terms = (
            one.figure.reported, sum(r.seconds for r in step.regions), step.graph_switch,
            step.collectives, step.host, step.idle, step.drains, one.explained, one.unexplained,
        )  # fmt: skip
        cells = " | ".join(f"{1e3 * term:.0f}" for term in terms)
        lines.append(f"| {one.figure.name} | {cells} |")
    return "\n".join(lines)

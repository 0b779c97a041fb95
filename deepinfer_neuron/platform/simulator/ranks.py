"""Steps of several ranks, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_neuron.errors import DeviceRuleError, PlatformError
from deepinfer_neuron.platform.simulator.counts import SimulatorReport, StepReport
from deepinfer_neuron.platform.simulator.rules import RULES


def compare_steps(steps: Sequence[StepReport]) -> None:
    """Check that all ranks did the same in one step.

    Args:
        steps: the report of every rank for the same step, by rank.

    Raises:
        PlatformError: no report was given.
        DeviceRuleError: a rank launched another region or shape (G19), or another collective
            (C08).
    """
    if not steps:
        raise PlatformError("there are no reports of ranks to compare.")
    first = steps[0].sequence
    for rank, step in enumerate(steps):
        for position in range(max(len(first), len(step.sequence))):
            here, there = (
                entries[position] if position < len(entries) else "nothing"
                for entries in (first, step.sequence)
            )
            if here != there:
                rule = "C08" if any(map(_is_collective, (here, there))) else "G19"
                detail = f"launch {position}: rank 0 has {here}, rank {rank} has {there}"
                raise _error(rule, detail)


def compare_graphs(reports: Sequence[SimulatorReport]) -> None:
    """Check that all ranks captured the same graphs.

    Args:
        reports: the report of every rank, by rank.

    Raises:
        PlatformError: no report was given.
        DeviceRuleError: the graph of a region differs between two ranks (G05).
    """
    if not reports:
        raise PlatformError("there are no reports of ranks to compare.")
    texts = {(graph.region, graph.signature): graph.text for graph in reports[0].graphs}
    for rank, report in enumerate(reports):
        for graph in report.graphs:
            known = texts.get((graph.region, graph.signature))
            if known is not None and known != graph.text:
                detail = f"{graph.region} with {graph.signature} on ranks 0 and {rank}"
                raise _error("G05", detail)


def _is_collective(entry: str) -> bool:
    return entry.startswith(("c10d.", "_c10d_functional."))


def _error(rule: str, detail: str) -> DeviceRuleError:
    meaning = RULES[rule]
    return DeviceRuleError(rule, meaning.title, detail, "", meaning.workaround)

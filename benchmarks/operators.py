"""How fast the operators are, and which of them a decode step of the engine waits for.

Every operator is compared with a plain eager formulation of the same computation, in turns and on
the same arguments; both must agree before anything is timed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.decode_profile import Profile, profile
from benchmarks.machine import FULL_PROBE, QUICK_PROBE, Machine, ProbeSizes, examine
from benchmarks.markers import around, write_between
from benchmarks.operator_cases import FULL, QUICK, Formulation, Sizes, check
from benchmarks.operator_table import CASES
from benchmarks.report import table
from benchmarks.timing import Budget, repetitions
from deepinfer_neuron.checkpoint.tiny import PRESETS, write_checkpoint
from deepinfer_neuron.errors import DeepInferNeuronError

NAME = "operators"
SLOWEST = 10


@dataclass(frozen=True)
class Plan:
    """How much a run measures.

    Attributes:
        sizes: of the operators' arguments.
        probe: of the machine's measurements.
        budget: repetitions of both formulations.
        batches: requests of the profiled decode steps.
        tokens: decoded per request.
    """

    sizes: Sizes
    probe: ProbeSizes
    budget: Budget
    batches: tuple[int, ...]
    tokens: int


FULL_PLAN = Plan(FULL, FULL_PROBE, Budget(101, 0.3), (1, 8), 33)
QUICK_PLAN = Plan(QUICK, QUICK_PROBE, Budget(2, 0.01), (1, 2), 4)


@dataclass(frozen=True)
class Timing:
    """One operator at one number of rows; ``bytes`` are those of the arguments and results."""

    seconds: float
    plain_seconds: float
    bytes: int
    note: str

    @property
    def ratio(self) -> float:
        """How many times as long the plain formulation takes."""
        return self.plain_seconds / self.seconds

    @property
    def gbytes(self) -> float:
        """10^9 bytes per second that have to be read or written."""
        return self.bytes / self.seconds / 1e9


@dataclass(frozen=True)
class Results:
    """Everything that a run measured."""

    machine: Machine
    rows: tuple[int, ...]
    timings: Mapping[str, Sequence[Timing]]
    preset: str
    profiles: Sequence[Profile]


def medians(works: Sequence[Formulation], budget: Budget) -> list[float]:
    """Median seconds of each, called in turns, so that a slower phase of the machine meets all."""
    taken: list[list[float]] = [[] for _ in works]
    end = time.perf_counter() + budget.seconds
    while not taken[0] or (len(taken[0]) < budget.times and time.perf_counter() < end):
        for work, seconds in zip(works, taken, strict=True):
            seconds += repetitions(work, Budget(1, 0.0))
    return [statistics.median(seconds) for seconds in taken]


@torch.inference_mode()
def measure(name: str, sizes: Sizes, budget: Budget) -> list[Timing]:
    """One operator at every number of rows.

    Raises:
        Disagreement: the two formulations give different results.
    """
    timings = []
    for rows in sizes.rows:
        case = CASES[name](rows, sizes)
        buffered = check(f"{name}, {rows} rows", case)
        ours, plain = medians((case.ours, buffered), budget)
        timings.append(Timing(ours, plain, case.bytes, case.note))
    return timings


def render(results: Results) -> str:
    """The results as Markdown."""
    machine = results.machine
    facts = (
        f"- {machine.cpu}, {machine.cores} cores, {machine.threads} thread(s) used; load average "
        f"{machine.load_average:.1f} when the run began; torch {machine.torch}\n"
        f"- copy: {machine.copy_gbytes:.1f} GB/s read and written\n"
        "- a cell holds the median time in µs, and in parentheses how many times as long the plain "
        "formulation takes: below 1x it is the faster one\n"
        "- bandwidth counts every byte once that has to be read or written; small arguments stay "
        "in cache, where it can exceed that of the copy"
    )
    parts = [facts, _operators(results), _notes(results.timings)]
    parts += [_slowest(results.preset, item) for item in results.profiles]
    return "\n\n".join(part for part in parts if part) + "\n"


def _operators(results: Results) -> str:
    """The table of all operators."""
    last = results.rows[-1]
    head = ["operator", *(f"{rows} row{'s' * (rows > 1)}" for rows in results.rows)]
    head += [f"GB/s at {last} rows", "of copy"]
    body = []
    for name, cells in results.timings.items():
        row = [f"`{name}`", *map(_cell, cells)]
        speed = cells[-1].gbytes
        row += [f"{speed:.2f}", f"{100 * speed / results.machine.copy_gbytes:.0f} %"]
        body.append(row)
    return table(head, body, 1)


def _cell(timing: Timing) -> str:
    """Time and ratio; a small ratio gets one more digit."""
    ratio = timing.ratio
    return f"{timing.seconds * 1e6:.0f} ({ratio:.{1 if ratio >= 1.0 else 2}f}x)"


def _notes(timings: Mapping[str, Sequence[Timing]]) -> str:
    """Which cases are smaller than the released model."""
    operators: dict[str, list[str]] = {}
    for name, cells in timings.items():
        for note in dict.fromkeys(cell.note for cell in cells if cell.note):
            operators.setdefault(note, []).append(f"`{name}`")
    lines = [f"- {note}: {', '.join(names)}" for note, names in operators.items()]
    return "\n".join(["Smaller than in the released model:\n", *lines]) if lines else ""


def _slowest(preset: str, of: Profile) -> str:
    """The slowest operators of a decode step."""
    head = (
        "operator", "bound by", "share of the step", "µs per step", "calls", "torch operations",
        "large", "GB/s",
    )  # fmt: skip
    body = [
        (
            f"`{item.name}`",
            item.bound,
            f"{100 * item.part:.1f} %",
            f"{item.seconds * 1e6:.0f}",
            f"{item.calls:.0f}",
            f"{item.launches:.0f}",
            f"{100 * item.large:.0f} %",
            f"{item.gbytes:.2f}",
        )
        for item in of.operators[:SLOWEST]
    ]
    return (
        f"Decode step of `{preset}`, batch {of.batch}: {of.seconds * 1e3:.1f} ms, of which "
        f"{100 * of.inside:.0f} % in operators.\n\n{table(head, body, 2)}"
    )


def run(plan: Plan, preset: str, checkpoints: Path) -> Results:
    """Measure everything."""
    directory = write_checkpoint(checkpoints / preset, preset)
    machine = examine(plan.probe, torch.get_num_threads())
    timings = {}
    for name in CASES:
        print(f"{name} ...", file=sys.stderr, flush=True)
        timings[name] = measure(name, plan.sizes, plan.budget)
    profiles = []
    for batch in plan.batches:
        print(f"decode step, batch {batch} ...", file=sys.stderr, flush=True)
        profiles.append(profile(directory, batch, plan.tokens, machine.copy_gbytes))
    return Results(machine, plan.sizes.rows, timings, preset, profiles)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line; the exit code is 0 unless something broke."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operators", description=__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--checkpoints", type=Path, default=Path(".cache/checkpoints"))
    parser.add_argument("--markdown", type=Path, help="write the tables between FILE's markers")
    parser.add_argument("--quick", action="store_true", help="small arguments, few repetitions")
    given = parser.parse_args(arguments)
    plan = QUICK_PLAN if given.quick else FULL_PLAN
    try:
        if given.markdown is not None:
            around(given.markdown, NAME)
        text = render(run(plan, given.preset, given.checkpoints))
        print(text)
        if given.markdown is not None:
            write_between(given.markdown, NAME, text)
    except (DeepInferNeuronError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Speed and memory of the engine on the host processor.

    python -m benchmarks.host_speed --presets tiny mid --json out.json --markdown docs/benchmarks.md

``docs/benchmarks.md`` explains what is measured. Nothing here passes or fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.machine import FULL_PROBE, QUICK_PROBE, examine
from benchmarks.markers import write_between
from benchmarks.measure import (
    ARITHMETICS,
    WEIGHTS,
    Task,
    measure_load,
    measure_memory,
    measure_speed,
)
from benchmarks.memory import in_child
from benchmarks.report import render
from benchmarks.results import ModelResult, Report, WeightsResult
from benchmarks.timing import Budget
from benchmarks.workload import Sizes
from deepinfer_neuron.checkpoint.reader import Checkpoint
from deepinfer_neuron.checkpoint.tiny import PRESETS, write_checkpoint
from deepinfer_neuron.errors import DeepInferNeuronError
from deepinfer_neuron.settings import WeightsMode

NAME = "host_speed"
_QUICK_PRESET = "nano"
_QUICK = Sizes(48, (1, 2), 20, 40, Budget(2, 5.0), Budget(3, 5.0))


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one run measures.

    Attributes:
        presets: checkpoints, written into ``checkpoints`` unless they are there.
        weights: ways to hold the weights.
        arithmetics: orders of the arithmetic.
        threads: threads of torch.
        checkpoints: directory of the checkpoints.
        sizes: amount of work.
        quick: measure the machine only roughly.
    """

    presets: tuple[str, ...]
    weights: tuple[WeightsMode, ...]
    arithmetics: tuple[str, ...]
    threads: int
    checkpoints: Path
    sizes: Sizes
    quick: bool


def run(plan: Plan) -> Report:
    """Measure everything that ``plan`` names, each part in a process of its own.

    Raises:
        DeepInferNeuronError: a checkpoint cannot be written or read.
    """
    _say("machine")
    machine = in_child(examine, QUICK_PROBE if plan.quick else FULL_PROBE, plan.threads)
    return Report(
        machine, plan.sizes, tuple(_measure_model(plan, preset) for preset in plan.presets)
    )


def _measure_model(plan: Plan, preset: str) -> ModelResult:
    directory = write_checkpoint(plan.checkpoints / preset, preset, progress=sys.stderr.isatty())
    with Checkpoint.open(directory) as checkpoint:
        size, config = checkpoint.total_bytes, checkpoint.config
    results = []
    for weights in plan.weights:
        _say(f"{preset}, {weights}")
        task = Task(directory, weights, plan.threads, plan.sizes)
        results.append(
            WeightsResult(
                weights=weights,
                load=in_child(measure_load, task),
                memory=tuple(in_child(measure_memory, task, a) for a in plan.arithmetics),
                speed=in_child(measure_speed, task, plan.arithmetics),
            )
        )
    layers = len(config.layers)
    return ModelResult(preset, size, layers * config.n_routed_experts, layers, tuple(results))


def parse(arguments: Sequence[str] | None) -> tuple[Plan, Path | None, Path | None]:
    """The plan, the JSON file and the Markdown file that the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host_speed",
        description="Measure speed and memory of the engine on the host processor.",
    )
    add = parser.add_argument
    add("--presets", nargs="+", choices=PRESETS, default=("tiny",), help="checkpoints to measure")
    add("--weights", nargs="+", choices=WEIGHTS, default=WEIGHTS, help="default: both")
    add("--order", nargs="+", choices=ARITHMETICS, default=ARITHMETICS, help="default: both")
    add("--batches", nargs="+", type=int, default=(1, 8, 32), metavar="N", help="sequences decoded")
    add("--prompt", type=int, default=512, metavar="N", help="tokens of the timed prompt")
    add("--steps", type=int, default=16, metavar="N", help="timed decode steps per batch")
    add("--repeats", type=int, default=5, metavar="N", help="timed prompts")
    add("--seconds", type=float, default=30.0, help="time after which no step or prompt is begun")
    add("--threads", type=int, default=torch.get_num_threads(), metavar="N", help="torch threads")
    add("--checkpoints", type=Path, default=Path(".cache/checkpoints"), metavar="DIR")
    add("--json", type=Path, metavar="FILE", help="write the results as JSON")
    add("--markdown", type=Path, metavar="FILE", help="write the tables between FILE's markers")
    add("--quick", action="store_true", help="the nano checkpoint and few, short runs")
    given = parser.parse_args(arguments)
    sizes = Sizes(
        prompt=given.prompt,
        batches=tuple(given.batches),
        shortest=128,
        longest=600,
        prefill=Budget(given.repeats, given.seconds),
        decode=Budget(given.steps, given.seconds),
    )
    plan = Plan(
        presets=(_QUICK_PRESET,) if given.quick else tuple(given.presets),
        weights=tuple(given.weights),
        arithmetics=tuple(given.order),
        threads=given.threads,
        checkpoints=given.checkpoints,
        sizes=_QUICK if given.quick else sizes,
        quick=given.quick,
    )
    return plan, given.json, given.markdown


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line; the exit code is 0 unless something broke."""
    plan, json_file, markdown_file = parse(arguments)
    try:
        report = run(plan)
        text = render(report)
        if json_file is not None:
            json_file.write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n")
        print(text)
        if markdown_file is not None:
            write_between(markdown_file, NAME, text)
    except (DeepInferNeuronError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _say(text: str) -> None:
    """One line of progress."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""``deepinfer-neuron compile``: compile every graph of an engine's shapes, and say what it took."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from deepinfer_neuron.cli.command import Command
from deepinfer_neuron.cli.engine_options import (
    add_engine_options,
    add_limit_options,
    engine_arguments,
    limit_arguments,
)
from deepinfer_neuron.cli.output import console, print_json
from deepinfer_neuron.errors import ConfigError

if TYPE_CHECKING:
    from deepinfer_neuron.platform.regions import RegionRecord
    from deepinfer_neuron.runner.static_worker import StaticWorker
    from deepinfer_neuron.runner.warm_up import WarmUp

EXIT_INCOMPLETE = 1

_SHOWN_SHAPES = 3
_DTYPES = {"bfloat16": "bf16", "float32": "f32", "int32": "i32", "uint8": "u8"}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_options(parser)
    add_limit_options(parser)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )


def _run(args: argparse.Namespace) -> int:
    shared = engine_arguments(args)
    if shared["device"] == "cpu" and shared["compile"] != "regions":
        raise ConfigError(
            "the CPU compiles nothing by itself; give --compile regions, --device neuron or "
            "--simulate"
        )
    budget = args.warm_up_seconds
    if budget == 0:
        raise ConfigError("--warm-up-seconds 0 leaves nothing to compile; give a larger number")
    if shared["compile"] == "off":
        raise ConfigError("--compile off compiles nothing; leave it out")
    from dataclasses import replace

    from deepinfer_neuron.llm import LLM
    from deepinfer_neuron.runner.static_worker import StaticWorker
    from deepinfer_neuron.runner.warm_up import warm_up

    # The engine's own warm-up is left out, so that this one can be watched.
    shared["buckets"] = replace(shared["buckets"], warm_up_seconds=0)
    with LLM(args.model, **shared, **limit_arguments(args), progress=not args.json) as llm:
        worker = llm.engine.executor.worker
        assert isinstance(worker, StaticWorker)
        done = warm_up(worker, budget_seconds=budget, progress=not args.json)
        record = _record(worker, done)
    if args.json:
        print_json(record)
    else:
        _show(worker.regions.records, done)
    return 0 if done.complete else EXIT_INCOMPLETE


def _record(worker: StaticWorker, done: WarmUp) -> dict[str, object]:
    """What was compiled, as a JSON object."""
    return {
        "complete": done.complete,
        "passes": done.passes,
        "missing_passes": [_pass(shape) for shape in done.missing],
        "graphs": done.graphs,
        "seconds": done.seconds,
        "regions": [
            {
                "region": str(record.key),
                "shapes": list(shapes_of(record.signature)),
                "seconds": record.first_seconds,
            }
            for record in worker.regions.records
        ],
    }


def _show(records: Sequence[RegionRecord], done: WarmUp) -> None:
    """Print a table of the graphs, the slowest region first."""
    from rich.table import Table

    by_region: dict[str, list[RegionRecord]] = {}
    for record in records:
        by_region.setdefault(str(record.key), []).append(record)
    table = Table(box=None, padding=(0, 3, 0, 0))
    table.add_column("region")
    table.add_column("graphs", justify="right")
    table.add_column("seconds", justify="right")
    table.add_column("arguments", overflow="fold")
    order = sorted(by_region.items(), key=lambda item: -_seconds(item[1]))
    for region, group in order:
        table.add_row(region, str(len(group)), f"{_seconds(group):.1f}", style="bold")
        for record in group:
            table.add_row("", "", f"{record.first_seconds:.1f}", _short(record.signature))
    out = console()
    out.print(table)
    out.print(f"\n{done.graphs} graphs for {done.passes} passes in {done.seconds:.1f} s")
    if done.missing:
        left = ", ".join(_pass(shape) for shape in done.missing)
        out.print(f"not compiled in the time allowed: {left}", soft_wrap=True)


def _seconds(records: Sequence[RegionRecord]) -> float:
    return sum(record.first_seconds for record in records)


def _pass(shape: object) -> str:
    """A pass in words."""
    from deepinfer_neuron.model.shapes import PassShape
    from deepinfer_neuron.runner.static_executor import pass_label

    return pass_label(shape) if isinstance(shape, PassShape) else str(shape)


def _short(signature: Sequence[object]) -> str:
    """The first arguments of a graph."""
    shapes = list(shapes_of(signature))
    more = len(shapes) - _SHOWN_SHAPES
    return " ".join(shapes[:_SHOWN_SHAPES]) + (f" and {more} more" if more > 0 else "")


def shapes_of(signature: object) -> Iterator[str]:
    """Every argument of a graph: ``bf16[8, 4, 64]`` for tensors, sizes of a pass in words."""
    if not isinstance(signature, tuple):
        if signature is not None:
            yield _pass(signature)
        return
    if len(signature) == 3 and isinstance(signature[0], str):
        dtype = signature[0].removeprefix("torch.")
        yield f"{_DTYPES.get(dtype, dtype)}{list(signature[1])}"
        return
    for part in signature:
        yield from shapes_of(part)


COMMAND = Command("compile", "compile every graph and list them", _add_arguments, _run)

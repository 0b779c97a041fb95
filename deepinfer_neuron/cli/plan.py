"""``inspect --plan``: where the bytes of a core go, and what a decode step would take there."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from deepinfer_neuron.cli.output import console, format_bytes, print_json

if TYPE_CHECKING:
    from deepinfer_neuron.engine.forecast import Forecast
    from deepinfer_neuron.engine.layout import Layout
    from deepinfer_neuron.engine.placement import Item, Memory, Placement
    from deepinfer_neuron.engine.placement_search import Change

EXIT_DOES_NOT_FIT = 1

PLAN_HELP = (
    "compute what fits on so many Trainium cores, such as cores=64,nextn=5; keys: cores, ep, cp, "
    "nextn, max_model_len, max_num_seqs, max_num_batched_tokens, dense=replicated|sharded, "
    "host_embed=0|1. Needs config.json only"
)

_CONTEXT = 640
"""Tokens of the sequence whose decode step is estimated: a prompt of 512, and 128 behind it."""


@dataclass(frozen=True)
class Plan:
    """A layout with its memory, and either its placement or what would make it fit.

    ``slower`` is the placement at the lower bandwidth that was observed instead of published.
    """

    layout: Layout
    memory: Memory
    placement: Placement | None
    slower: Placement | None
    changes: tuple[tuple[Change, ...], ...]


def make_plan(directory: Path, text: str) -> Plan:
    """The plan ``text`` for the configuration in ``directory``; reads ``config.json`` only.

    Raises :class:`ConfigError` or :class:`CheckpointError` for a configuration or a plan that is
    not valid; a plan that does not fit is none.
    """
    from deepinfer_neuron.checkpoint.config import load_config
    from deepinfer_neuron.engine.layout import parse_layout
    from deepinfer_neuron.engine.placement import measure, place
    from deepinfer_neuron.engine.placement_search import shortest_changes
    from deepinfer_neuron.platform.simulator.cost import OBSERVED_BANDWIDTH, trn2_core

    config = load_config(directory)
    layout = parse_layout(text, config)
    core, context = trn2_core(), min(_CONTEXT, layout.max_model_len)
    placement = place(config, layout, core, context=context)
    slower = place(config, layout, trn2_core(OBSERVED_BANDWIDTH), context=context)
    changes = () if placement is not None else shortest_changes(config, layout, core)
    return Plan(layout, measure(config, layout, core), placement, slower, changes)


def run_plan(directory: Path, text: str, *, as_json: bool) -> int:
    """Print the plan; the exit code says whether it fits."""
    plan = make_plan(directory, text)
    if as_json:
        print_json(record(plan))
    else:
        _show(plan)
    if plan.placement is not None:
        return 0
    print(f"error: {_refusal(plan)}", file=sys.stderr)
    return EXIT_DOES_NOT_FIT


def record(plan: Plan) -> dict[str, object]:
    """The plan as a JSON object; bytes and seconds."""
    memory, placement = plan.memory, plan.placement
    kv = {
        "block_bytes": memory.block_bytes,
        "blocks_needed": memory.blocks_needed,
        "blocks_wanted": memory.blocks_wanted,
    }
    found: dict[str, object] = {
        "fits": placement is not None,
        "layout": dataclasses.asdict(plan.layout),
        "memory": {
            **{
                group: {item.name: item.bytes for item in getattr(memory, group)}
                for group in ("weights", "states", "reserves", "host")
            },
            "weight_bytes": memory.weight_bytes,
            "fixed_bytes": memory.fixed_bytes,
            "capacity": memory.capacity,
            "missing": max(0, memory.missing),
        },
        "kv": kv,
        "changes": [
            {change.setting: change.value for change in changes} for changes in plan.changes
        ],
    }
    if placement is not None and plan.slower is not None:
        kv |= {
            "blocks": placement.blocks,
            "blocks_that_fit": placement.blocks_that_fit,
            "pages": placement.pages,
            "page_bytes": placement.page_bytes,
        }
        found["expanded_bytes"] = placement.expanded_bytes
        found["unused_bytes"] = placement.unused
        found["graphs"] = placement.graphs
        found["graphs_by_region"] = dict(placement.graphs_by_region)
        found["decode_step"] = {
            **step_record(placement.step),
            "seconds_at_observed_bandwidth": plan.slower.step.estimate.total,
        }
    return found


def step_record(step: Forecast) -> dict[str, object]:
    """The decode step as a JSON object."""
    estimate = step.estimate
    return {
        "label": estimate.label,
        "shape": dataclasses.asdict(step.shape),
        "seconds": estimate.total,
        "components": [dataclasses.asdict(part) for part in step.components],
        "graph_switch": estimate.graph_switch,
        "collectives": estimate.collectives,
        "host": estimate.host,
        "hidden_host": estimate.hidden_host,
        "idle": estimate.idle,
        "drains": estimate.drains,
        "launches": dict(step.launches),
        "num_collectives": step.collectives,
        "expanded_families": sorted(step.path.families),
    }


def _refusal(plan: Plan) -> str:
    """Why a plan does not fit, and what would help."""
    memory = plan.memory
    needed = memory.capacity + memory.missing
    text = (
        f"the plan does not fit: a core needs {format_bytes(needed)} and has "
        f"{format_bytes(memory.capacity)}, so {format_bytes(memory.missing)} are missing; "
    )
    if not plan.changes:
        return f"{text}no change of the settings of a plan makes it fit"
    ways = [" with ".join(str(change) for change in changes) for changes in plan.changes]
    return f"{text}change {', or '.join(ways)}"


def _show(plan: Plan) -> None:
    """Print the plan for a person."""
    out = console()
    out.print(_layout_line(plan.layout), soft_wrap=True)
    out.print("", _memory_table(plan))
    if plan.placement is None or plan.slower is None:
        return
    out.print("", _facts(plan.placement), "", step_table(plan.placement.step))
    out.print(
        "Time of a region goes to the components that take its busiest engine; what another engine "
        "does meanwhile costs nothing. With the lower bandwidth that others observed "
        f"(0.58 instead of 0.725 TB/s) the step takes {plan.slower.step.milliseconds:.2f} ms.",
        style="dim",
    )


def _layout_line(layout: Layout) -> str:
    """The complete layout, as it could be given."""
    values = dataclasses.asdict(layout)
    return "Plan: " + ",".join(
        f"{key}={int(value) if isinstance(value, bool) else value}" for key, value in values.items()
    )


def _memory_table(plan: Plan) -> Table:
    """Bytes of a core by component."""
    table = Table(title="Memory of a core", title_justify="left", box=None, padding=(0, 3, 0, 0))
    table.add_column("component")
    table.add_column("bytes", justify="right")
    memory, placement = plan.memory, plan.placement

    def rows(items: tuple[Item, ...]) -> None:
        for item in items:
            table.add_row(item.name, format_bytes(item.bytes))

    rows(memory.weights)
    table.add_row("weights", format_bytes(memory.weight_bytes), style="bold")
    rows(memory.states)
    if placement is None:
        blocks = memory.blocks_needed
        table.add_row(f"KV, {blocks:,} blocks (least)", format_bytes(blocks * memory.block_bytes))
        rows(memory.reserves)
        total = memory.capacity + memory.missing
    else:
        blocks, pages = placement.blocks, placement.pages
        table.add_row(f"KV, {blocks:,} blocks", format_bytes(blocks * memory.block_bytes))
        table.add_row(f"window pages, {pages:,}", format_bytes(pages * placement.page_bytes))
        table.add_row("expanded matrices, on top", format_bytes(placement.expanded_bytes))
        rows(memory.reserves)
        total = memory.capacity - placement.unused
    table.add_row("total", f"{format_bytes(total)}", style="bold")
    table.add_row("of", format_bytes(memory.capacity))
    for item in memory.host:
        table.add_row(f"in host memory: {item.name}", format_bytes(item.bytes), style="dim")
    return table


def _facts(placement: Placement) -> Table:
    """Numbers of the caches and graphs."""
    from deepinfer_neuron.cache.pools import BLOCK_TOKENS
    from deepinfer_neuron.engine.placement import tokens_of

    memory = placement.memory
    per_token = memory.block_bytes / BLOCK_TOKENS
    tokens = tokens_of(placement.blocks)
    rows = {
        "KV cache": f"{per_token:g} bytes per token; {placement.blocks:,} blocks of {BLOCK_TOKENS} "
        f"hold {tokens:,} tokens ({tokens // placement.layout.max_model_len} sequences of the "
        f"greatest length); at most {placement.blocks_that_fit:,} blocks fit",
        "Graphs": f"{placement.graphs:,} to compile",
    }
    table = Table.grid(padding=(0, 3))
    for label, value in rows.items():
        table.add_row(label, value)
    return table


def step_table(step: Forecast, title: str | None = None) -> Table:
    """The estimated step by component; a decode step unless the title says otherwise."""
    estimate, shape = step.estimate, step.shape
    if title is None:
        title = f"Decode step of {shape.sequences} sequence(s), {shape.rows} rows each"
    table = Table(
        title=f"{title} ({estimate.label})",
        title_justify="left",
        box=None,
        padding=(0, 3, 0, 0),
    )
    table.add_column("component")
    for heading in ("GB moved", "GFLOP", "M converted", "ms"):
        table.add_column(heading, justify="right")
    for part in step.components:
        table.add_row(
            part.name,
            f"{part.bytes / 1e9:.3f}",
            f"{part.flops / 1e9:.1f}",
            f"{part.converted_elements / 1e6:.1f}",
            f"{part.seconds * 1e3:.2f}",
        )
    terms = {
        f"{estimate.launches} graph switches": estimate.graph_switch,
        f"{step.collectives} exchanges between cores": estimate.collectives,
        "host, beyond the device's time": estimate.host - estimate.hidden_host,
        "drained queue": estimate.drains,
    }
    for name, seconds in terms.items():
        table.add_row(name, "", "", "", f"{seconds * 1e3:.2f}")
    table.add_row("step", "", "", "", f"{estimate.total * 1e3:.2f}", style="bold")
    return table

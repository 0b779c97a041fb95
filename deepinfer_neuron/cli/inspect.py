"""``deepinfer-neuron inspect``: what a checkpoint holds and what memory it needs."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from deepinfer_neuron.cli.command import Command
from deepinfer_neuron.cli.output import console, format_bytes, print_json
from deepinfer_neuron.cli.plan import PLAN_HELP, run_plan

if TYPE_CHECKING:
    from deepinfer_neuron.checkpoint.config import LayerSpec, ModelConfig
    from deepinfer_neuron.model.footprint import Part


@dataclass(frozen=True)
class Shard:
    """One file of tensors."""

    file: str
    bytes: int


@dataclass(frozen=True)
class Inspection:
    """Everything that ``inspect`` says about a checkpoint."""

    directory: Path
    config: ModelConfig
    parts: list[Part]
    total: Part
    shards: list[Shard]


def examine(directory: Path) -> Inspection:
    """Validate the checkpoint in ``directory`` and count what it holds; reads no tensor data.

    Raises :class:`ConfigError` or :class:`CheckpointError` for a checkpoint that cannot be served.
    """
    from deepinfer_neuron.checkpoint.config import load_config
    from deepinfer_neuron.checkpoint.plan import make_plan
    from deepinfer_neuron.model.footprint import measure_parts, total

    config = load_config(directory)
    plan = make_plan(directory, config)
    parts = measure_parts(placement.spec for placement in plan.placements.values())
    shards = [Shard(file, size) for file, size in sorted(plan.shard_sizes.items())]
    return Inspection(directory, config, parts, total(parts), shards)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="checkpoint directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plan", metavar="KEY=VALUE,...", help=PLAN_HELP)


def _run(args: argparse.Namespace) -> int:
    if args.plan is not None:
        return run_plan(Path(args.directory), args.plan, as_json=args.json)
    found = examine(Path(args.directory))
    if args.json:
        print_json(_record(found))
    else:
        _show(found)
    return 0


def _record(found: Inspection) -> dict[str, object]:
    """The inspection as a JSON object; the layers stand beside the configuration."""
    config = dataclasses.asdict(found.config)
    layers = [
        {**dataclasses.asdict(layer), "role": layer.role.value} for layer in found.config.layers
    ]
    del config["layers"]
    return {
        "directory": str(found.directory),
        "config": config,
        "layers": layers,
        "components": [dataclasses.asdict(part) for part in found.parts],
        "total": dataclasses.asdict(found.total),
        "shards": [dataclasses.asdict(shard) for shard in found.shards],
    }


def _show(found: Inspection) -> None:
    """Print the inspection for a person."""
    out = console()
    out.print(_summary(found), "", layer_table(found.config), "", _part_table(found))
    out.print(
        "engram_table stays on disk: its rows are read when needed. Caches come on top.",
        style="dim",
    )


def _summary(found: Inspection) -> Table:
    """The numbers that tell one model from another."""
    config = found.config
    rows = {
        "Checkpoint": str(found.directory),
        "Tensors": f"{found.total.tensors:,} in {len(found.shards)} shard(s), "
        f"{format_bytes(sum(shard.bytes for shard in found.shards))}",
        "Vocabulary": f"{config.vocab_size:,} tokens",
        "Context": f"{config.max_position_embeddings:,} tokens",
        "Backbone": f"{config.num_hidden_layers} layers of width {config.hidden_size}",
        "Attention": f"{config.num_attention_heads} heads of {config.head_dim}, "
        f"window {config.sliding_window}, top {config.index_topk} entries",
        "Experts": f"{config.num_experts_per_tok} of {config.n_routed_experts} per token, "
        f"{config.n_shared_experts} shared, width {config.moe_intermediate_size}",
        "Engram": _engram(config),
        "Drafts": _drafts(config),
        "Vision": f"{config.vision.num_hidden_layers} layers of width {config.vision.hidden_size}",
    }
    table = Table.grid(padding=(0, 3))
    for label, value in rows.items():
        table.add_row(label, value)
    return table


def _engram(config: ModelConfig) -> str:
    """The n-gram tables in words."""
    engram = config.engram
    if engram is None:
        return "none"
    rows = ", ".join(f"{count:,}" for count in engram.num_embeddings)
    return f"layers {_ids(engram.layer_ids)}; {rows} rows of {engram.head_dim}"


def _drafts(config: ModelConfig) -> str:
    """The draft blocks in words."""
    draft = config.draft
    if draft is None:
        return "none"
    return (
        f"{draft.num_layers} blocks fed by layers {_ids(draft.target_layer_ids)}, "
        f"{draft.num_experts_per_tok} of {draft.n_routed_experts} experts per token"
    )


def _ids(layers: tuple[int, ...]) -> str:
    """Layer numbers in words."""
    return ", ".join(str(layer) for layer in layers)


def layer_table(config: ModelConfig) -> Table:
    """What every layer owns and reads; neighbours that differ in their number only share a row."""
    table = Table(title="Layers", title_justify="left", box=None, padding=(0, 3, 0, 0))
    for heading in ("layers", "role", "ratio", "KV of", "index keys of", "selection of", "notes"):
        table.add_column(heading)
    start = 0
    for position, layer in enumerate(config.layers):
        following = config.layers[position + 1 : position + 2]
        if following and _cells(following[0]) == _cells(layer):
            continue
        span = str(start) if start == position else f"{start}-{position}"
        table.add_row(span, *_cells(layer))
        start = position + 1
    return table


def _cells(layer: LayerSpec) -> tuple[str, ...]:
    """The row of one layer without its number."""
    notes = {
        "engram": layer.engram is not None,
        "picks candidates": layer.is_candidate_source,
        f"inside the candidates of {layer.candidate_source}": layer.candidate_source is not None,
    }
    return (
        layer.role.value,
        str(layer.ratio),
        _source(layer.kv_source, layer.owns_kv),
        _source(layer.index_k_source, layer.owns_index_k),
        _source(layer.index_source, layer.owns_index),
        ", ".join(note for note, holds in notes.items() if holds),
    )


def _source(layer: int | None, own: bool) -> str:
    """Where a layer takes something from: nowhere, itself, or another layer."""
    if own:
        return "itself"
    return "-" if layer is None else str(layer)


def _part_table(found: Inspection) -> Table:
    """Bytes of every component on disk and in memory."""
    table = Table(title="Components", title_justify="left", box=None, padding=(0, 3, 0, 0))
    table.add_column("component")
    for heading in ("tensors", "on disk", "memory, packed", "memory, expanded"):
        table.add_column(heading, justify="right")
    for part in (*found.parts, found.total):
        table.add_row(
            part.name,
            f"{part.tensors:,}",
            format_bytes(part.disk),
            format_bytes(part.packed),
            format_bytes(part.expanded),
            style="bold" if part is found.total else None,
        )
    return table


COMMAND = Command("inspect", "show what a checkpoint holds and needs", _add_arguments, _run)

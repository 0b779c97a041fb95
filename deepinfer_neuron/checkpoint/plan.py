"""Where every tensor of a model lies, worked out from index and headers before any data is read."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepinfer_neuron.checkpoint.config_types import ModelConfig
from deepinfer_neuron.checkpoint.fields import describe, printable
from deepinfer_neuron.checkpoint.files import parse_json, read_small_file
from deepinfer_neuron.checkpoint.names import (
    TensorSpec,
    canonical_name,
    expert_count,
    inventory,
    is_surplus,
    split_block_name,
)
from deepinfer_neuron.checkpoint.shards import ShardEntry, read_header
from deepinfer_neuron.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"

_logger = logging.getLogger(__name__)

_MAX_INDEX_BYTES = 100_000_000
_MAX_FILE_NAME_BYTES = 255
_SHOWN_MISSING = 50
_SHOWN_NAMES = 10

_UNFOLDED_NORMS = frozenset({"hc_attn_norm.weight", "hc_ffn_norm.weight", "hc_head_norm.weight"})
"""Norm weights that belong inside the columns of the ``hc_*_fn`` matrices."""


@dataclass(frozen=True)
class Placement:
    """A tensor and the bytes that hold it."""

    spec: TensorSpec
    shard: str
    """File name of the shard."""
    start: int
    """Position of the first byte in the shard's file."""


@dataclass(frozen=True)
class Plan:
    """Everything needed to read the tensors of one checkpoint."""

    placements: Mapping[str, Placement]
    shard_sizes: Mapping[str, int]
    """Bytes of every referenced shard at the time its header was read."""


def make_plan(directory: Path, config: ModelConfig) -> Plan:
    """Validate index and shard headers of ``directory`` against what ``config`` calls for.

    Nothing but JSON is read. Raises :class:`CheckpointError`; tensors that are present although
    the configuration has no place for them are logged as one warning.
    """
    located = _read_index(directory / INDEX_FILE)
    entries, sizes = _read_headers(directory, located)
    specs = {spec.name: spec for spec in inventory(config)}
    _check_experts(directory, config, located)
    _check_missing(directory, specs, located)
    _check_formats(directory, specs, located, entries)
    _check_tables(directory, specs, located)
    _report_surplus(directory, specs, located)
    placements = {
        name: Placement(spec, located[name], entries[name].start) for name, spec in specs.items()
    }
    return Plan(placements, sizes)


def _read_index(path: Path) -> dict[str, str]:
    """Shard file of every indexed tensor, by name without ``model.`` prefix."""
    index = parse_json(read_small_file(path, _MAX_INDEX_BYTES), str(path), unique=True)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise CheckpointError(
            f"{path}: weight_map is {describe(weight_map)}; expected an object that maps tensor "
            "names to shard files."
        )
    located: dict[str, str] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_file_name(shard):
            raise CheckpointError(
                f"{path}: weight_map sends {describe(name)} to {describe(shard)}; expected the "
                "plain name of a file in the same directory."
            )
        if ".".join(name.split(".")[-2:]) in _UNFOLDED_NORMS:
            raise CheckpointError(
                f"{path}: {describe(name)} is a separate hyper-connection norm weight, which is "
                "not supported; fold it into the columns of the hc_*_fn matrix."
            )
        short = canonical_name(name)
        if short in located:
            raise CheckpointError(
                f"{path}: {describe(short)} is ambiguous, it appears with and without the prefix "
                "'model.'; expected one of the two names."
            )
        located[short] = shard
    return located


def _is_file_name(name: str) -> bool:
    """Whether ``name`` is one path component that cannot leave its directory."""
    if name in ("", ".", "..") or any(sign in name for sign in "/\\\0"):
        return False
    try:
        return len(name.encode("utf-8")) <= _MAX_FILE_NAME_BYTES
    except UnicodeEncodeError:
        return False


def _read_headers(
    directory: Path, located: Mapping[str, str]
) -> tuple[dict[str, ShardEntry], dict[str, int]]:
    """Header entries of all indexed tensors, and the sizes of all referenced shards."""
    by_shard: defaultdict[str, list[str]] = defaultdict(list)
    for name, shard in located.items():
        by_shard[shard].append(name)
    absent = sorted(shard for shard in by_shard if not os.path.exists(directory / shard))
    if absent:
        raise CheckpointError(
            f"{directory}: missing shards: {_listed(absent, _SHOWN_MISSING)}; download them again."
        )
    entries: dict[str, ShardEntry] = {}
    sizes: dict[str, int] = {}
    lost: list[str] = []
    for shard, names in sorted(by_shard.items()):
        header = read_header(directory / shard)
        sizes[shard] = header.file_size
        for name in names:
            entry = header.entries.get(name)
            if entry is None:
                lost.append(name)
            else:
                entries[name] = entry
    if lost:
        raise CheckpointError(
            f"{directory}: indexed tensors missing from their shards: "
            f"{_listed(sorted(lost), _SHOWN_NAMES)}; index and shards must come from one writer."
        )
    return entries, sizes


def _listed(names: Sequence[str], shown: int) -> str:
    """The first ``shown`` of ``names``, and how many there are in all."""
    text = ", ".join(printable(name) for name in names[:shown])
    return text if len(names) <= shown else f"{text}, … ({len(names)} in total)"


def _check_experts(directory: Path, config: ModelConfig, names: Iterable[str]) -> None:
    """The routed experts of a block are numbered 0 up to the configured count, without gaps."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    for name in names:
        parts = split_block_name(name)
        if parts is not None and parts.expert is not None and name.endswith(".weight"):
            found[parts.block].add(parts.expert)
    for block, experts in sorted(found.items()):
        wanted = expert_count(config, block)
        if wanted is None:
            continue
        if max(experts) >= len(experts):
            gap = next(index for index in range(len(experts) + 1) if index not in experts)
            raise CheckpointError(
                f"{directory}: expert indices of {block} are not contiguous, {gap} is missing; "
                f"expected 0 to {wanted - 1}."
            )
        if len(experts) != wanted:
            raise CheckpointError(
                f"{directory}: {block} has {len(experts)} routed experts but config.json says "
                f"{wanted}; expected the expert indices 0 to {wanted - 1}, none missing and none "
                "beyond."
            )


def _check_missing(
    directory: Path, specs: Mapping[str, TensorSpec], located: Mapping[str, str]
) -> None:
    """Every expected tensor is indexed."""
    absent = [name for name in specs if name not in located]
    if absent:
        raise CheckpointError(
            f"{directory}: missing tensors: {_listed(absent, _SHOWN_MISSING)}; the checkpoint is "
            "incomplete or config.json describes another model."
        )


def _check_formats(
    directory: Path,
    specs: Mapping[str, TensorSpec],
    located: Mapping[str, str],
    entries: Mapping[str, ShardEntry],
) -> None:
    """Stored type and shape are the expected ones; nothing is converted on loading."""
    wrong = [
        name
        for name, spec in specs.items()
        if (entries[name].dtype, entries[name].shape) != (spec.dtype, spec.shape)
    ]
    if not wrong:
        return
    name = wrong[0]
    spec, entry = specs[name], entries[name]
    more = f" ({len(wrong) - 1} more tensors differ)" if len(wrong) > 1 else ""
    raise CheckpointError(
        f"{directory / located[name]}: {name} is stored as {entry.dtype} {list(entry.shape)}; "
        f"expected {spec.dtype} {list(spec.shape)}{_format_advice(spec, entry)}{more}."
    )


def _format_advice(spec: TensorSpec, entry: ShardEntry) -> str:
    """Why a stored type is refused, for the cases a reader may wonder about."""
    if spec.dtype == entry.dtype:
        return ""
    if spec.dtype == "F32":
        return ", since folded hyper-connection, sink and bias weights must be 32-bit floats"
    if spec.dtype == "I8":
        return ", since packed 4-bit expert weights are never converted from another type"
    return ", since stored types are never converted"


def _check_tables(
    directory: Path, specs: Mapping[str, TensorSpec], located: Mapping[str, str]
) -> None:
    """An Engram table and its scales share a shard, so both are streamed from one file."""
    for name, spec in specs.items():
        if spec.role != "engram_table" or not name.endswith(".weight"):
            continue
        scale = name.removesuffix(".weight") + ".scale"
        if located[name] != located[scale]:
            raise CheckpointError(
                f"{directory}: {name} is in {located[name]} but {scale} is in {located[scale]}; "
                "expected both in the same shard."
            )


def _report_surplus(
    directory: Path, specs: Mapping[str, TensorSpec], located: Mapping[str, str]
) -> None:
    """Warn about tensors that only another layer schedule would have."""
    surplus = sorted(name for name in located if name not in specs and is_surplus(name))
    if surplus:
        _logger.warning(
            "%s: ignoring tensors that config.json has no place for: %s; "
            "its layer schedule may not be the one the checkpoint was written with.",
            directory,
            _listed(surplus, _SHOWN_NAMES),
        )

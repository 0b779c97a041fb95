"""Headers of safetensors shards, read without trusting a byte of them.

A shard is an 8-byte little-endian length, a JSON header of that length that maps tensor names to
type, shape and byte range, and the data. Only the header is read here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deepinfer_neuron.checkpoint.fields import describe, is_int
from deepinfer_neuron.checkpoint.files import parse_json, reason, regular_file_size
from deepinfer_neuron.checkpoint.names import canonical_name
from deepinfer_neuron.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""Longest header that is read; every released shard stays far below."""

_LENGTH_BYTES = 8
_MAX_DIMENSIONS = 16
_MAX_EXTENT = 2**48

_ITEM_BYTES: Mapping[str, int] = {
    "F32": 4,
    "BF16": 2,
    "F16": 2,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I8": 1,
    "U8": 1,
    "I16": 2,
    "I32": 4,
    "I64": 8,
    "BOOL": 1,
}


@dataclass(frozen=True)
class ShardEntry:
    """One tensor of a shard, as its header describes it."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """Position of the first byte in the file."""
    end: int
    """Position behind the last byte in the file."""


@dataclass(frozen=True)
class ShardHeader:
    """A validated header: every byte range lies in the file and none overlap."""

    path: Path
    file_size: int
    entries: Mapping[str, ShardEntry]
    """By name without ``model.`` prefix."""


def read_header(path: Path) -> ShardHeader:
    """Read and validate the header of one shard; raises :class:`CheckpointError`."""
    size = regular_file_size(path)
    if size < _LENGTH_BYTES:
        raise CheckpointError(
            f"{path}: has {size} bytes; expected a safetensors file of at least {_LENGTH_BYTES}."
        )
    raw = _read_raw_header(path, size)
    data_start = _LENGTH_BYTES + len(raw)
    header = parse_json(raw, f"{path} (header)", unique=True)
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is {describe(header)}; expected a JSON object.")
    entries: dict[str, ShardEntry] = {}
    for name, value in header.items():
        if name == "__metadata__":
            continue
        short = canonical_name(name)
        if short in entries:
            raise CheckpointError(
                f"{path}: {describe(short)} is ambiguous, it appears with and without the prefix "
                "'model.'; expected one of the two names."
            )
        entries[short] = _entry(f"{path}: {describe(name)}", value, data_start, size)
    _check_layout(path, entries, data_start, size)
    return ShardHeader(path, size, entries)


def _read_raw_header(path: Path, size: int) -> bytes:
    """The header's bytes, once its length is believable for a file of ``size`` bytes."""
    limit = min(MAX_HEADER_BYTES, size - _LENGTH_BYTES)
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if not 0 < length <= limit:
                raise CheckpointError(
                    f"{path}: invalid safetensors header size {length}; expected 1 to {limit}."
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read the shard ({reason(error)}).") from error
    if len(raw) != length:
        raise CheckpointError(f"{path}: ended inside its header; download the file again.")
    return raw


def _entry(where: str, value: object, data_start: int, file_size: int) -> ShardEntry:
    """One header entry, with its byte range moved from the data section to the file."""
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is described by {describe(value)}; expected an object.")
    dtype, shape, offsets = (value.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise CheckpointError(
            f"{where} has dtype {describe(dtype)}; expected one of {', '.join(_ITEM_BYTES)}."
        )
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not _counts(shape):
        raise CheckpointError(
            f"{where} has shape {describe(shape)}; expected at most {_MAX_DIMENSIONS} integers "
            f"from 0 to {_MAX_EXTENT}."
        )
    if not isinstance(offsets, list) or len(offsets) != 2 or not _counts(offsets):
        raise CheckpointError(
            f"{where} has an invalid byte range {describe(offsets)}; expected two integers."
        )
    start, end = offsets
    needed, available = math.prod(shape) * _ITEM_BYTES[dtype], file_size - data_start
    if not 0 <= start <= end <= available or end - start != needed:
        raise CheckpointError(
            f"{where} has the invalid byte range {describe(offsets)}; expected {needed} bytes "
            f"within the {available} bytes of data, so the file may be truncated."
        )
    return ShardEntry(dtype, tuple(shape), data_start + start, data_start + end)


def _counts(values: list[object]) -> bool:
    """Whether all ``values`` are integers from 0 to a bound no tensor exceeds."""
    return all(
        isinstance(value, int) and is_int(value) and 0 <= value <= _MAX_EXTENT for value in values
    )


def _check_layout(
    path: Path, entries: Mapping[str, ShardEntry], data_start: int, file_size: int
) -> None:
    """No two tensors share a byte, and the last one ends where the file ends."""
    reached, last = data_start, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start < reached and entry.end > entry.start:
            raise CheckpointError(
                f"{path}: the data of {describe(name)} and {describe(last)} overlap; "
                "expected separate byte ranges."
            )
        if entry.end > reached:
            reached, last = entry.end, name
    if reached != file_size:
        raise CheckpointError(
            f"{path}: its tensors end at byte {reached} but the file has {file_size} bytes; "
            "expected the last tensor to end with the file."
        )

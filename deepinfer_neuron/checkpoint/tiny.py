"""Writes small complete checkpoints in the released format, with synthetic weights.

The directory appears under its final name only when it is finished: everything is written into a
sibling directory that is renamed at the end.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from deepinfer_neuron.checkpoint.config import parse_config
from deepinfer_neuron.checkpoint.names import TensorSpec
from deepinfer_neuron.checkpoint.tiny_presets import (
    PRESETS,
    JsonObject,
    Preset,
    complete_config,
    get_preset,
    integer,
    text_section,
)
from deepinfer_neuron.checkpoint.tiny_tokenizer import write_tokenizer
from deepinfer_neuron.checkpoint.tiny_weights import CALM, WILD, Recipe, WeightWriter
from deepinfer_neuron.errors import CheckpointError, ConfigError

__all__ = ["PRESETS", "write_checkpoint"]

INDEX_FILE = "model.safetensors.index.json"

# Part of every stamp, so that a directory made by an older recipe is recognised as outdated.
_RECIPE_VERSION = 2
_STAMP_KEY = "deepinfer_neuron_synthetic"
_ALIGNMENT = 8


def write_checkpoint(
    directory: Path,
    preset: str = "tiny",
    seed: int = 0,
    wild: bool = False,
    progress: bool = False,
    overrides: Mapping[str, object] | None = None,
    recipe: Recipe | None = None,
) -> Path:
    """Write a complete synthetic checkpoint and return its directory.

    The same arguments give the same bytes on every machine. If ``directory`` already holds the
    result of the same arguments, nothing is written; the result of other arguments is replaced;
    anything else that is not empty is left alone and refused.

    Args:
        directory: Where the checkpoint goes; missing parents are created.
        preset: ``"nano"`` (4 MB), ``"tiny"`` (40 MB) or ``"mid"`` (2.1 GB).
        seed: Selects the weights; configuration and tokenizer do not depend on it.
        wild: Residual branches of full strength, which amplify rounding differences.
        progress: Show a progress bar on the terminal.
        overrides: Keys of ``text_config`` to replace; derived keys follow them.
        recipe: Strengths of the parts of the network, instead of the two that ``wild`` selects.

    Raises:
        ConfigError: unknown preset or override, or numbers that no checkpoint may have.
        CheckpointError: the directory holds something else, or cannot be written.
    """
    if wild and recipe is not None:
        raise ConfigError("wild=True and a recipe were both given; give only one of them.")
    chosen = get_preset(preset)
    section = text_section(chosen, overrides)
    strengths = recipe or (WILD if wild else CALM)
    stamp = _stamp(chosen, section, seed, strengths)
    directory = Path(directory).resolve()
    if _existing_stamp(directory) == stamp:
        return directory
    partial = directory.parent / f".{directory.name}.{uuid.uuid4().hex}.partial"
    try:
        partial.mkdir(parents=True)
        _write_files(partial, chosen, section, seed, strengths, stamp, progress)
        _install(partial, directory)
    except OSError as error:
        raise CheckpointError(
            f"could not write a checkpoint to {directory}: {error}; "
            "choose a directory with enough space and write permission."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return directory


def _stamp(preset: Preset, section: JsonObject, seed: int, recipe: Recipe) -> str:
    """A text that is equal for two calls exactly when they write the same bytes.

    Raises:
        ConfigError: an override holds a value that JSON cannot express.
    """
    ingredients = {
        "version": _RECIPE_VERSION,
        "seed": seed,
        "text": section,
        "vision": preset.vision,
        "shard_bytes": preset.shard_bytes,
        "recipe": dataclasses.asdict(recipe),
    }
    try:
        canonical = json.dumps(ingredients, sort_keys=True)
    except TypeError as error:
        raise ConfigError(f"overrides must hold plain JSON values: {error}.") from error
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


def _existing_stamp(directory: Path) -> str | None:
    """The stamp of the finished synthetic checkpoint in ``directory``; ``None`` if it is free.

    Raises:
        CheckpointError: there is a file, or a directory with other contents.
    """
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return None
    stamp: object = None
    try:
        index = json.loads((directory / INDEX_FILE).read_text(encoding="utf-8"))
        stamp = index["metadata"][_STAMP_KEY]
    except (OSError, ValueError, KeyError, TypeError):
        stamp = None
    if not isinstance(stamp, str):
        raise CheckpointError(
            f"{directory} exists and is not a finished synthetic checkpoint; only an empty "
            "directory or such a checkpoint is replaced, so choose another path or remove it."
        )
    return stamp


def _write_files(
    directory: Path,
    preset: Preset,
    section: JsonObject,
    seed: int,
    recipe: Recipe,
    stamp: str,
    progress: bool,
) -> None:
    """Fill an empty directory with tokenizer, configuration, shards and index."""
    tokenizer_json = write_tokenizer(
        directory, integer(section, "vocab_size"), integer(section, "max_position_embeddings")
    )
    data = complete_config(preset, section, tokenizer_json)
    config_file = directory / "config.json"
    weights = WeightWriter(parse_config(data, str(config_file)), recipe, seed)
    _write_json(config_file, data)
    shards = plan_shards(list(weights.specs.values()), preset.shard_bytes)
    total = sum(spec.nbytes for spec in weights.specs.values())
    weight_map: dict[str, str] = {}
    with tqdm(total=total, unit="B", unit_scale=True, disable=not progress) as bar:
        for number, specs in enumerate(shards, start=1):
            file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            for written in write_shard(directory / file_name, specs, weights):
                bar.update(written)
            weight_map |= {spec.name: file_name for spec in specs}
    metadata = {"total_size": total, _STAMP_KEY: stamp}
    ordered = {name: weight_map[name] for name in sorted(weight_map)}
    _write_json(directory / INDEX_FILE, {"metadata": metadata, "weight_map": ordered})


def _write_json(path: Path, data: Mapping[str, object]) -> None:
    """Write an object as indented JSON, with the same bytes on every platform."""
    text = json.dumps(data, ensure_ascii=False, indent=2) + "\n"
    path.write_text(text, encoding="utf-8", newline="\n")


def plan_shards(specs: Sequence[TensorSpec], limit: int) -> list[list[TensorSpec]]:
    """Distribute tensors over shards of at most ``limit`` bytes, in order.

    A matrix and its scales stay together; a pair that alone exceeds the limit gets its own shard.
    """
    pairs: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        pairs.setdefault(spec.name.rpartition(".")[0] or spec.name, []).append(spec)
    shards: list[list[TensorSpec]] = []
    room = 0
    for pair in pairs.values():
        size = sum(spec.nbytes for spec in pair)
        if not shards or size > room:
            shards.append([])
            room = limit
        shards[-1].extend(pair)
        room -= size
    return shards


def write_shard(path: Path, specs: Sequence[TensorSpec], weights: WeightWriter) -> Iterator[int]:
    """Write one safetensors file, yielding the number of bytes after each chunk.

    The file is an 8-byte little-endian header length, the header (a JSON object that maps a name
    to dtype, shape and byte range, padded with blanks to a multiple of 8), and the data. Wider
    element types come first, so that every tensor starts at a multiple of its element size.
    """
    ordered = sorted(specs, key=lambda spec: (-_item_size(spec), spec.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in ordered:
        start, end = end, end + spec.nbytes
        entry = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [start, end]}
        header[spec.name] = entry
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for spec in ordered:
            for chunk in weights.chunks(spec.name):
                file.write(chunk.data)
                yield chunk.nbytes


def _item_size(spec: TensorSpec) -> int:
    """Bytes of one element."""
    return {"F32": 4, "BF16": 2}.get(spec.dtype, 1)


def _install(partial: Path, directory: Path) -> None:
    """Give the finished directory its final name, in place of an empty or an older one."""
    if _existing_stamp(directory) is None:
        partial.replace(directory)
        return
    retired = partial.with_suffix(".retired")
    directory.rename(retired)
    try:
        partial.rename(directory)
    except OSError:
        retired.rename(directory)
        raise
    shutil.rmtree(retired, ignore_errors=True)

"""Weights in and out of checkpoints in the released format."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_neuron.checkpoint.config import ModelConfig, parse_config
from deepinfer_neuron.checkpoint.formats import E2M1_MAX, E4M3_MAX, encode_e2m1, encode_e4m3
from deepinfer_neuron.checkpoint.names import inventory
from deepinfer_neuron.checkpoint.reader import Checkpoint
from deepinfer_neuron.checkpoint.tiny import write_shard
from deepinfer_neuron.checkpoint.tiny_weights import CALM, WeightWriter
from deepinfer_neuron.reference.weights import Weights
from tools.train_demo.weights import BLOCK, Kind, expand, fp8_scale, plan, released_values


def read_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The trainable weights of a checkpoint, dequantized."""
    slots, parts = plan(checkpoint.config)
    weights = {slot.name: torch.zeros(slot.shape) for slot in slots}
    kinds = {slot.name: slot.kind for slot in slots}
    sizes = {spec.name: spec.shape for spec in inventory(checkpoint.config)}
    source = Weights(checkpoint)
    for part in parts:
        kind = kinds[part.slot]
        if kind is Kind.FP8:
            value = source.fp8(part.stored)
        elif kind is Kind.FP4:
            value = source.fp4(part.stored)
        elif kind is Kind.TABLE:
            rows = torch.arange(sizes[part.stored + ".weight"][0])
            value = Weights(checkpoint, part.stored.removesuffix("engram.embed")).engram_rows(rows)
        else:
            value = source.plain(part.stored)
        target = weights[part.slot]
        if part.expert is not None:
            target = target[part.expert]
        target[part.rows[0] : part.rows[1]] = value
    return weights


@dataclass(frozen=True)
class Exporter:
    """Bytes of every tensor of a checkpoint, from trained fp32 weights.

    What is not trained (the image tower, its aligner and vectors) comes from ``untrained``.
    """

    config: ModelConfig
    masters: dict[str, Tensor]
    untrained: WeightWriter

    def chunks(self, name: str) -> Iterator[NDArray[np.uint8]]:
        """The little-endian bytes of one tensor, in one piece."""
        _, parts = plan(self.config)
        stem = name.removesuffix(".weight").removesuffix(".scale")
        found = {part.stored: part for part in parts}
        part = found.get(name) or found.get(stem)
        if name.endswith("gate.bias_vl"):
            part = found[name.removesuffix("_vl")]
        if part is None:
            return self.untrained.chunks(name)
        spec = self.untrained.specs[name]
        value = self.masters[part.slot]
        value = value if part.expert is None else value[part.expert]
        value = value[part.rows[0] : part.rows[1]]
        kinds = {slot.name: slot.kind for slot in plan(self.config)[0]}
        data = stored_bytes(value, kinds[part.slot], name.endswith(".scale"))
        assert tuple(data.shape) == spec.shape, (name, data.shape, spec.shape)
        return iter((data.contiguous().view(torch.uint8).numpy().reshape(-1),))


def stored_bytes(value: Tensor, kind: Kind, scale: bool) -> Tensor:
    """A weight (or its scale) as it lies on disk."""
    if kind is Kind.FP8:
        factor = fp8_scale(value)
        if scale:
            return scale_bytes(factor)
        return encode_e4m3(value / expand(factor, *value.shape))
    if kind in (Kind.FP4, Kind.TABLE):
        largest = E2M1_MAX if kind is Kind.FP4 else E4M3_MAX
        floor = 7.0e-38 if kind is Kind.FP4 else 1e-4
        groups = value.unflatten(-1, (-1, BLOCK))
        factor = power_of_two(groups.abs().amax(-1).clamp(min=floor) * (1.0 / largest))
        if scale:
            return scale_bytes(factor)
        codes = (groups / factor[..., None]).flatten(-2)
        return encode_e2m1(codes) if kind is Kind.FP4 else encode_e4m3(codes)
    if kind in (Kind.F32, Kind.F32_MATRIX):
        return released_values(value, kind).contiguous()
    return value.to(torch.bfloat16).contiguous()


def power_of_two(x: Tensor) -> Tensor:
    """``2^ceil(log2 x)`` by the bits of positive fp32 ``x``."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def scale_bytes(factor: Tensor) -> Tensor:
    """ue8m0 bytes of powers of two."""
    return (torch.log2(factor).round().to(torch.int32) + 127).to(torch.uint8)


def write_release(
    folder: Path, config_file: Path, masters: dict[str, Tensor], tokenizer: Path
) -> None:
    """Write a checkpoint: configuration, tokenizer, one shard and its index."""
    folder.mkdir(parents=True, exist_ok=True)
    data = json.loads(config_file.read_text(encoding="utf-8"))
    config = parse_config(data, str(config_file))
    untrained = WeightWriter(config, CALM, seed=0)
    exporter = Exporter(config, masters, untrained)
    name = "model-00001-of-00001.safetensors"
    specs = list(untrained.specs.values())
    for _ in write_shard(folder / name, specs, exporter):
        pass
    metadata = {"total_size": sum(spec.nbytes for spec in specs)}
    index = {"metadata": metadata, "weight_map": dict.fromkeys(sorted(untrained.specs), name)}
    body = json.dumps(index, separators=(",", ":")) + "\n"
    (folder / "model.safetensors.index.json").write_text(body, encoding="utf-8")
    shutil.copyfile(config_file, folder / "config.json")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer.parent / file, folder / file)

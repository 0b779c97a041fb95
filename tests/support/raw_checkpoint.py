"""Checkpoint directories written byte by byte, so that tests can damage any part of them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from deepinfer_neuron.checkpoint.config import parse_config
from deepinfer_neuron.checkpoint.names import ITEM_BYTES, TensorSpec, inventory
from tests.support.released import released_config

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
NEUTRAL_SCALE = 127

_TEXT: dict[str, object] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "o_groups": 2,
    "max_position_embeddings": 256,
    "n_routed_experts": 3,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "compress_ratios": [0, 2, 1, 1, 1, 0, 0],
    "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2, 3],
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 32,
    "candidate_source_layer_id": 2,
    "candidate_topk_blocks": 8,
    "engram_layer_ids": [1],
    # The first primes from 10 on are 11, 13 (order 2) and 17, 19 (order 3).
    "engram_num_embeddings": [11 + 13 + 17 + 19],
    "engram_max_ngram_size": 3,
    "engram_vocab_size": 10,
    "engram_n_heads": 2,
    "engram_head_dim": 64,
    "engram_compressed_vocab_size": 50,
    "num_nextn_predict_layers": 2,
    "dspark_noise_token_id": 40,
    "dspark_target_layer_ids": [3, 4],
    "dspark_markov_rank": 16,
    "dspark_n_routed_experts": 2,
    "dspark_num_experts_per_tok": 1,
}

_VISION: dict[str, object] = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "patch_size": 2,
    "downsample_ratio": 2,
    "max_image_tokens": 16,
    "min_pixels": 16,
}


def small_config() -> dict[str, object]:
    """A configuration with every layer role whose checkpoint has well under a megabyte.

    Layer 0 is window-only, 1 full of ratio 2 with an Engram table, 2 full of ratio 1 and candidate
    source, 3 selects again inside the candidates, 4 reuses.
    """
    config = released_config()
    config.update(image_token_id=41, tokenizer_compatibility="native")
    section(config, "text_config").update(_TEXT)
    section(config, "vision_config").update(_VISION)
    return config


def section(config: dict[str, object], name: str) -> dict[str, object]:
    """The nested object ``name`` of a configuration, for changing it in place."""
    value = config[name]
    if not isinstance(value, dict):
        raise TypeError(f"{name} is not an object")
    return value


@dataclass
class RawTensor:
    """A tensor as the header of its shard will describe it."""

    dtype: str
    shape: list[int]
    data: bytes


@dataclass
class RawCheckpoint:
    """All parts of a checkpoint, open to changes until :meth:`write` puts them on disk."""

    config: dict[str, object]
    tensors: dict[str, RawTensor]
    located: dict[str, str]
    """Shard of every tensor."""
    index_extra: dict[str, str] = field(default_factory=dict)
    """Entries of the index without a tensor behind them."""

    def move(self, old: str, new: str) -> None:
        """Rename a tensor, in index and shard."""
        self.tensors[new] = self.tensors.pop(old)
        self.located[new] = self.located.pop(old)

    def remove(self, name: str) -> None:
        """Leave a tensor out, in index and shard."""
        del self.tensors[name], self.located[name]

    def add(self, name: str, dtype: str, shape: list[int]) -> None:
        """Add a tensor full of zero bytes to the first shard."""
        size = math.prod(shape) * {"U8": 1, "F16": 2, **ITEM_BYTES}[dtype]
        self.tensors[name] = RawTensor(dtype, shape, bytes(size))
        self.located[name] = SHARDS[0]

    def write(self, directory: Path) -> Path:
        """Write config, index and shards into ``directory`` and return it."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        write_index(directory, self.located | self.index_extra)
        for shard in sorted(set(self.located.values())):
            chosen = {
                name: self.tensors[name] for name in self.tensors if self.located[name] == shard
            }
            (directory / shard).write_bytes(shard_bytes(chosen))
        return directory


def write_index(directory: Path, weight_map: object) -> None:
    """Write an index file around ``weight_map``."""
    text = json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map})
    (directory / INDEX).write_text(text, encoding="utf-8")


def pattern(spec: TensorSpec) -> bytes:
    """Bytes that differ from tensor to tensor and row to row; scales stay around one."""
    seed = sum(spec.name.encode())
    if spec.dtype == "F8_E8M0":
        return bytes(NEUTRAL_SCALE + (seed + i) % 3 for i in range(spec.nbytes))
    return bytes((seed + i) % 251 for i in range(spec.nbytes))


def small_checkpoint(config: dict[str, object] | None = None) -> RawCheckpoint:
    """A complete checkpoint for ``config`` (by default the small one), in two shards.

    The first half of the inventory is in the first shard, the second half in the second.
    """
    config = small_config() if config is None else config
    specs = inventory(parse_config(config, "config.json"))
    tensors = {spec.name: RawTensor(spec.dtype, list(spec.shape), pattern(spec)) for spec in specs}
    half = len(specs) // 2
    located = {spec.name: SHARDS[0 if i < half else 1] for i, spec in enumerate(specs)}
    return RawCheckpoint(config, tensors, located)


def header_dict(tensors: dict[str, RawTensor]) -> dict[str, object]:
    """Header of a shard that holds ``tensors`` one behind the other."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in tensors.items():
        end = position + len(tensor.data)
        header[name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [position, end],
        }
        position = end
    return header


def shard_bytes(tensors: dict[str, RawTensor]) -> bytes:
    """A whole shard: length, header, data."""
    data = b"".join(tensor.data for tensor in tensors.values())
    return with_header(json.dumps(header_dict(tensors)).encode(), data)


def with_header(header: bytes, data: bytes) -> bytes:
    """A shard made of a header that need not be valid, and data."""
    return len(header).to_bytes(8, "little") + header + data


def split_shard(shard: bytes) -> tuple[dict[str, dict[str, object]], bytes]:
    """Header and data of a valid shard."""
    length = int.from_bytes(shard[:8], "little")
    return json.loads(shard[8 : 8 + length]), shard[8 + length :]

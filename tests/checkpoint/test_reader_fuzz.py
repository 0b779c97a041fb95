"""Random damage to headers, index and configuration: a clean error or a success, nothing else.

Every example also has to stay within a small bound of time and memory, so that no lie in a header
can make the reader allocate or loop.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepinfer_neuron.checkpoint.reader import Checkpoint
from deepinfer_neuron.errors import DeepInferNeuronError
from tests.support.raw_checkpoint import (
    INDEX,
    SHARDS,
    section,
    small_checkpoint,
    small_config,
    split_shard,
    with_header,
)

TABLE = "layers.0.engram.embed.weight"
SECONDS = 5.0
BYTES = 200 * 2**20

FUZZ = settings(
    deadline=None,
    derandomize=True,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

ODD_INTEGERS = st.sampled_from([0, 1, -1, 2**31, 2**53, 2**63, 2**64, 10**30]) | st.integers()
ODD_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | ODD_INTEGERS
    | st.floats()
    | st.sampled_from(["BF16", "F32", "F8_E4M3", "F8_E8M0", "I8", "U8", "BOOL", "F64", ""])
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


def smallest_config() -> dict[str, object]:
    """One full layer with an Engram table and no drafts, so that a header has few entries."""
    config = small_config()
    section(config, "text_config").update(
        num_hidden_layers=2,
        compress_ratios=[2, 1],
        kv_source_layer_ids=[0, 1],
        index_source_layer_ids=[0, 1],
        candidate_source_layer_id=None,
        engram_layer_ids=[0],
        n_routed_experts=2,
        num_nextn_predict_layers=0,
    )
    return config


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a valid checkpoint by name."""
    directory = small_checkpoint(smallest_config()).write(tmp_path_factory.mktemp("valid"))
    use(directory)
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def use(directory: Path) -> None:
    """Open a checkpoint and touch every byte of it in every way."""
    with Checkpoint.open(directory) as checkpoint:
        for name in checkpoint.specs:
            mapped, read = checkpoint.tensor(name), checkpoint.read(name)
            assert torch.equal(mapped.view(torch.uint8), read.view(torch.uint8))
        checkpoint.rows(TABLE, torch.arange(checkpoint.specs[TABLE].shape[0]))


def attempt(directory: Path, files: dict[str, bytes]) -> None:
    """Use a damaged checkpoint; only our own errors may come out, soon and without much memory."""
    for name, content in files.items():
        (directory / name).write_bytes(content)
    process = psutil.Process()
    started, memory = time.monotonic(), process.memory_info().rss
    with contextlib.suppress(DeepInferNeuronError):
        use(directory)
    assert time.monotonic() - started < SECONDS
    assert process.memory_info().rss - memory < BYTES


def damage_json(data: st.DataObject, value: object) -> object:
    """``value`` with one randomly chosen place replaced, removed, or added."""
    if not isinstance(value, (dict, list)) or not value or data.draw(st.integers(0, 9)) == 0:
        return data.draw(ODD_VALUES)
    keys = sorted(value) if isinstance(value, dict) else list(range(len(value)))
    key = data.draw(st.sampled_from(keys))
    action = data.draw(st.sampled_from(["descend"] * 4 + ["remove", "copy"]))
    if isinstance(value, list):
        damaged = {"remove": [], "copy": [value[key]] * 2}.get(action)
        inner = [damage_json(data, value[key])] if damaged is None else damaged
        return value[:key] + inner + value[key + 1 :]
    result = dict(value)
    if action == "remove":
        del result[key]
    elif action == "copy":
        result[key] = result[data.draw(st.sampled_from(keys))]
    else:
        result[key] = damage_json(data, result[key])
    return result


@FUZZ
@given(data=st.data())
def test_flipped_header_bytes(valid: dict[str, bytes], tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(valid[SHARDS[0]])
    end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, 7) | st.integers(0, end - 1))
        content[position] ^= data.draw(st.integers(1, 255))
    attempt(tmp_path, {**valid, SHARDS[0]: bytes(content)})


@FUZZ
@given(data=st.data())
def test_cut_or_extended_shard(
    valid: dict[str, bytes], tmp_path: Path, data: st.DataObject
) -> None:
    content = valid[SHARDS[1]]
    keep = data.draw(st.integers(0, 64) | st.integers(0, len(content)))
    content = content[:keep] + data.draw(st.binary(max_size=16))
    attempt(tmp_path, {**valid, SHARDS[1]: content})


@FUZZ
@given(length=st.integers(0, 2**64 - 1) | st.integers(0, 40_000))
def test_any_header_length(valid: dict[str, bytes], tmp_path: Path, length: int) -> None:
    content = length.to_bytes(8, "little") + valid[SHARDS[0]][8:]
    attempt(tmp_path, {**valid, SHARDS[0]: content})


@FUZZ
@given(data=st.data())
def test_damaged_header_values(
    valid: dict[str, bytes], tmp_path: Path, data: st.DataObject
) -> None:
    header, tail = split_shard(valid[SHARDS[0]])
    damaged = json.dumps(damage_json(data, header)).encode()
    attempt(tmp_path, {**valid, SHARDS[0]: with_header(damaged, tail)})


@FUZZ
@given(data=st.data(), name=st.sampled_from([INDEX, "config.json"]))
def test_damaged_json_files(
    valid: dict[str, bytes], tmp_path: Path, data: st.DataObject, name: str
) -> None:
    damaged = json.dumps(damage_json(data, json.loads(valid[name]))).encode()
    attempt(tmp_path, {**valid, name: damaged})


@FUZZ
@given(data=st.data(), name=st.sampled_from([INDEX, "config.json"]))
def test_flipped_bytes_in_json_files(
    valid: dict[str, bytes], tmp_path: Path, data: st.DataObject, name: str
) -> None:
    content = bytearray(valid[name])
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    attempt(tmp_path, {**valid, name: bytes(content)})

"""Opening a checkpoint (planning from headers only) and reading its data.

Every directory here is written byte by byte, so each kind of damage can be made on purpose.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deepinfer_neuron.checkpoint.config import parse_config
from deepinfer_neuron.checkpoint.names import inventory
from deepinfer_neuron.checkpoint.reader import Checkpoint
from deepinfer_neuron.checkpoint.shard_file import ShardFile
from deepinfer_neuron.errors import CheckpointError, ConfigError
from tests.support.raw_checkpoint import (
    INDEX,
    SHARDS,
    RawCheckpoint,
    RawTensor,
    section,
    shard_bytes,
    small_checkpoint,
    small_config,
    split_shard,
    with_header,
    write_index,
)

TABLE = "layers.1.engram.embed.weight"
TABLE_SCALE = "layers.1.engram.embed.scale"
Entry = dict[str, object]


def refused(directory: Path) -> str:
    """The one-line message with which a directory is refused."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory)
    message = str(caught.value)
    assert "\n" not in message
    return message


def refused_raw(raw: RawCheckpoint, directory: Path) -> str:
    return refused(raw.write(directory))


def edit_header(directory: Path, change: Callable[[dict[str, Entry]], object]) -> str:
    """Change the parsed header of the first shard in place; returns the shard's name."""
    path = directory / SHARDS[0]
    header, data = split_shard(path.read_bytes())
    change(header)
    path.write_bytes(with_header(json.dumps(header).encode(), data))
    return path.name


# A valid checkpoint


def test_open_plans_the_whole_inventory(opened: Checkpoint) -> None:
    expected = {spec.name: spec for spec in inventory(opened.config)}
    assert dict(opened.specs) == expected
    assert opened.total_bytes == sum(spec.nbytes for spec in expected.values())
    assert opened.config == parse_config(small_config(), "config.json")


def test_tensor_and_read_return_the_stored_bytes(opened: Checkpoint, raw: RawCheckpoint) -> None:
    kinds = {"BF16": torch.bfloat16, "F32": torch.float32}
    for name, spec in opened.specs.items():
        for tensor in (opened.tensor(name), opened.read(name)):
            assert tuple(tensor.shape) == spec.shape
            assert tensor.dtype == kinds.get(spec.dtype, torch.uint8)
            assert tensor.is_contiguous()
            assert tensor.view(torch.uint8).numpy().tobytes() == raw.tensors[name].data


def test_names_are_found_with_prefix_too(opened: Checkpoint) -> None:
    assert torch.equal(
        opened.tensor("model.norm.weight").view(torch.uint8),
        opened.tensor("norm.weight").view(torch.uint8),
    )


def test_tensor_is_a_view_of_the_file(opened: Checkpoint) -> None:
    name = "layers.0.ffn.experts.0.w1.weight"
    assert opened.tensor(name).data_ptr() == opened.tensor(name).data_ptr()
    assert opened.read(name).data_ptr() != opened.read(name).data_ptr()


def test_writing_to_a_tensor_leaves_the_file_alone(opened: Checkpoint) -> None:
    name = "layers.0.attn.attn_sink"
    before = opened.read(name)
    opened.tensor(name).fill_(3.0)
    assert torch.equal(opened.read(name).view(torch.uint8), before.view(torch.uint8))


def test_misaligned_data_is_copied(raw: RawCheckpoint, tmp_path: Path) -> None:
    """One stray byte in front shifts all 16-bit and 32-bit tensors of the shard."""
    data = raw.tensors
    raw.tensors = {"stray": RawTensor("I8", [1], b"\1"), **data}
    raw.located["stray"] = SHARDS[0]
    directory = raw.write(tmp_path)
    length = int.from_bytes((directory / SHARDS[0]).read_bytes()[:8], "little")
    header, tail = split_shard((directory / SHARDS[0]).read_bytes())
    padded = json.dumps(header).encode() + b" " * (-length % 4)
    (directory / SHARDS[0]).write_bytes(with_header(padded, tail))
    with Checkpoint.open(directory) as checkpoint:
        for name in ("layers.0.attn.attn_sink", "norm.weight"):
            tensor = checkpoint.tensor(name)
            assert tensor.data_ptr() % tensor.element_size() == 0
            assert tensor.view(torch.uint8).numpy().tobytes() == data[name].data


def test_tensors_outlive_the_checkpoint(raw: RawCheckpoint, tmp_path: Path) -> None:
    with Checkpoint.open(raw.write(tmp_path)) as checkpoint:
        tensor = checkpoint.tensor("norm.weight")
    assert tensor.view(torch.uint8).numpy().tobytes() == raw.tensors["norm.weight"].data
    for access in (checkpoint.tensor, checkpoint.read):
        with pytest.raises(CheckpointError, match="closed"):
            access("norm.weight")
    checkpoint.close()


def test_file_handles_are_released(raw: RawCheckpoint, tmp_path: Path) -> None:
    def handles() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = handles()
    with Checkpoint.open(raw.write(tmp_path)) as checkpoint:
        checkpoint.read("norm.weight")
        checkpoint.read("head.weight")
        assert handles() > before
    assert handles() == before


def test_unknown_name(opened: Checkpoint) -> None:
    for access in (opened.tensor, opened.read):
        with pytest.raises(CheckpointError, match="no tensor layers"):
            access("layers.99.attn_norm.weight")


def test_symbolic_links_and_string_paths(raw: RawCheckpoint, tmp_path: Path) -> None:
    """Download caches keep the files elsewhere and link to them."""
    raw.write(tmp_path / "blobs")
    (tmp_path / "model").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "model" / file.name).symlink_to(file)
    with Checkpoint.open(str(tmp_path / "model")) as checkpoint:
        assert checkpoint.read("norm.weight").shape == (64,)


@pytest.mark.parametrize(("in_index", "in_shard"), [(True, True), (True, False), (False, True)])
def test_prefix_in_index_and_shard_independently(
    raw: RawCheckpoint, tmp_path: Path, in_index: bool, in_shard: bool
) -> None:
    directory = raw.write(tmp_path)
    index = {("model." if in_index else "") + name: s for name, s in raw.located.items()}
    write_index(directory, index)
    for shard in SHARDS:
        chosen = {
            ("model." if in_shard else "") + name: tensor
            for name, tensor in raw.tensors.items()
            if raw.located[name] == shard
        }
        (directory / shard).write_bytes(shard_bytes(chosen))
    with Checkpoint.open(directory) as checkpoint:
        name = "layers.2.attn.wq_a.weight"
        assert checkpoint.read(name).numpy().tobytes() == raw.tensors[name].data


def test_unreferenced_shards_and_tensors_are_ignored(raw: RawCheckpoint, tmp_path: Path) -> None:
    directory = raw.write(tmp_path)
    (directory / "model-00009-of-00009.safetensors").write_bytes(b"junk")
    # In a shard, but not in the index.
    write_index(directory, raw.located)
    chosen = {name: raw.tensors[name] for name in raw.tensors if raw.located[name] == SHARDS[0]}
    chosen["leftover"] = RawTensor("F16", [3], bytes(6))
    (directory / SHARDS[0]).write_bytes(shard_bytes(chosen))
    Checkpoint.open(directory).close()


# Rows of a matrix


def test_rows_in_any_order_with_repeats(opened: Checkpoint) -> None:
    index = torch.tensor([59, 0, 7, 7, 31, 0])
    for name in (TABLE, TABLE_SCALE, "embed.weight"):
        whole = opened.read(name)
        picked = opened.rows(name, index)
        assert picked.dtype == whole.dtype
        assert torch.equal(picked.view(torch.uint8), whole[index].view(torch.uint8))


def test_no_rows(opened: Checkpoint) -> None:
    assert opened.rows(TABLE, torch.empty(0, dtype=torch.int64)).shape == (0, 64)
    assert opened.read_rows(TABLE, 60, 60).shape == (0, 64)


def test_row_ranges(opened: Checkpoint) -> None:
    whole = opened.read(TABLE)
    assert torch.equal(opened.read_rows(TABLE, 10, 25), whole[10:25])
    for first, last in ((-1, 3), (5, 61), (7, 6)):
        with pytest.raises(CheckpointError, match="within 0 to 60"):
            opened.read_rows(TABLE, first, last)


@pytest.mark.parametrize("wrong", [-1, 60, 2**62, -(2**63)])
def test_row_ids_out_of_range(opened: Checkpoint, wrong: int) -> None:
    with pytest.raises(CheckpointError, match=f"row {wrong} of {TABLE}"):
        opened.rows(TABLE, torch.tensor([3, wrong, 5]))


@pytest.mark.parametrize("index", [torch.zeros(2, dtype=torch.int32), torch.zeros((1, 2)).long()])
def test_row_ids_of_wrong_kind(opened: Checkpoint, index: torch.Tensor) -> None:
    with pytest.raises(CheckpointError, match="int64"):
        opened.rows(TABLE, index)


def test_rows_need_a_matrix(opened: Checkpoint) -> None:
    with pytest.raises(CheckpointError, match="matrix"):
        opened.rows("norm.weight", torch.tensor([0]))


def test_rows_of_a_table_beyond_four_gigabytes(tmp_path: Path) -> None:
    """The table is a hole in a sparse file; three rows of it are written and read back."""
    config = small_config()
    count = 70_000_027  # the first prime from 70,000,000 on
    section(config, "text_config").update(
        engram_num_embeddings=[count],
        engram_vocab_size=70_000_000,
        engram_max_ngram_size=2,
        engram_n_heads=1,
    )
    specs = inventory(parse_config(config, "config.json"))
    plain = [spec for spec in specs if spec.role != "engram_table"]
    header: dict[str, object] = {}
    position = 0
    for spec in [*plain, *(spec for spec in specs if spec.role == "engram_table")]:
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": spec.shape,
            "data_offsets": [position, position + spec.nbytes],
        }
        if spec.name == TABLE:
            table_start = position
        position += spec.nbytes
    text = json.dumps(header).encode()
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_index(tmp_path, {spec.name: "one.safetensors" for spec in specs})
    with (tmp_path / "one.safetensors").open("wb") as file:
        file.write(with_header(text, b""))
        file.truncate(8 + len(text) + position)
        for row in (0, count - 2, count - 1):
            file.seek(8 + len(text) + table_start + row * 64)
            file.write(bytes([row % 200 + 1] * 64))
    with Checkpoint.open(tmp_path) as checkpoint:
        index = torch.tensor([count - 1, 5, count - 2, 0])
        rows = checkpoint.rows(TABLE, index)
        assert rows[:, 0].tolist() == rows[:, 63].tolist()
        assert rows[:, 0].tolist() == [(count - 1) % 200 + 1, 0, (count - 2) % 200 + 1, 1]
        assert torch.equal(checkpoint.read_rows(TABLE, count - 2, count), rows[[2, 0]])


# Scale exponents


@pytest.mark.parametrize("byte", [0, 255])
@pytest.mark.parametrize("name", ["layers.0.attn.wq_a.scale", "mtp.1.ffn.experts.1.w2.scale"])
def test_damaged_scale_byte(raw: RawCheckpoint, tmp_path: Path, byte: int, name: str) -> None:
    """255 is not a number; 0 is what a hole in the file reads as, and no writer produces it."""
    raw.tensors[name].data = raw.tensors[name].data[:-1] + bytes([byte])
    with Checkpoint.open(raw.write(tmp_path)) as checkpoint:
        for access in (checkpoint.tensor, checkpoint.read, checkpoint.tensor):
            with pytest.raises(CheckpointError, match=f"{name} holds the scale byte {byte}"):
                access(name)
        checkpoint.tensor(name.replace("scale", "weight"))


def test_damaged_scale_byte_in_a_row(raw: RawCheckpoint, tmp_path: Path) -> None:
    """Of a table only the rows that are read are checked; there are two scales per row."""
    data = bytearray(raw.tensors[TABLE_SCALE].data)
    data[2 * 17] = 255
    raw.tensors[TABLE_SCALE].data = bytes(data)
    with Checkpoint.open(raw.write(tmp_path)) as checkpoint:
        checkpoint.rows(TABLE_SCALE, torch.tensor([16, 18]))
        checkpoint.read_rows(TABLE_SCALE, 18, 60)
        with pytest.raises(CheckpointError, match="scale byte 255"):
            checkpoint.rows(TABLE_SCALE, torch.tensor([16, 17]))
        with pytest.raises(CheckpointError, match="scale byte 255"):
            checkpoint.read_rows(TABLE_SCALE, 10, 20)


# The directory


def test_missing_directory(tmp_path: Path) -> None:
    assert "checkpoint directory" in refused(tmp_path / "nowhere")
    assert "checkpoint directory" in refused(Path("a\0b"))


def test_file_in_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert "not a directory" in refused(tmp_path / "file")


def test_empty_directory(tmp_path: Path) -> None:
    assert "config.json" in refused(tmp_path)


def test_missing_index(raw: RawCheckpoint, tmp_path: Path) -> None:
    (raw.write(tmp_path) / INDEX).unlink()
    assert INDEX in refused(tmp_path)


def test_configuration_errors_come_first(raw: RawCheckpoint, tmp_path: Path) -> None:
    raw.config["model_type"] = "other"
    (raw.write(tmp_path) / INDEX).unlink()
    with pytest.raises(ConfigError, match="model_type"):
        Checkpoint.open(tmp_path)


def test_engram_rows_must_match_the_primes(raw: RawCheckpoint, tmp_path: Path) -> None:
    section(raw.config, "text_config")["engram_num_embeddings"] = [59]
    raw.write(tmp_path)
    with pytest.raises(ConfigError, match=r"prime buckets; expected \[60\]"):
        Checkpoint.open(tmp_path)


# The index


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": null}', b"\xff"]
)
def test_damaged_index(raw: RawCheckpoint, tmp_path: Path, content: bytes) -> None:
    (raw.write(tmp_path) / INDEX).write_bytes(content)
    assert INDEX in refused(tmp_path)


def test_empty_index(raw: RawCheckpoint, tmp_path: Path) -> None:
    write_index(raw.write(tmp_path), {})
    message = refused(tmp_path)
    assert "missing tensors: embed.weight" in message
    assert f"({len(raw.tensors)} in total)" in message
    assert len(message) < 5000


def test_deeply_nested_index(raw: RawCheckpoint, tmp_path: Path) -> None:
    (raw.write(tmp_path) / INDEX).write_bytes(b'{"weight_map":' * 100_000)
    assert "nested too deeply" in refused(tmp_path)


@pytest.mark.parametrize(
    "shard",
    [
        "../model.safetensors",
        "..",
        ".",
        "",
        "/etc/passwd",
        "sub/model.safetensors",
        "sub\\model.safetensors",
        "a\0b",
        "\ud800",
        "x" * 256,
        7,
        None,
        ["model.safetensors"],
    ],
)
def test_shard_names_stay_in_the_directory(
    raw: RawCheckpoint, tmp_path: Path, shard: object
) -> None:
    weight_map: dict[str, object] = {**raw.located, "norm.weight": shard}
    write_index(raw.write(tmp_path), weight_map)
    assert "plain name of a file" in refused(tmp_path)


def test_missing_shards_are_listed_sorted(raw: RawCheckpoint, tmp_path: Path) -> None:
    raw.index_extra = {"x": "b.safetensors", "y": "a.safetensors"}
    assert "missing shards: a.safetensors, b.safetensors" in refused_raw(raw, tmp_path)


def test_dangling_link_is_a_missing_shard(raw: RawCheckpoint, tmp_path: Path) -> None:
    raw.write(tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    (tmp_path / SHARDS[1]).symlink_to(tmp_path / "gone")
    assert f"missing shards: {SHARDS[1]}" in refused(tmp_path)


def test_directory_or_pipe_in_place_of_a_shard(raw: RawCheckpoint, tmp_path: Path) -> None:
    """A pipe must be refused without waiting for a writer."""
    raw.write(tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    os.mkfifo(tmp_path / SHARDS[1])
    assert "not a regular file" in refused(tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    (tmp_path / SHARDS[1]).mkdir()
    assert "not a regular file" in refused(tmp_path)


def test_aliases_in_the_index(raw: RawCheckpoint, tmp_path: Path) -> None:
    raw.index_extra = {"model.norm.weight": SHARDS[0]}
    assert "'norm.weight' is ambiguous" in refused_raw(raw, tmp_path)


def test_repeated_name_in_the_index(raw: RawCheckpoint, tmp_path: Path) -> None:
    path = raw.write(tmp_path) / INDEX
    text = path.read_text(encoding="utf-8")
    twice = f'"weight_map": {{"norm.weight": "{SHARDS[1]}", '
    path.write_text(text.replace('"weight_map": {', twice), encoding="utf-8")
    assert "'norm.weight' appears twice" in refused(tmp_path)


@pytest.mark.parametrize(
    "name", ["layers.0.hc_attn_norm.weight", "mtp.0.hc_ffn_norm.weight", "hc_head_norm.weight"]
)
def test_separate_mixer_norms(raw: RawCheckpoint, tmp_path: Path, name: str) -> None:
    raw.add(name, "BF16", [256])
    assert "fold it into the columns" in refused_raw(raw, tmp_path)


def test_indexed_tensor_without_data(raw: RawCheckpoint, tmp_path: Path) -> None:
    raw.index_extra = {f"extra.{i:02d}": SHARDS[0] for i in range(12)}
    message = refused_raw(raw, tmp_path)
    assert "missing from their shards: extra.00, extra.01" in message
    assert "extra.10" not in message
    assert "(12 in total)" in message


def test_index_names_the_wrong_shard(raw: RawCheckpoint, tmp_path: Path) -> None:
    write_index(raw.write(tmp_path), {**raw.located, "norm.weight": SHARDS[1]})
    assert "missing from their shards: norm.weight" in refused(tmp_path)


# One shard's header


def test_shard_too_small(raw: RawCheckpoint, tmp_path: Path) -> None:
    for size in (0, 7):
        (raw.write(tmp_path) / SHARDS[0]).write_bytes(bytes(size))
        assert f"has {size} bytes" in refused(tmp_path)


@pytest.mark.parametrize("length", [0, 2**63, 2**64 - 1, 100_000_001, None])
def test_header_length(raw: RawCheckpoint, tmp_path: Path, length: int | None) -> None:
    """Zero, far beyond the file, and one byte beyond the file (``None``)."""
    path = raw.write(tmp_path) / SHARDS[0]
    content = path.read_bytes()
    wrong = len(content) - 7 if length is None else length
    path.write_bytes(wrong.to_bytes(8, "little") + content[8:])
    assert f"invalid safetensors header size {wrong}" in refused(tmp_path)


def test_header_of_more_than_a_hundred_million_bytes(raw: RawCheckpoint, tmp_path: Path) -> None:
    """Refused by its length although the (sparse) file is long enough."""
    path = raw.write(tmp_path) / SHARDS[0]
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(200_000_000)
    assert "expected 1 to 100000000" in refused(tmp_path)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "expected a JSON object"),
        (b"7", "expected a JSON object"),
        (b"\xff\xff", "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"1" * 10_000, "not valid JSON"),
        (b'{"a": {}, "a": {}}', "'a' appears twice"),
        (b'{"a": []}', "expected an object"),
        (b'{"a": {}}', "has dtype null"),
    ],
)
def test_damaged_header(raw: RawCheckpoint, tmp_path: Path, header: bytes, words: str) -> None:
    (raw.write(tmp_path) / SHARDS[0]).write_bytes(with_header(header, b""))
    message = refused(tmp_path)
    assert SHARDS[0] in message
    assert words in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dtype", "F64"),
        ("dtype", "bf16"),
        ("dtype", None),
        ("dtype", ["BF16"]),
        ("shape", None),
        ("shape", "64"),
        ("shape", [-64]),
        ("shape", [64.0]),
        ("shape", ["64"]),
        ("shape", [True] * 2),
        ("shape", [2**63]),
        ("shape", [1] * 17),
        ("shape", [10**4000]),
        ("shape", [63]),
        ("shape", [65]),
        ("data_offsets", None),
        ("data_offsets", [0]),
        ("data_offsets", [0, 128, 256]),
        ("data_offsets", [128, 0]),
        ("data_offsets", [-128, 0]),
        ("data_offsets", [0, 127]),
        ("data_offsets", [0.0, 128.0]),
        ("data_offsets", [False, True]),
        ("data_offsets", ["0", "128"]),
        ("data_offsets", [2**40, 2**40 + 128]),
        ("data_offsets", [10**30, 10**30 + 128]),
    ],
)
def test_lies_about_one_tensor(raw: RawCheckpoint, tmp_path: Path, key: str, value: object) -> None:
    """``norm.weight`` is BF16 [64], 128 bytes."""

    def lie(header: dict[str, Entry]) -> None:
        header["norm.weight"][key] = value

    edit_header(raw.write(tmp_path), lie)
    message = refused(tmp_path)
    assert "norm.weight" in message
    assert SHARDS[0] in message
    assert len(message) < 600


def test_overlapping_data(raw: RawCheckpoint, tmp_path: Path) -> None:
    def overlap(header: dict[str, Entry]) -> None:
        header["image_end"]["data_offsets"] = header["image_start"]["data_offsets"]

    edit_header(raw.write(tmp_path), overlap)
    message = refused(tmp_path)
    assert "overlap" in message
    assert "image_end" in message


def test_truncated_shard(raw: RawCheckpoint, tmp_path: Path) -> None:
    path = raw.write(tmp_path) / SHARDS[1]
    path.write_bytes(path.read_bytes()[:-1])
    message = refused(tmp_path)
    assert "invalid byte range" in message
    assert "truncated" in message


def test_bytes_behind_the_last_tensor(raw: RawCheckpoint, tmp_path: Path) -> None:
    path = raw.write(tmp_path) / SHARDS[1]
    path.write_bytes(path.read_bytes() + b"\0")
    assert "end with the file" in refused(tmp_path)


def test_aliases_in_a_shard(raw: RawCheckpoint, tmp_path: Path) -> None:
    def alias(header: dict[str, Entry]) -> None:
        header["model.norm.weight"] = {"dtype": "I8", "shape": [0], "data_offsets": [0, 0]}

    edit_header(raw.write(tmp_path), alias)
    assert "'norm.weight' is ambiguous" in refused(tmp_path)


# Coverage


@pytest.mark.parametrize(
    "name",
    [
        "embed.weight",
        "head.weight",
        "layers.0.attn.attn_sink",
        "layers.1.attn.compressor.wgate.weight",
        "layers.2.attn.wq_a.scale",
        "layers.3.attn.indexer.weights_proj.weight",
        "layers.3.ffn.shared_experts.w3.weight",
        "layers.4.ffn.experts.1.w2.weight",
        "layers.4.ffn.experts.1.w2.scale",
        TABLE_SCALE,
        "mtp.0.main_norm.weight",
        "mtp.1.confidence_head.proj.weight",
        "vision.norm.weight",
    ],
)
def test_missing_tensor(raw: RawCheckpoint, tmp_path: Path, name: str) -> None:
    raw.remove(name)
    assert name in refused_raw(raw, tmp_path)


def test_all_missing_tensors_are_named_at_once(raw: RawCheckpoint, tmp_path: Path) -> None:
    names = ["norm.weight", "layers.0.attn_norm.weight", "mtp.1.norm.weight"]
    for name in names:
        raw.remove(name)
    assert ", ".join(names) in refused_raw(raw, tmp_path)


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "words"),
    [
        ("norm.weight", "F32", [64], "expected BF16 [64]"),
        ("norm.weight", "BF16", [65], "expected BF16 [64]"),
        ("norm.weight", "BF16", [64, 1], "expected BF16 [64]"),
        ("embed.weight", "F16", [64, 64], "never converted"),
        ("layers.0.hc_attn_fn", "BF16", [24, 256], "must be 32-bit floats"),
        ("layers.0.attn.attn_sink", "BF16", [2], "must be 32-bit floats"),
        ("layers.0.ffn.gate.bias", "BF16", [3], "must be 32-bit floats"),
        ("layers.0.ffn.experts.0.w1.weight", "U8", [32, 32], "never converted"),
        ("layers.0.ffn.experts.0.w1.weight", "I8", [32, 64], "expected I8 [32, 32]"),
        ("layers.0.ffn.experts.0.w1.scale", "U8", [32, 2], "expected F8_E8M0"),
        ("layers.0.ffn.experts.0.w1.scale", "F8_E8M0", [2, 32], "expected F8_E8M0 [32, 2]"),
        ("layers.0.attn.wq_a.weight", "BF16", [32, 64], "expected F8_E4M3"),
        ("layers.0.attn.wq_a.scale", "F32", [1, 2], "expected F8_E8M0"),
        ("layers.0.attn.wq_a.scale", "F8_E8M0", [2, 1], "expected F8_E8M0 [1, 2]"),
        (TABLE, "F8_E4M3", [61, 64], "expected F8_E4M3 [60, 64]"),
        (TABLE_SCALE, "F8_E8M0", [2, 2], "expected F8_E8M0 [60, 2]"),
    ],
)
def test_wrong_format(
    raw: RawCheckpoint, tmp_path: Path, name: str, dtype: str, shape: list[int], words: str
) -> None:
    raw.add(name, dtype, shape)
    raw.located[TABLE_SCALE] = raw.located[TABLE]
    message = refused_raw(raw, tmp_path)
    assert f"{name} is stored as {dtype} {shape}" in message
    assert words in message


def test_expert_gap(raw: RawCheckpoint, tmp_path: Path) -> None:
    for part in ("w1", "w2", "w3"):
        for kind in ("weight", "scale"):
            raw.remove(f"layers.2.ffn.experts.1.{part}.{kind}")
    message = refused_raw(raw, tmp_path)
    assert "expert indices of layers.2 are not contiguous, 1 is missing" in message


@pytest.mark.parametrize(("block", "beyond"), [("layers.2", 3), ("mtp.1", 2)])
def test_expert_beyond_the_configured_count(
    raw: RawCheckpoint, tmp_path: Path, block: str, beyond: int
) -> None:
    raw.add(f"{block}.ffn.experts.{beyond}.w1.weight", "I8", [32, 32])
    message = refused_raw(raw, tmp_path)
    assert f"{block} has {beyond + 1} routed experts but config.json says {beyond}" in message


def test_too_few_experts(raw: RawCheckpoint, tmp_path: Path) -> None:
    section(raw.config, "text_config")["n_routed_experts"] = 4
    assert "has 3 routed experts but config.json says 4" in refused_raw(raw, tmp_path)


def test_table_and_scale_in_different_shards(raw: RawCheckpoint, tmp_path: Path) -> None:
    raw.located[TABLE], raw.located[TABLE_SCALE] = SHARDS
    assert "expected both in the same shard" in refused_raw(raw, tmp_path)


def test_expert_halves_may_lie_in_different_shards(raw: RawCheckpoint, tmp_path: Path) -> None:
    raw.located["layers.0.ffn.experts.0.w1.weight"] = SHARDS[0]
    raw.located["layers.0.ffn.experts.0.w1.scale"] = SHARDS[1]
    Checkpoint.open(raw.write(tmp_path)).close()


def test_tensors_of_another_schedule_are_reported_once(
    raw: RawCheckpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A compressor on a reuse layer usually means a wrong schedule in config.json."""
    raw.add("layers.4.attn.compressor.wkv.weight", "BF16", [64, 64])
    raw.add("layers.0.attn.indexer.wk.weight", "BF16", [32, 64])
    raw.add("layers.5.attn_norm.weight", "BF16", [64])
    with caplog.at_level(logging.WARNING):
        Checkpoint.open(raw.write(tmp_path)).close()
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert "layers.0.attn.indexer.wk.weight" in message
    assert "layers.4.attn.compressor.wkv.weight" in message
    assert "layers.5.attn_norm.weight" in message


def test_unknown_tensors_are_ignored_silently(
    raw: RawCheckpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("rotary.inv_freq", "layers.0.attn.unknown", "mtp.0.embed.weight", "a.scale"):
        raw.add(name, "F32", [2])
    with caplog.at_level(logging.WARNING), Checkpoint.open(raw.write(tmp_path)) as checkpoint:
        assert "rotary.inv_freq" not in checkpoint.specs
    assert not caplog.records


# Files that change while the checkpoint is open


@pytest.mark.parametrize("opened_before", [False, True])
def test_shard_cut_after_opening(raw: RawCheckpoint, tmp_path: Path, opened_before: bool) -> None:
    """Reported as an error by every way of reading, mapped or not, instead of a crash."""
    with Checkpoint.open(raw.write(tmp_path)) as checkpoint:
        if opened_before:
            checkpoint.tensor(TABLE)
            checkpoint.rows(TABLE, torch.tensor([1]))
        os.truncate(tmp_path / raw.located[TABLE], 4096)
        accesses: list[Callable[[], torch.Tensor]] = [
            lambda: checkpoint.tensor(TABLE),
            lambda: checkpoint.read(TABLE),
            lambda: checkpoint.rows(TABLE, torch.tensor([59])),
            lambda: checkpoint.read_rows(TABLE, 0, 60),
        ]
        for access in accesses:
            with pytest.raises(CheckpointError, match="has 4096 bytes but had"):
                access()


def test_short_read(tmp_path: Path) -> None:
    """A file that ends although its size was right a moment before."""
    (tmp_path / "shard").write_bytes(bytes(100))
    shard = ShardFile(tmp_path / "shard", 100)
    assert shard.read(90, 10, "x").shape == (10,)
    with pytest.raises(CheckpointError, match="short read of x, got 10 of 11 bytes"):
        shard.read(90, 11, "x")
    shard.close()


def test_shard_removed_after_opening(raw: RawCheckpoint, tmp_path: Path) -> None:
    with Checkpoint.open(raw.write(tmp_path)) as checkpoint:
        (tmp_path / SHARDS[0]).unlink()
        with pytest.raises(CheckpointError, match="cannot open the shard"):
            checkpoint.read("embed.weight")


def test_planning_reads_no_data(tmp_path: Path) -> None:
    """A checkpoint whose data is all damaged still opens, since only headers are read."""
    raw = small_checkpoint()
    for tensor in raw.tensors.values():
        tensor.data = b"\xff" * len(tensor.data)
    Checkpoint.open(raw.write(tmp_path)).close()

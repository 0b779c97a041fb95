"""``tiny`` writes a checkpoint, ``inspect`` tells what is in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from deepinfer_neuron.checkpoint.config import parse_config
from deepinfer_neuron.cli.inspect import layer_table
from deepinfer_neuron.cli.main import main
from tests.support.released import released_config


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A nano checkpoint written by the command line."""
    directory = tmp_path_factory.mktemp("checkpoints") / "nano"
    assert main(["tiny", "--out", str(directory), "--preset", "nano", "--seed", "3"]) == 0
    return directory


def test_tiny_says_where_the_checkpoint_is(nano: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The same arguments again: nothing is written, the message is the same.
    before = (nano / "config.json").stat().st_mtime_ns
    assert main(["tiny", "--out", str(nano), "--preset", "nano", "--seed", "3"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{nano}: nano checkpoint, ")
    assert captured.err == ""
    assert (nano / "config.json").stat().st_mtime_ns == before


def test_seed_and_wild_change_the_weights(nano: Path, tmp_path: Path) -> None:
    directories = [nano]
    for name, options in {"other": ["--seed", "4"], "wild": ["--seed", "3", "--wild"]}.items():
        directories.append(tmp_path / name)
        out = ["--out", str(directories[-1])]
        assert main(["tiny", "--preset", "nano", *out, *options]) == 0
    weights = {
        b"".join(shard.read_bytes() for shard in sorted(directory.glob("*.safetensors")))
        for directory in directories
    }
    assert len(weights) == 3


def test_an_unknown_preset_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiny", "--out", str(tmp_path / "x"), "--preset", "huge"]) == 2
    assert "'huge'" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_directory_with_other_files_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["tiny", "--out", str(tmp_path), "--preset", "nano"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_inspect_as_json(nano: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(nano), "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    found = json.loads(captured.out)
    assert found["directory"] == str(nano)
    assert found["config"]["hidden_size"] == 128
    assert [layer["role"] for layer in found["layers"]] == [
        "swa",
        "swa",
        "full",
        "reuse",
        "full",
        "full",
        "reuse",
        "reindex",
        "reuse",
    ]
    assert found["layers"][8]["kv_source"] == 5
    index = json.loads((nano / "model.safetensors.index.json").read_text())
    assert found["total"]["tensors"] == len(index["weight_map"])
    assert found["total"]["disk"] == index["metadata"]["total_size"]
    assert found["total"]["disk"] == sum(part["disk"] for part in found["components"])
    files = {path.name: path.stat().st_size for path in nano.glob("*.safetensors")}
    assert {shard["file"]: shard["bytes"] for shard in found["shards"]} == files


def test_inspect_for_a_person(nano: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(nano)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["Backbone", "9", "layers", "of", "width", "128"] in lines
    assert ["5", "full", "1", "itself", "itself", "itself", "picks", "candidates"] in lines
    assert ["7", "reindex", "1", "5", "5", "itself", "inside", "the", "candidates", "of", "5"] in (
        lines
    )
    assert any(line[:1] == ["engram_table"] and line[-2:] == ["0", "B"] for line in lines)


def test_inspect_joins_equal_neighbours() -> None:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(layer_table(parse_config(released_config(), "config.json")))
    first_cells = [line.split()[:2] for line in capture.get().splitlines()[2:]]
    assert first_cells == [
        ["0", "swa"],
        ["1", "swa"],
        ["2", "full"],
        ["3-7", "reuse"],
        ["8", "full"],
        ["9-13", "reuse"],
        ["14", "full"],
        ["15-19", "reuse"],
        ["20", "full"],
        ["21-23", "reuse"],
        ["24", "reindex"],
        ["25-27", "reuse"],
        ["28", "reindex"],
        ["29-31", "reuse"],
        ["32", "reindex"],
        ["33-35", "reuse"],
        ["36", "reindex"],
        ["37-39", "reuse"],
    ]


@pytest.mark.parametrize("name", ["missing", "file"])
def test_inspect_of_no_checkpoint_is_an_error(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no directory")
    assert main(["inspect", str(tmp_path / name)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert name in captured.err


def test_inspect_names_a_missing_shard(
    nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = sorted(nano.glob("*.safetensors"))
    for path in nano.iterdir():
        if path != shards[-1]:
            (tmp_path / path.name).symlink_to(path)
    assert main(["inspect", str(tmp_path)]) == 2
    assert shards[-1].name in capsys.readouterr().err

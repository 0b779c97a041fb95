"""``inspect --plan`` answers from ``config.json`` alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer_neuron.cli.main import main
from tests.support.released import released_config


@pytest.fixture
def flash(tmp_path: Path) -> Path:
    """A directory that holds the released configuration and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(released_config()))
    return tmp_path


def test_a_plan_that_fits(flash: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(flash), "--plan", "cores=64,nextn=5"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = [line.split() for line in captured.out.splitlines()]
    assert ["weights", "17.09", "GiB"] in lines
    assert ["Engram", "tables", "2.95", "GiB"] in lines
    assert "890 bytes per token" in captured.out
    assert "estimate, not measured" in captured.out
    assert lines[0][0] == "Plan:"
    assert "cores=64,ep=64,cp=1,nextn=5,max_model_len=16384" in lines[0][1]
    step = next(line for line in lines if line[:1] == ["step"])
    assert 22 < float(step[-1]) <= 90


def test_a_plan_as_json(flash: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = "cores=64,nextn=5,dense=sharded"
    assert main(["inspect", str(flash), "--json", "--plan", plan]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True
    assert found["layout"]["dense"] == "sharded"
    memory, kv = found["memory"], found["kv"]
    assert sum(memory["weights"].values()) == memory["weight_bytes"]
    used = memory["fixed_bytes"] + kv["blocks"] * kv["block_bytes"]
    used += kv["pages"] * kv["page_bytes"] + found["expanded_bytes"] + found["unused_bytes"]
    assert used == memory["capacity"] == 24 * 2**30
    assert sum(found["graphs_by_region"].values()) == found["graphs"]
    step = found["decode_step"]
    assert step["label"] == "estimate, not measured"
    assert step["seconds"] <= 0.030
    terms = sum(part["seconds"] for part in step["components"])
    terms += step["graph_switch"] + step["collectives"]
    assert step["seconds"] == pytest.approx(terms)
    assert sum(step["launches"].values()) == 92
    assert step["seconds"] < step["seconds_at_observed_bandwidth"] < 0.035


def test_a_plan_that_does_not_fit(flash: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(flash), "--plan", "cores=32"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: the plan does not fit: a core needs 27.")
    assert captured.err.endswith("change dense=sharded, or cores=64\n")
    assert "routed experts" in captured.out


def test_a_plan_that_does_not_fit_as_json(flash: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(flash), "--json", "--plan", "cores=32,max_num_seqs=16384"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False
    assert found["memory"]["missing"] > 0
    assert all(len(changes) == 2 for changes in found["changes"])


@pytest.mark.parametrize("plan", ["cores=0", "cores=abc", "cores=64,x=1", "cores=64,ep=5", ""])
def test_a_plan_that_is_wrong(plan: str, flash: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(flash), "--plan", plan]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert len(captured.err.splitlines()) == 1


def test_a_context_shorter_than_the_candidate_filter(
    flash: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(flash), "--plan", "cores=64,max_model_len=8192"]) == 2
    assert "give at least 16384" in capsys.readouterr().err


def test_a_small_checkpoint_fits_on_one_core(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "nano")
    assert main(["tiny", "--out", out, "--preset", "nano"]) == 0
    capsys.readouterr()
    assert main(["inspect", out, "--json", "--plan", "cores=1,max_model_len=256"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layout"]["ep"] == 1
    assert found["decode_step"]["collectives"] == 0


def test_no_configuration_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path), "--plan", "cores=64"]) == 2
    assert "config.json" in capsys.readouterr().err

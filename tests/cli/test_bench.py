"""The benchmark command, golden tokens and the example that checks them, on a small checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_neuron.cli.main import EXIT_ERROR, main
from deepinfer_neuron.errors import CheckpointError
from deepinfer_neuron.reference import golden

CheckpointDir = Callable[..., Path]
EXAMPLE = Path("examples/neuron/run_deepinfer_tiny.py")
SHORT = ["--input-len", "6", "--output-len", "5", "--batch", "2"]


def test_json(checkpoint_dir: CheckpointDir, capsys: pytest.CaptureFixture[str]) -> None:
    directory = checkpoint_dir("nano", 1)
    assert main(["bench", "--model", str(directory), *SHORT, "--nextn", "3", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["nextn"] == 3
    assert record["batch"] == 2
    assert record["ttft_ms"] > 0
    assert record["tpot_ms"] > 0
    assert record["tokens_per_decode_step"] >= 1
    parts = record["forward_ms"] + record["verify_ms"] + record["draft_ms"]
    assert parts == pytest.approx(record["step_ms"])
    assert 1 <= len(record["acceptance_by_position"]) <= 3
    assert len(record["confidence_by_position"]) == len(record["acceptance_by_position"])


def test_a_table_for_people(
    checkpoint_dir: CheckpointDir, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = checkpoint_dir("nano", 1)
    assert main(["bench", "--model", str(directory), *SHORT, "--nextn", "0"]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["tokens per decode step"].strip() == "1.00"
    assert lines["acceptance by position"].strip() == "-"


@pytest.mark.parametrize("option", ["--input-len", "--output-len", "--batch"])
def test_sizes_start_at_one(
    option: str, checkpoint_dir: CheckpointDir, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = str(checkpoint_dir("nano", 1))
    assert main(["bench", "--model", directory, option, "0"]) == EXIT_ERROR
    assert f"{option} is 0; give a number of at least 1" in capsys.readouterr().err


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with golden tokens."""
    out = tmp_path_factory.mktemp("golden") / "nano"
    assert main(["tiny", "--preset", "nano", "--out", str(out), "--golden"]) == 0
    return out


class TestGolden:
    def run(self, directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(EXAMPLE), "--model", str(directory), *options]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    @pytest.mark.parametrize("nextn", ["0", "3", "7"])
    def test_every_golden_token_comes_out(self, directory: Path, nextn: str) -> None:
        done = self.run(directory, "--nextn", nextn)
        assert done.returncode == 0, done.stderr
        short, long = done.stdout.splitlines()
        assert short.startswith("9/9 golden tokens (short prompt, 12 tokens")
        assert long.startswith("9/9 golden tokens (long prompt, 200 tokens")

    def test_a_wrong_token_is_told(self, directory: Path, tmp_path: Path) -> None:
        for path in directory.iterdir():
            (tmp_path / path.name).symlink_to(path)
        spoiled = golden.load(directory)
        spoiled[0].token_ids[-1] = (spoiled[0].token_ids[-1] + 1) % 500
        (tmp_path / golden.FILE_NAME).unlink()
        golden.save(tmp_path, spoiled)
        done = self.run(tmp_path)
        assert done.returncode == 1
        assert done.stdout.startswith("8/9 golden tokens")

    @pytest.mark.parametrize("content", [None, "", "[1]", '[{"name": "x"}]'])
    def test_a_missing_or_damaged_file(self, tmp_path: Path, content: str | None) -> None:
        if content is not None:
            (tmp_path / golden.FILE_NAME).write_text(content)
        with pytest.raises(CheckpointError, match="holds no golden tokens"):
            golden.load(tmp_path)
        done = self.run(tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert "Traceback" not in done.stderr

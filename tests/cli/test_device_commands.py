"""``compile``, ``bench`` and the Neuron examples on a device with regions, small as can be."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_neuron.cli.compile import EXIT_INCOMPLETE
from deepinfer_neuron.cli.main import main
from deepinfer_neuron.platform import CpuPlatform
from deepinfer_neuron.platform.regions import Regions

CheckpointDir = Callable[..., Path]

REGIONS = ["--compile", "regions", "--prefill-bucket", "4", "--max-num-batched-tokens", "8"]
# Prompt and decode passes of one shape need one graph per region: the least there is to capture.
SMALLEST = ["--nextn", "0", "--prefill-bucket", "1", "--max-num-batched-tokens", "1"]
EXAMPLES = Path("examples/neuron")


def run(program: list[str], *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *program, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


class TestOnTheHost:
    """The static network with plain calls in the place of compiled graphs."""

    @pytest.fixture(autouse=True)
    def plain_regions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(CpuPlatform, "make_regions", lambda self, compile=None: Regions())

    def compile(self, directory: Path, *options: str) -> int:
        limits = ["--max-num-seqs", "2", "--max-model-len", "128"]
        argv = ["compile", "--model", str(directory), *REGIONS, *limits, "--nextn", "1"]
        return main([*argv, *options])

    def test_every_graph_is_listed(
        self, checkpoint_dir: CheckpointDir, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.compile(checkpoint_dir("nano", 1), "--json") == 0
        captured = capsys.readouterr()
        record = json.loads(captured.out)
        assert captured.err == ""
        assert record["complete"] is True
        # One and two sequences, prompts of 4 and 8 rows.
        assert record["passes"] == 4
        assert record["graphs"] == len(record["regions"])
        assert record["missing_passes"] == []
        names = {region["region"] for region in record["regions"]}
        assert {"Embedding.start", "StaticHead.verify", "StaticDrafts.propose"} <= names
        start = [r["shapes"] for r in record["regions"] if r["region"] == "Embedding.start"]
        assert ["i32[4]"] in start

    def test_a_table_for_people(
        self, checkpoint_dir: CheckpointDir, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.compile(checkpoint_dir("nano", 1)) == 0
        captured = capsys.readouterr()
        assert "compiling" in captured.err
        *_, last = captured.out.strip().splitlines()
        assert " graphs for 4 passes in " in last
        assert "LayerMixture.mix" in captured.out

    def test_a_budget_ends_it_and_what_is_missing_is_named(
        self, checkpoint_dir: CheckpointDir, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code = self.compile(checkpoint_dir("nano", 1), "--warm-up-seconds", "1e-6", "--json")
        assert code == EXIT_INCOMPLETE
        record = json.loads(capsys.readouterr().out)
        assert record["complete"] is False
        assert record["passes"] + len(record["missing_passes"]) == 4
        assert "1 x 8 rows, 1 blocks" in record["missing_passes"]

    def test_bench_counts_copies_and_predicts_nothing(
        self, checkpoint_dir: CheckpointDir, capsys: pytest.CaptureFixture[str]
    ) -> None:
        argv = ["bench", "--model", str(checkpoint_dir("nano", 1)), *REGIONS, "--nextn", "1"]
        assert main([*argv, "--input-len", "10", "--output-len", "4", "--json"]) == 0
        record = json.loads(capsys.readouterr().out)
        device = record["device"]
        # Two pieces of the prompt, then a pass per step; the first piece downloads nothing.
        assert device["graphs_after_warm_up"] == 0
        assert device["uploads"] == device["passes"] == record["steps"]
        assert device["downloads"] == device["passes"] - 1
        assert "forecast" not in record
        assert "decode_step" not in record


@pytest.mark.slow
class TestSimulated:
    """Every process captures its graphs anew."""

    def test_bench(self, checkpoint_dir: CheckpointDir) -> None:
        options = ["--model", str(checkpoint_dir("nano", 1)), "--simulate", *SMALLEST]
        done = run(
            [str(EXAMPLES / "bench_neuron.py")], *options,
            "--input-len", "1", "--output-len", "4", "--cores", "4", "--json",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        record = json.loads(done.stdout)
        counts = record["decode_step"]
        assert (counts["uploads"], counts["downloads"]) == (1, 1)
        assert (counts["operators outside regions"], counts["graphs compiled"]) == (0, 0)
        # Nine layers with two regions each, two Engram updates, metadata, embedding, and two that
        # end a step without drafts.
        assert 2 * 9 + 4 <= counts["regions"] <= 2 * 9 + 6
        assert "nothing about a chip" in record["times_are"]
        forecast = record["forecast"]
        assert forecast["label"] == "estimate, not measured"
        assert forecast["cores"] == 4
        assert forecast["fits"] is True
        assert forecast["tpot_ms"] == forecast["step_ms"] / forecast["tokens_per_decode_step"] > 0
        assert len(forecast["prompt_passes"]) == 1
        assert forecast["ttft_ms"] > 0

    def test_generate_gives_the_tokens_of_the_host(self, checkpoint_dir: CheckpointDir) -> None:
        options = ["--model", str(checkpoint_dir("nano", 1)), "--prompt", "Hi", "--max-tokens", "4"]
        program = [str(EXAMPLES / "offline_inference_neuron.py")]
        host = run(program, *options, "--nextn", "0")
        device = run(program, *options, "--simulate", *self.limits())
        assert device.returncode == host.returncode == 0, device.stderr
        assert device.stdout.splitlines()[0] == host.stdout.splitlines()[0]
        assert "operator by operator" in host.stdout
        assert "graphs_after_warm_up=0" in device.stdout

    def limits(self) -> list[str]:
        limits = ["--max_num_seqs", "1", "--max_num_batched_tokens", "1", "--num_blocks", "2"]
        return [*limits, "--max_model_len", "128", "--nextn", "0", "--prefill-bucket", "1"]


@pytest.mark.parametrize(
    "name", ["offline_inference_neuron.py", "bench_neuron.py", "run_deepinfer_tiny.py"]
)
def test_examples_answer_errors_in_one_line(name: str, tmp_path: Path) -> None:
    done = run([str(EXAMPLES / name)], "--model", str(tmp_path), "--device", "cpu", "--simulate")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1

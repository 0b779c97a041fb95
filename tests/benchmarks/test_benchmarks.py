"""The benchmarks run and count right; how fast anything is does not matter here."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import host_speed
from benchmarks.experts import recorded_experts
from benchmarks.machine import QUICK_PROBE, Machine, examine
from benchmarks.markers import markers, write_between
from benchmarks.measure import Task, measure_load, measure_memory, measure_speed
from benchmarks.memory import in_child, peak_bytes, resident
from benchmarks.report import render
from benchmarks.results import Load, Memory, ModelResult, Report, Speed, WeightsResult
from benchmarks.timing import Budget, durations, repetitions
from benchmarks.traffic import Traffic
from benchmarks.workload import Sizes, Workload, decode, prefill, run_tokens
from deepinfer_neuron.checkpoint.config import ModelConfig
from deepinfer_neuron.checkpoint.names import inventory
from deepinfer_neuron.checkpoint.reader import Checkpoint
from deepinfer_neuron.model.footprint import measure_parts, text_parts
from deepinfer_neuron.ops.arithmetic import free_arithmetic
from deepinfer_neuron.runner.worker import Worker

CheckpointDir = Callable[..., Path]
OpenCheckpoint = Callable[..., Checkpoint]

BEGIN, END = markers(host_speed.NAME)
SIZES = Sizes(24, (1, 3), 10, 30, Budget(1, 0.0), Budget(2, 60.0))


@pytest.fixture(scope="module")
def task(checkpoint_dir: CheckpointDir) -> Task:
    return Task(checkpoint_dir("nano"), "packed", torch.get_num_threads(), SIZES)


@pytest.fixture(scope="module")
def memory(task: Task) -> Memory:
    return measure_memory(task, "free")


@pytest.fixture(scope="module")
def speeds(task: Task) -> tuple[Speed, ...]:
    return measure_speed(task, ("free", "fixed"))


@pytest.fixture
def config(open_checkpoint: OpenCheckpoint) -> ModelConfig:
    return open_checkpoint("nano").config


@pytest.fixture
def worker(open_checkpoint: OpenCheckpoint) -> Worker:
    return Worker(open_checkpoint("nano"), free_arithmetic(), expanded=True, max_length=128)


# Timing


def test_quick_work_is_repeated_as_often_as_asked_after_a_warm_up() -> None:
    calls: list[int] = []
    assert len(durations(lambda: calls.append(0), Budget(4, 60.0))) == 4
    assert len(calls) == 5


def test_slow_work_is_measured_at_least_once() -> None:
    assert len(durations(lambda: None, Budget(4, 0.0))) == 1
    assert len(repetitions(lambda: None, Budget(4, -1.0))) == 1


# Memory


def test_allocated_memory_is_resident(tmp_path: Path) -> None:
    before = resident(tmp_path)
    held = torch.ones(1 << 26, dtype=torch.uint8)
    after = resident(tmp_path)
    assert after.anonymous - before.anonymous > 0.9 * held.nbytes
    assert after.total >= after.anonymous
    assert after.shards == 0
    assert peak_bytes() > 0.9 * after.total


def test_touched_pages_of_mapped_weights_are_told_apart(checkpoint_dir: CheckpointDir) -> None:
    directory = checkpoint_dir("nano", 41)
    with Checkpoint.open(directory) as checkpoint:
        assert resident(directory).shards == 0
        head = checkpoint.tensor("head.weight")
        assert head.sum().isfinite()
        assert head.nbytes <= resident(directory).shards <= resident(directory).total


def test_a_child_has_a_peak_of_its_own() -> None:
    """The function that is called needs no torch, so the fresh process stays far smaller."""
    assert 0 < in_child(peak_bytes) < peak_bytes()


# Counts


@pytest.mark.parametrize("expanded", [False, True])
def test_dense_weights_and_all_experts_are_the_whole_text_network(
    config: ModelConfig, expanded: bool
) -> None:
    """What is left over: the embedding, whose rows are read singly, and four unused vectors."""
    traffic = Traffic(config, expanded=expanded)
    parts = text_parts(measure_parts(inventory(config)), drafts=False)
    held = sum(part.expanded if expanded else part.packed for part in parts)
    layers = len(config.layers)
    vectors = 3 * 2 * config.hidden_size + 4 * layers * config.n_routed_experts
    embedding = 2 * config.vocab_size * config.hidden_size
    experts = layers * config.n_routed_experts * traffic.expert_bytes
    # 1000 tokens are more than any indexer may select, so nothing is skipped.
    assert traffic.dense_bytes([1000]) + experts + embedding + vectors == held


def test_a_packed_expert_takes_four_bits_and_a_share_of_a_scale_per_weight(
    config: ModelConfig,
) -> None:
    weights = 3 * config.hidden_size * config.moe_intermediate_size
    assert Traffic(config, expanded=False).expert_bytes == weights // 2 + weights // 32
    assert Traffic(config, expanded=True).expert_bytes == 2 * weights


def test_indexer_queries_are_read_once_there_is_a_choice(config: ModelConfig) -> None:
    traffic = Traffic(config, expanded=False)
    assert traffic.dense_bytes([config.index_topk]) < traffic.dense_bytes([config.index_topk + 1])


def test_bytes_of_one_token_after_another(config: ModelConfig) -> None:
    """nano's 9 layers: windows of 8 keys, 16 selected entries, ratios 2, 2, 1, 1 of selections.

    Records hold 64 + 2 bytes (window), 32 + 4 (compressed) and 16 + 1 (index) for heads of 64 and
    index heads of 32 channels.
    """
    traffic = Traffic(config, expanded=False)
    read = traffic.decode_bytes([1, 40], experts=3, engram_rows=5)
    assert read.experts == 3 * traffic.expert_bytes
    assert read.rows == 2 * 2 * 128 + 5 * (32 + 1)
    first = 2 * 36  # no window keys; two selections of its own entry at ratio 1
    later = 9 * 7 * 66 + 4 * 16 * 36 + (20 + 20 + 40 + 40) * 17
    assert read.caches == first + later
    assert read.total == read.dense + read.experts + read.rows + read.caches


def test_operations_of_a_prompt_match_what_torch_counts(worker: Worker) -> None:
    """Torch counts padded keys as well, which a short prompt has few of."""
    tokens = 40
    workload = Workload.draw(worker, 1, tokens, tokens, 0)
    worker.allocate(workload.blocks, 1)
    with FlopCounterMode(display=False) as counter:
        prefill(worker, workload.members[0])
    counted = Traffic(worker.config, expanded=True).prefill_flops(tokens)
    assert 0.8 * counter.get_total_flops() < counted <= counter.get_total_flops()


def test_used_experts_are_recorded(worker: Worker) -> None:
    config = worker.config
    workload = Workload.draw(worker, 3, 4, 4, 1)
    worker.allocate(workload.blocks, 3)
    with recorded_experts(worker) as record:
        run_tokens(worker, workload.members[:1], [range(1)])
        assert [len(e) for e in record.by_layer(9)] == [config.num_experts_per_tok] * 9
        prefill(worker, workload.members[1])
    noted = len(record.used)
    assert 9 * config.num_experts_per_tok < noted <= 9 * config.n_routed_experts
    prefill(worker, workload.members[2])
    assert len(record.used) == noted


# Workload


def test_sequences_have_lengths_slots_and_blocks_of_their_own(worker: Worker) -> None:
    workload = Workload.draw(worker, 5, 20, 300, 6)
    assert [member.prompt for member in workload.members] == [300, 230, 160, 90, 20]
    assert [len(member.tokens) for member in workload.members] == [306, 236, 166, 96, 26]
    assert [member.state_slot for member in workload.members] == [1, 2, 3, 4, 5]
    blocks = [block for member in workload.members for block in member.block_table]
    assert blocks == list(range(1, workload.blocks + 1))
    assert [member.prompt for member in workload.spread(1)] == [300]
    assert [member.prompt for member in workload.spread(3)] == [300, 160, 20]


def test_a_decode_step_gives_logits_of_every_sequence(worker: Worker) -> None:
    workload = Workload.draw(worker, 2, 5, 9, 1)
    worker.allocate(workload.blocks, 2)
    for member in workload.members:
        prefill(worker, member)
    logits = decode(worker, workload.members, 0)
    assert logits.shape == (2, worker.config.vocab_size)
    assert logits.isfinite().all()


# Measurements


def test_load(task: Task) -> None:
    load = measure_load(task)
    assert load.cold > 0
    assert load.warm > 0


def test_memory(memory: Memory, config: ModelConfig) -> None:
    assert [touched.steps for touched in memory.touched] == [1, 2, 3, 4]
    first, last = memory.touched[0], memory.touched[-1]
    assert first.expert_count == len(config.layers) * config.num_experts_per_tok
    assert all(set(a) <= set(b) for a, b in zip(first.experts, last.experts, strict=True))
    assert Traffic(config, expanded=False).dense_bytes([1]) < first.bytes < last.bytes
    assert 0 < first.resident.shards <= first.resident.total
    assert memory.caches > 0
    assert memory.peak >= memory.prefilled.anonymous
    assert memory.allowance > memory.base.total


def test_speed(speeds: tuple[Speed, ...]) -> None:
    assert [speed.arithmetic for speed in speeds] == ["free", "fixed"]
    for speed in speeds:
        assert speed.prefill.tokens == SIZES.prompt
        assert math.isclose(speed.prefill.tokens_per_second * speed.prefill.median, SIZES.prompt)
        assert [decoded.batch for decoded in speed.decode] == [1, 3]
        for decoded in speed.decode:
            assert len(decoded.seconds) == SIZES.decode.times
            assert 2 <= decoded.experts_per_layer <= min(8, 2 * decoded.batch)
            assert math.isclose(decoded.gbytes * decoded.median * 1e9, decoded.step_bytes.total)
    one, three = speeds[0].decode
    assert one.step_bytes.total < three.step_bytes.total < 3 * one.step_bytes.total


# Report


@pytest.fixture
def report(memory: Memory, speeds: tuple[Speed, ...]) -> Report:
    """Real results of ``nano``, presented as those of ``mid`` so that the bounds are shown."""
    result = WeightsResult("packed", Load(2.5, 1.25), (memory,), speeds)
    machine = Machine("A CPU", ("avx2",), 2, 1, 8 << 30, "Linux", "3.11", "2.13", 0.5, 20, 10, 90)
    model = ModelResult("mid", 4_100_000, 72, 9, (result,))
    return Report(machine, SIZES, (model,))


def test_report_shows_every_configuration(report: Report) -> None:
    text = render(report)
    lines = text.splitlines()
    assert sum(line.startswith("| packed | free | 24 |") for line in lines) == 1
    assert sum(line.startswith("| packed | fixed | 3 |") for line in lines) == 1
    assert "| weights | prefill | decode, batch 1 | decode, batch 3 |" in lines
    assert "| load, cold | 2.50 s | below 5 s | yes |" in lines
    assert any(line.startswith("| resident after one decode step, free order") for line in lines)
    widths = {line.count("|") for line in lines if line.startswith("| packed")}
    assert widths <= {5, 8, 10, 12}
    assert json.loads(json.dumps(dataclasses.asdict(report)))["sizes"]["prompt"] == 24


def test_tables_replace_what_stands_between_the_markers(tmp_path: Path) -> None:
    document = tmp_path / "doc.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_between(document, host_speed.NAME, "new\n")
    write_between(document, host_speed.NAME, "newer\n")
    assert document.read_text() == f"before\n{BEGIN}\n\nnewer\n\n{END}\nafter\n"


def test_a_document_without_markers_is_left_alone(tmp_path: Path) -> None:
    document = tmp_path / "doc.md"
    document.write_text(f"{END} {BEGIN}")
    with pytest.raises(ValueError, match="add them where the tables belong"):
        write_between(document, host_speed.NAME, "new\n")
    assert document.read_text() == f"{END} {BEGIN}"


def test_the_documentation_has_a_place_for_the_tables() -> None:
    text = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1
    assert text.index(BEGIN) < text.index(END)


# The script


def test_command_line_defaults() -> None:
    plan, json_file, markdown_file = host_speed.parse([])
    assert plan.presets == ("tiny",)
    assert plan.weights == ("packed", "expanded")
    assert plan.arithmetics == ("free", "fixed")
    assert plan.sizes.batches == (1, 8, 32)
    assert (plan.sizes.prompt, plan.sizes.shortest, plan.sizes.longest) == (512, 128, 600)
    assert (json_file, markdown_file) == (None, None)


def test_machine() -> None:
    machine = examine(QUICK_PROBE, torch.get_num_threads())
    assert machine.cpu
    assert machine.torch == torch.__version__
    assert min(machine.copy_gbytes, machine.vector_gbytes, machine.matmul_gflops) > 0


@pytest.mark.slow
def test_quick_run_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document, data = tmp_path / "doc.md", tmp_path / "out.json"
    document.write_text(f"{BEGIN}\n{END}\n")
    arguments = ["--quick", "--weights", "packed", "--order", "free", "--threads", "1"]
    files = ["--json", str(data), "--markdown", str(document)]
    assert host_speed.main([*arguments, *files, "--checkpoints", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "### `nano`" in printed
    assert "### `nano`" in document.read_text()
    (model,) = json.loads(data.read_text())["models"]
    assert model["preset"] == "nano"
    (weights,) = model["weights"]
    assert [decoded["batch"] for decoded in weights["speed"][0]["decode"]] == [1, 2]


def test_an_unusable_directory_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nano").mkdir()
    (tmp_path / "nano" / "something").write_text("else")
    assert host_speed.main(["--quick", "--checkpoints", str(tmp_path)]) == 1
    assert "error:" in capsys.readouterr().err

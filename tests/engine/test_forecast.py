"""The estimated decode step, against sums done by hand from the published sizes of the model."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from deepinfer_neuron.checkpoint.config import ModelConfig, parse_config
from deepinfer_neuron.engine.calibration import PortHabits, calibration, calibration_table
from deepinfer_neuron.engine.forecast import Forecast, decode_shape, forecast
from deepinfer_neuron.engine.layout import parse_layout
from deepinfer_neuron.engine.placement import place
from deepinfer_neuron.engine.step_work import step_work
from deepinfer_neuron.model.rank_weights import VISION, rank_tensors
from deepinfer_neuron.platform.simulator.cost import trn2_core
from deepinfer_neuron.runner.graph_count import decode_launches
from tests.support.released import released_config

CONTEXT = 512 + 128

ATTENTION_VALUES = 5120 * (1280 + 512) + 1280 * 64 * 512 + 8 * 1024 * 4096 + 8192 * 5120
SHARED_VALUES = EXPERT_VALUES = 3 * 5120 * 2304


@functools.cache
def released() -> ModelConfig:
    """The released configuration."""
    return parse_config(released_config(), "config.json")


def packed(text: str) -> Forecast:
    """The step of a plan with all matrices packed."""
    layout = parse_layout(text, released())
    shape = decode_shape(released(), layout, 1, CONTEXT)
    return forecast(released(), layout, shape, 0, trn2_core())


def placed(text: str) -> Forecast:
    """The step of a plan with matrices expanded as far as memory goes."""
    placement = place(released(), parse_layout(text, released()), context=CONTEXT)
    assert placement is not None
    return placement.step


def test_weights_of_a_step_are_counted_from_the_configuration() -> None:
    parts = {part.name: part for part in packed("cores=64,nextn=5").components}
    # Per layer; 32 x 32 values of an 8-bit matrix share a scale byte.
    assert parts["attention"].converted_elements == 40 * ATTENTION_VALUES
    assert parts["shared expert"].converted_elements == 40 * SHARED_VALUES
    assert parts["shared expert"].bytes == 40 * SHARED_VALUES * 1025 // 1024
    # Six of 384 experts, half a byte per value, one scale byte per 32.
    assert parts["routed experts"].converted_elements == 40 * 6 * EXPERT_VALUES
    assert parts["routed experts"].bytes == 40 * 6 * EXPERT_VALUES * 17 // 32
    assert parts["Engram projection"].converted_elements == pytest.approx(
        2 * 25600 * 6144, rel=1e-3
    )
    # Bf16 head, and logits of six rows: written, sampled, verified.
    assert parts["LM head"].bytes == 129280 * (5120 * 2 + 6 * 3 * 4)
    assert parts["routed experts"].flops == 2 * 8 * 40 * 6 * EXPERT_VALUES


def test_a_step_moves_and_converts_what_the_specification_says() -> None:
    step = packed("cores=64,nextn=5")
    assert sum(part.bytes for part in step.components) == pytest.approx(15.6e9, rel=0.01)
    weights = [part for part in step.components if part.name != "cache reads"]
    assert sum(part.converted_elements for part in weights) == pytest.approx(16.1e9, rel=0.01)


def test_six_rows_run_as_eight() -> None:
    step = packed("cores=64,nextn=5")
    assert (step.shape.rows, step.shape.outputs, step.shape.blocks) == (8, 6, 128)
    assert packed("cores=64,nextn=0").shape.rows == 1


def test_launches_of_a_step() -> None:
    step = packed("cores=64,nextn=5")
    # 2 per layer; 2 Engram updates; metadata, embedding, head; for drafts their keys, beginning,
    # embedding, layers, chain.
    assert step.estimate.launches == 2 * 40 + 2 + 3 + 4 + 3 == 92
    assert sum(count for _, count in step.launches) == 92
    assert step.estimate.launches == len(decode_launches(released(), step.shape, 5))
    bare = packed("cores=64,nextn=0")
    assert bare.estimate.launches == len(decode_launches(released(), bare.shape, 0)) == 86
    # Mixtures of 40 layers and 3 draft blocks, 2 Engram updates, control values.
    assert step.collectives == 46
    # Sharded: behind wo_a and wo_b, two Engram projections, two embeddings, main projection,
    # head, and the five places of the chain.
    assert packed("cores=64,nextn=5,dense=sharded").collectives == 46 + 2 * 43 + 2 + 2 + 1 + 1 + 5


def test_cache_reads_follow_the_shape_of_the_pass() -> None:
    parts = {part.name: part for part in packed("cores=64,nextn=5").components}
    # 8 rows read 128 window keys in 40 layers, and 128 with the 8 of their block in 3 more; 38
    # layers read 512 compressed keys per row. A table of 16384 tokens is scanned by 3 layers of
    # ratio 2 and 5 of ratio 1.
    window = 8 * (40 * 128 + 3 * 136)
    compressed, scanned = 8 * 38 * 512, 3 * 8192 + 5 * 16384
    assert parts["cache reads"].bytes == window * 528 + compressed * 288 + scanned * 68
    values = (window + compressed) * 512 + scanned * 128
    assert parts["cache reads"].converted_elements == values


def test_experts_are_exchanged_within_their_ranks() -> None:
    def experts(text: str) -> dict[int, int]:
        layout = parse_layout(text, released())
        costs = step_work(released(), layout, decode_shape(released(), layout)).collectives
        # One row of 5120 bf16 values.
        return {cost.ranks: cost.count for cost in costs if cost.bytes == 5120 * 2}

    assert experts("cores=64,ep=32,nextn=0") == {32: 40}
    # The shared expert and wo_b are spread over all cores, and so is the embedding.
    assert experts("cores=64,ep=32,nextn=0,dense=sharded") == {64: 40 + 40 + 1}


def test_one_core_exchanges_nothing() -> None:
    assert packed("cores=1,nextn=0").estimate.collectives == 0.0


def test_every_weight_is_read() -> None:
    layout = parse_layout("cores=64,nextn=5", released())
    work = step_work(released(), layout, decode_shape(released(), layout))
    read = {matrix.name for region in work.regions for _, matrix in region.matrices}
    held = {
        tensor.name.replace(".0.w", f".{copy}.w")
        for tensor in rank_tensors(released(), layout.split)
        if tensor.quantized and not tensor.gathered and tensor.component != VISION
        for copy in range(tensor.copies)
    }
    assert read == held


def test_components_share_the_time_of_the_regions() -> None:
    for step in (packed("cores=64"), placed("cores=64"), placed("cores=64,dense=sharded")):
        regions = sum(region.seconds for region in step.estimate.regions)
        assert sum(part.seconds for part in step.components) == pytest.approx(regions)


def test_the_released_model_reaches_its_numbers() -> None:
    # All packed, converting alone takes 16.1e9 * 2 / 491.5e9 = 65.5 ms.
    assert 65.5 < packed("cores=64,nextn=5").milliseconds <= 90
    assert placed("cores=64,nextn=5").milliseconds < packed("cores=64,nextn=5").milliseconds
    assert placed("cores=64,nextn=5").milliseconds <= 90
    assert placed("cores=64,nextn=5,dense=sharded").milliseconds <= 30


def test_sharded_weights_leave_room_to_expand_more_than_half_of_the_experts() -> None:
    step = placed("cores=64,nextn=5,dense=sharded")
    parts = {part.name: part for part in step.components}
    expanded = 1 - parts["routed experts"].converted_elements / (240 * EXPERT_VALUES)
    assert 3 <= 6 * expanded <= 4


def test_an_embedding_in_host_memory_drains_the_queue_once() -> None:
    step = packed("cores=64,host_embed=1")
    assert step.estimate.drains == trn2_core().drain
    assert step.estimate.total == pytest.approx(
        packed("cores=64").estimate.total + trn2_core().drain
    )


def test_more_layers_launch_no_other_regions() -> None:
    small = released_config()
    text = small["text_config"]
    assert isinstance(text, dict)
    text["num_hidden_layers"] = 28
    text["compress_ratios"] = [0, 0] + [2] * 12 + [1] * 14 + [0] * 3
    text["kv_source_layer_ids"] = [2, 8, 14]
    text["index_source_layer_ids"] = [2, 8, 14, 18, 22]
    text["candidate_source_layer_id"] = 14
    text["engram_layer_ids"] = [1, 8]
    text["dspark_target_layer_ids"] = [25, 26, 27]
    config = parse_config(small, "config.json")
    layout = parse_layout("cores=64", config)
    step = forecast(config, layout, decode_shape(config, layout), 0, trn2_core())
    assert {name for name, _ in step.launches} == {name for name, _ in packed("cores=64").launches}
    assert step.estimate.launches == 92 - 2 * 12


def test_reported_times_are_explained_in_part() -> None:
    found = {one.figure.name: one for one in calibration(released())}
    assert [round(1e3 * one.figure.reported) for one in found.values()] == [
        433, 1025, 1009, 907, 5440, 5010,
    ]  # fmt: skip
    for one in found.values():
        assert one.explained + one.unexplained == pytest.approx(one.figure.reported)
    before, chain, device = (list(found.values())[place] for place in (1, 2, 3))
    # 230 operators of 0.07 ms fewer, then two drains of 50 ms fewer; reported: 16 and 102 ms.
    assert before.explained - chain.explained == pytest.approx(230 * 70e-6)
    assert chain.explained - device.explained == pytest.approx(0.1)
    # 144 GB of weights converted to fp32 through memory take 199 ms.
    regions = sum(region.seconds for region in device.estimate.regions)
    assert regions == pytest.approx(0.199, rel=0.05)


def test_the_documented_tables_are_the_computed_ones() -> None:
    text = (Path(__file__).parents[2] / "docs" / "placement.md").read_text(encoding="utf-8")
    assert calibration_table(calibration(released())) in text
    (row,) = [line for line in text.splitlines() if line.startswith("| **step** |")]
    steps = [
        *(find("cores=64,nextn=5") for find in (packed, placed)),
        *(find("cores=64,nextn=5,dense=sharded") for find in (packed, placed)),
    ]
    assert row == "| **step** | " + " | ".join(f"**{s.milliseconds:.1f}**" for s in steps) + " |"


def test_assumptions_about_the_port_can_be_changed() -> None:
    mild = calibration(released(), habits=PortHabits(0, 1, 0, 0))
    harsh = calibration(released())
    assert all(a.explained < b.explained for a, b in zip(mild, harsh, strict=True))


def test_the_calibration_table_says_that_it_is_an_estimate() -> None:
    lines = calibration_table(calibration(released())).splitlines()
    assert "estimate, not measured" in lines[0]
    assert len(lines) == 4 + 6
    assert all(line.count("|") == 11 for line in lines[2:] if not line.startswith("|---"))

"""Bytes of a checkpoint's components on disk and in memory."""

from __future__ import annotations

from deepinfer_neuron.checkpoint.config import parse_config
from deepinfer_neuron.checkpoint.names import TensorSpec, inventory
from deepinfer_neuron.cli.doctor import judge
from deepinfer_neuron.model.footprint import Part, measure_parts, total
from deepinfer_neuron.platform.neuron_parts import NeuronParts
from tests.support.released import released_config


def test_a_scaled_8_bit_matrix_doubles_and_loses_its_scale_when_expanded() -> None:
    specs = [
        TensorSpec("a.weight", (64, 32), "F8_E4M3", "attention"),
        TensorSpec("a.scale", (2, 1), "F8_E8M0", "attention"),
    ]
    assert measure_parts(specs) == [
        Part("attention", tensors=2, disk=64 * 32 + 2, packed=64 * 32 + 2, expanded=2 * 64 * 32)
    ]


def test_a_packed_4_bit_matrix_takes_two_bytes_per_value_when_expanded() -> None:
    values = 64 * 32
    (part,) = measure_parts([TensorSpec("e.weight", (64, 16), "I8", "expert")])
    assert (part.disk, part.packed, part.expanded) == (values // 2, values // 2, values * 2)


def test_plain_tensors_stay_as_they_are() -> None:
    specs = [
        TensorSpec("norm.weight", (8,), "BF16", "norm"),
        TensorSpec("hc_attn_base", (8,), "F32", "norm"),
    ]
    assert measure_parts(specs) == [Part("norm", tensors=2, disk=48, packed=48, expanded=48)]


def test_tables_read_from_the_files_take_no_memory() -> None:
    (part,) = measure_parts([TensorSpec("t.weight", (100, 32), "F8_E4M3", "engram_table")])
    assert (part.disk, part.packed, part.expanded) == (3200, 0, 0)


def test_the_total_adds_everything() -> None:
    parts = [Part("a", 1, 10, 20, 30), Part("b", 2, 1, 2, 3)]
    assert total(parts) == Part("total", 3, 11, 22, 33)


def test_the_released_model_has_its_published_size() -> None:
    # Published: 96,085 tensors, 510,286,023,000 bytes; routed experts 271,790,899,200 bytes of
    # codes and 16,986,931,200 of scales; tables 202,758,032,400 bytes.
    parts = measure_parts(inventory(parse_config(released_config(), "config.json")))
    by_name = {part.name: part for part in parts}
    whole = total(parts)
    assert (whole.tensors, whole.disk) == (96_085, 510_286_023_000)
    assert whole.packed == 510_286_023_000 - 202_758_032_400
    assert by_name["engram_table"].disk == 202_758_032_400
    assert by_name["expert"].packed == 271_790_899_200 + 16_986_931_200
    assert by_name["expert"].expanded == 4 * 271_790_899_200
    # The number that doctor compares the memory with is the same one.
    parts = NeuronParts((), None, "2.13.0", None, ())
    verdicts = (judge(whole.packed, parts)[-1].ok, judge(whole.packed - 1, parts)[-1].ok)
    assert verdicts == (True, False)

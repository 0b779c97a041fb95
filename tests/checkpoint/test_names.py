"""The tensor inventory, against the published counts and byte totals of two checkpoints."""

from __future__ import annotations

from collections import Counter

import pytest

from deepinfer_neuron.checkpoint.config import parse_config
from deepinfer_neuron.checkpoint.names import (
    TensorSpec,
    canonical_name,
    inventory,
    is_surplus,
    split_block_name,
)
from tests.support.raw_checkpoint import section, small_config
from tests.support.released import released_config
from tests.support.tiny_v41 import tiny_v41_config


@pytest.fixture(scope="module")
def released() -> list[TensorSpec]:
    return inventory(parse_config(released_config(), "config.json"))


@pytest.fixture(scope="module")
def by_name(released: list[TensorSpec]) -> dict[str, TensorSpec]:
    return {spec.name: spec for spec in released}


def below(specs: list[TensorSpec], prefix: str) -> list[TensorSpec]:
    return [spec for spec in specs if spec.name.startswith(prefix)]


def total(specs: list[TensorSpec]) -> int:
    return sum(spec.nbytes for spec in specs)


def test_released_totals(released: list[TensorSpec]) -> None:
    """The byte total is the one that the released index states."""
    assert len(released) == 96_085
    assert total(released) == 510_286_023_000
    assert len({spec.name for spec in released}) == 96_085


def test_tiny_totals() -> None:
    specs = inventory(parse_config(tiny_v41_config(), "config.json"))
    assert len(specs) == 974
    assert total(specs) == 41_927_384


@pytest.mark.parametrize(
    ("dtype", "count", "size"),
    [
        ("F8_E4M3", 357, 204_015_223_296),
        ("I8", 47_232, 278_585_671_680),
        ("F8_E8M0", 47_589, 23_563_015_184),
        ("BF16", 520, 3_952_883_712),
        ("F32", 387, 169_229_128),
    ],
)
def test_released_storage_types(
    released: list[TensorSpec], dtype: str, count: int, size: int
) -> None:
    chosen = [spec for spec in released if spec.dtype == dtype]
    assert (len(chosen), total(chosen)) == (count, size)


@pytest.mark.parametrize(
    ("role", "dtype", "count", "size"),
    [
        ("expert", "I8", 46_080, 271_790_899_200),
        ("expert", "F8_E8M0", 46_080, 16_986_931_200),
        ("engram_table", "F8_E4M3", 2, 196_613_849_600),
        ("engram_table", "F8_E8M0", 2, 6_144_182_800),
        ("draft_expert", None, 2_304, 7_219_445_760),
        ("attention", None, 520, 5_069_721_600),
        ("shared_expert", None, 240, 1_416_960_000),
        ("embed", None, 1, 1_323_827_200),
        ("head", None, 1, 1_323_827_200),
        ("vision", None, 259, 823_685_120),
        ("aligner", None, 4, 146_821_120),
        ("draft", None, 95, 581_046_152),
        ("markov", None, 2, 132_382_720),
        ("engram", None, 8, 315_043_840),
        ("router", None, 120, 157_409_280),
        ("hyper_connection", None, 240, 157_295_040),
        ("indexer", None, 32, 45_130_752),
        ("compressor", None, 11, 36_704_256),
        ("norm", None, 84, 860_160),
    ],
)
def test_released_components(
    released: list[TensorSpec], role: str, dtype: str | None, count: int, size: int
) -> None:
    chosen = [spec for spec in released if spec.role == role and dtype in (None, spec.dtype)]
    assert (len(chosen), total(chosen)) == (count, size)


def test_global_tensors(released: list[TensorSpec]) -> None:
    assert sum(not spec.name.startswith(("layers.", "mtp.")) for spec in released) == 269


@pytest.mark.parametrize(
    ("layer", "extra_count", "extra_bytes"),
    [
        (0, 0, 0),
        (3, 0, 0),
        (2, 8, 16_193_792),
        (20, 7, 10_950_912),
        (24, 3, 5_575_680),
    ],
)
def test_released_layers_by_role(
    released: list[TensorSpec], layer: int, extra_count: int, extra_bytes: int
) -> None:
    """30 tensors and six per expert, plus those of the role: window, reuse, full, reindex."""
    specs = below(released, f"layers.{layer}.")
    experts = [spec for spec in specs if ".experts." in spec.name]
    assert len(experts) == 6 * 384
    assert len(specs) == 30 + 6 * 384 + extra_count
    assert total(experts) == 7_219_445_760
    assert total(specs) - total(experts) == 170_055_128 + extra_bytes


def test_released_engram_layers(released: list[TensorSpec]) -> None:
    assert len(below(released, "layers.1.engram.")) == 6
    assert len(below(released, "layers.14.")) == 30 + 6 * 384 + 8 + 6
    table = sum(s.nbytes for s in released if s.name.startswith("layers.1.engram.embed"))
    assert total(below(released, "layers.1.engram.")) - table == 157_521_920


@pytest.mark.parametrize(
    ("block", "count", "size"),
    [(0, 801, 246_161_880), (1, 798, 167_431_640), (2, 802, 299_835_352)],
)
def test_released_draft_blocks(
    released: list[TensorSpec], block: int, count: int, size: int
) -> None:
    specs = below(released, f"mtp.{block}.")
    assert len(specs) == count
    assert sum(s.nbytes for s in specs if ".experts." not in s.name) == size


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("embed.weight", "BF16", (129280, 5120)),
        ("vision.patch_embed.proj.weight", "BF16", (1024, 588)),
        ("vision.blocks.31.mlp.w1.weight", "BF16", (5632, 1024)),
        ("aligner.w1.weight", "BF16", (5120, 9216)),
        ("layers.0.hc_attn_fn", "F32", (24, 20480)),
        ("layers.0.hc_ffn_scale", "F32", (3,)),
        ("layers.0.attn.attn_sink", "F32", (64,)),
        ("layers.0.attn.wq_a.scale", "F8_E8M0", (40, 160)),
        ("layers.0.attn.wq_b.weight", "F8_E4M3", (32768, 1280)),
        ("layers.0.attn.wkv.scale", "F8_E8M0", (16, 160)),
        ("layers.0.attn.wo_a.weight", "F8_E4M3", (8192, 4096)),
        ("layers.0.attn.wo_a.scale", "F8_E8M0", (256, 128)),
        ("layers.0.attn.wo_b.weight", "F8_E4M3", (5120, 8192)),
        ("layers.0.ffn.gate.bias_vl", "F32", (384,)),
        ("layers.0.ffn.shared_experts.w2.scale", "F8_E8M0", (160, 72)),
        ("layers.39.ffn.experts.383.w1.weight", "I8", (2304, 2560)),
        ("layers.39.ffn.experts.383.w2.weight", "I8", (5120, 1152)),
        ("layers.39.ffn.experts.383.w2.scale", "F8_E8M0", (5120, 72)),
        ("layers.2.attn.compressor.wgate.weight", "BF16", (512, 5120)),
        ("layers.2.attn.indexer.wk.weight", "BF16", (128, 512)),
        ("layers.24.attn.indexer.wq_b.scale", "F8_E8M0", (128, 40)),
        ("layers.24.attn.indexer.weights_proj.weight", "BF16", (32, 5120)),
        ("layers.14.engram.embed.weight", "F8_E4M3", (384016682, 256)),
        ("layers.14.engram.embed.scale", "F8_E8M0", (384016682, 8)),
        ("layers.1.engram.wkv.weight", "F8_E4M3", (25600, 6144)),
        ("layers.1.engram.q_weight", "BF16", (4, 5120)),
        ("mtp.0.main_proj.weight", "F8_E4M3", (5120, 15360)),
        ("mtp.0.main_proj.scale", "F8_E8M0", (160, 480)),
        ("mtp.2.markov_head.head.weight", "BF16", (129280, 256)),
        ("mtp.2.confidence_head.proj.weight", "BF16", (1, 5376)),
        ("mtp.1.ffn.gate.weight", "BF16", (128, 5120)),
    ],
)
def test_released_shapes(
    by_name: dict[str, TensorSpec], name: str, dtype: str, shape: tuple[int, ...]
) -> None:
    assert (by_name[name].dtype, by_name[name].shape) == (dtype, shape)


@pytest.mark.parametrize(
    "name",
    [
        "hc_head_fn",
        "layers.20.attn.compressor.wgate.weight",
        "layers.24.attn.indexer.wk.weight",
        "layers.24.attn.compressor.wkv.weight",
        "layers.3.attn.indexer.wq_b.weight",
        "layers.2.engram.q_weight",
        "mtp.0.embed.weight",
        "mtp.0.norm.weight",
        "mtp.1.main_proj.weight",
    ],
)
def test_tensors_that_do_not_exist(by_name: dict[str, TensorSpec], name: str) -> None:
    assert name not in by_name


def test_layer_that_owns_only_index_keys() -> None:
    """It brings the key projection and its norm beside the reindex tensors, no compressor."""
    config = small_config()
    section(config, "text_config")["index_k_source_layer_ids"] = [1, 2, 3]
    specs = inventory(parse_config(config, "config.json"))
    names = {spec.name for spec in below(specs, "layers.3.attn.indexer.")}
    assert {name.removeprefix("layers.3.attn.indexer.") for name in names} == {
        "wk.weight",
        "k_norm.weight",
        "wq_b.weight",
        "wq_b.scale",
        "weights_proj.weight",
    }
    assert not below(specs, "layers.3.attn.compressor.")


def test_single_draft_block_is_first_and_last() -> None:
    config = small_config()
    text = section(config, "text_config")
    text["num_nextn_predict_layers"] = 1
    text["compress_ratios"] = [0, 2, 1, 1, 1, 0]
    names = {spec.name for spec in inventory(parse_config(config, "config.json"))}
    assert {"mtp.0.main_norm.weight", "mtp.0.norm.weight"} <= names
    assert not any(name.startswith("mtp.1.") for name in names)


def test_every_scaled_weight_has_its_scale(released: list[TensorSpec]) -> None:
    """FP8 matrices have one scale per 32 x 32 block, tables and 4-bit matrices one per row and 32.

    Written here from the logical shape instead of from the inventory's table.
    """
    scales = {spec.name: spec for spec in released if spec.dtype == "F8_E8M0"}
    kinds: Counter[str] = Counter()
    for spec in released:
        if spec.dtype not in ("F8_E4M3", "I8"):
            continue
        rows, stored = spec.shape
        width = stored * 2 if spec.dtype == "I8" else stored
        blocked = spec.dtype == "F8_E4M3" and "engram.embed" not in spec.name
        scale = scales.pop(spec.name.removesuffix("weight") + "scale")
        assert scale.shape == ((rows + 31) // 32 if blocked else rows, (width + 31) // 32)
        kinds[spec.dtype] += 1
    assert not scales
    assert kinds == {"F8_E4M3": 357, "I8": 47_232}


def test_names_taken_apart() -> None:
    expert = split_block_name("mtp.1.ffn.experts.7.w3.scale")
    assert expert is not None
    assert (expert.block, expert.expert, expert.known) == ("mtp.1", 7, True)
    other = split_block_name("layers.12.attn.wq_a.weight")
    assert other is not None
    assert (other.block, other.expert, other.suffix) == ("layers.12", None, "attn.wq_a.weight")
    for name in ("embed.weight", "layers.01.attn_norm.weight", "layers.x.y", "layers.", "mtp.0."):
        assert split_block_name(name) is None
    assert canonical_name("model.norm.weight") == canonical_name("norm.weight") == "norm.weight"
    assert canonical_name("model.model.x") == "model.x"


def test_surplus_names() -> None:
    """Only names that another schedule would call for are worth a warning."""
    assert is_surplus("layers.3.attn.compressor.wkv.weight")
    assert is_surplus("layers.99.attn_norm.weight")
    assert is_surplus("mtp.5.ffn.experts.0.w1.weight")
    assert is_surplus("hc_head_fn")
    assert not is_surplus("layers.3.attn.rotary.inv_freq")
    assert not is_surplus("mtp.0.embed.weight")
    assert not is_surplus("optimizer.step")

"""Reading config.json: what is accepted, what is derived, and every rule that rejects.

Golden values are the published facts of the released model and of tiny-v41.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_neuron.checkpoint.config import ModelConfig, Role, load_config, parse_config
from deepinfer_neuron.errors import CheckpointError, ConfigError
from tests.support.raw_checkpoint import section, small_config
from tests.support.released import released_config
from tests.support.tiny_v41 import tiny_v41_config

ABSENT = object()


def changed(path: str, value: object, base: str = "released") -> dict[str, object]:
    """The released (or tiny) configuration with the value at ``path`` replaced or removed."""
    config = released_config() if base == "released" else tiny_v41_config()
    *parents, key = path.split(".")
    place = config
    for parent in parents:
        place = section(place, parent)
    if value is ABSENT:
        del place[key]
    else:
        place[key] = value
    return config


def parsed(path: str, value: object, base: str = "released") -> ModelConfig:
    return parse_config(changed(path, value, base), "config.json")


def refused(path: str, value: object, base: str = "released") -> str:
    """The message with which a changed configuration is refused."""
    with pytest.raises(ConfigError) as caught:
        parsed(path, value, base)
    message = str(caught.value)
    assert "config.json" in message
    return message


# What is derived


def test_released_roles() -> None:
    config = parse_config(released_config(), "config.json")
    roles = {role: [x.index for x in config.layers if x.role is role] for role in Role}
    assert roles[Role.SWA] == [0, 1]
    assert roles[Role.FULL] == [2, 8, 14, 20]
    assert roles[Role.REINDEX] == [24, 28, 32, 36]
    assert len(roles[Role.REUSE]) == 30
    assert config.n_prefill_layer == 20
    assert [x.index for x in config.layers if x.engram is not None] == [1, 14]
    assert config.layers[14].engram == 1
    assert [x.index for x in config.layers if x.is_candidate_source] == [20]
    assert [x.index for x in config.layers if x.candidate_source == 20] == [24, 28, 32, 36]


def test_released_sources() -> None:
    layers = parse_config(released_config(), "config.json").layers
    assert (layers[1].kv_source, layers[1].index_source) == (None, None)
    assert (layers[13].kv_source, layers[13].index_k_source, layers[13].index_source) == (8, 8, 8)
    assert (layers[20].kv_source, layers[20].index_source) == (20, 20)
    assert (layers[31].kv_source, layers[31].index_k_source, layers[31].index_source) == (
        20,
        20,
        28,
    )


def test_released_derived_sizes() -> None:
    config = parse_config(released_config(), "config.json")
    assert config.hc_mix_width == 24
    assert config.hc_width == 20480
    assert config.o_group_width == 4096
    assert config.nope_head_dim == 448
    assert config.softmax_scale == 512**-0.5
    assert config.engram is not None
    assert config.engram.num_orders == 3
    assert config.engram.num_columns == 24
    assert config.engram.row_bundle == 6144
    assert config.draft is not None
    assert config.draft.target_layer_ids == (37, 38, 39)
    assert config.rms_norm_eps == 1e-20
    assert config.rope_scaling is not None
    assert config.rope_scaling.original_max_position_embeddings == 65536


def test_tiny_roles() -> None:
    config = parse_config(tiny_v41_config(), "config.json")
    names = " ".join(layer.role.value for layer in config.layers)
    assert names == "swa swa full reuse full full reuse reindex reuse"
    assert config.n_prefill_layer == 5
    assert config.layers[8].kv_source == 5
    assert config.layers[8].index_source == 7
    assert config.tokenizer_compatibility == "native"


def test_index_key_source_without_kv() -> None:
    """A layer may own index keys alone; it still is an index source of the reindex role."""
    config = parsed("text_config.index_k_source_layer_ids", [2, 8, 14, 20, 28])
    layer = config.layers[28]
    assert layer.role is Role.REINDEX
    assert (layer.owns_kv, layer.owns_index_k, layer.owns_index) == (False, True, True)
    assert config.layers[32].index_k_source == 28
    assert config.layers[32].kv_source == 20


# What is accepted


@pytest.mark.parametrize("off", [None, -1])
def test_candidates_switched_off(off: object) -> None:
    config = changed("text_config.candidate_source_layer_id", off)
    del section(config, "text_config")["candidate_topk_blocks"]
    result = parse_config(config, "config.json")
    assert result.candidate_source_layer_id is None
    assert not any(x.is_candidate_source or x.candidate_source for x in result.layers)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("text_config.rope_theta", 10000.5),
        ("text_config.swiglu_limit", 10),
        ("text_config.attention_dropout", 0),
        ("text_config.hc_shifted", True),
        ("text_config.unknown_key", {"anything": [1]}),
        ("text_config.index_k_source_layer_ids", None),
        ("tokenizer_compatibility", "release"),
        ("vision_config.max_wh_ratio", 1),
        ("vision_config.num_hidden_layers", ABSENT),
        ("transformers_version", ABSENT),
    ],
)
def test_accepted(path: str, value: object) -> None:
    parsed(path, value)


def test_absent_optional_parts() -> None:
    assert parsed("text_config.rope_scaling", None).rope_scaling is None
    assert parsed("text_config.rope_scaling", ABSENT).rope_scaling is None
    assert parsed("text_config.engram_layer_ids", []).engram is None
    assert parsed("text_config.engram_layer_ids", ABSENT).engram is None
    assert parsed("text_config.use_fp4_sparse_kv", False).use_fp4_sparse_kv is False
    assert parsed("text_config.rope_theta", 10000).use_fp4_sparse_kv is True


def test_without_drafts() -> None:
    config = changed("text_config.num_nextn_predict_layers", 0)
    text = section(config, "text_config")
    text["compress_ratios"] = [0, 0] + [2] * 18 + [1] * 20
    for key in [key for key in text if key.startswith("dspark_")]:
        del text[key]
    result = parse_config(config, "config.json")
    assert result.draft is None
    assert result.num_draft_layers == 0


# Fixed values

FIXED = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "quantization_config.quant_method": "fp8",
    "quantization_config.expert_dtype": "fp4",
    "quantization_config.activation_scheme": "dynamic",
    "quantization_config.weight_block_size": [32, 32],
    "quantization_config.scale_fmt": "ue8m0",
    "text_config.num_key_value_heads": 1,
    "text_config.n_shared_experts": 1,
    "text_config.hidden_act": "silu",
    "text_config.attention_bias": False,
    "text_config.attention_dropout": 0.0,
    "text_config.tie_word_embeddings": False,
    "text_config.scoring_func": "sqrtsoftplus",
    "text_config.topk_method": "noaux_tc",
    "text_config.norm_topk_prob": True,
    "text_config.hc_mult": 4,
}


@pytest.mark.parametrize("path", FIXED)
@pytest.mark.parametrize("wrong", [ABSENT, None, "other", 7, [32, 64], True, [[]]])
def test_fixed_value(path: str, wrong: object) -> None:
    if wrong is not True or FIXED[path] is not True:
        assert path.split(".")[-1] in refused(path, wrong) or path == "architectures"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("text_config.attention_bias", 0),
        ("text_config.norm_topk_prob", 1),
        ("text_config.num_key_value_heads", True),
        ("text_config.attention_dropout", False),
        ("text_config.attention_dropout", 0.1),
        ("quantization_config.weight_block_size", [32.0, 32]),
        ("quantization_config.weight_block_size", [32]),
        ("text_config.hc_shifted", False),
        ("text_config.dspark_target_attn_input", False),
        ("tokenizer_compatibility", "auto"),
        ("tokenizer_compatibility", []),
        ("text_config.rope_scaling.rope_type", "linear"),
        ("text_config.rope_scaling.rope_type", ABSENT),
    ],
)
def test_fixed_value_of_wrong_type(path: str, value: object) -> None:
    refused(path, value)


def test_architecture_messages() -> None:
    assert "exactly one architecture" in refused("architectures", [])
    assert "exactly one architecture" in refused("architectures", ["A", "B"])
    message = refused("architectures", ["LlamaForCausalLM"])
    assert "unsupported architecture 'LlamaForCausalLM'" in message
    assert "DeepseekV41ForCausalLM" in message


@pytest.mark.parametrize("name", ["text_config", "vision_config", "quantization_config"])
@pytest.mark.parametrize("value", [ABSENT, None, [], "text"])
def test_nested_objects_are_required(name: str, value: object) -> None:
    assert name in refused(name, value)


# Dimensions and numbers

POSITIVE = [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "o_groups",
    "max_position_embeddings",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "candidate_topk_blocks",
    "candidate_block_size",
    "hc_sinkhorn_iters",
    "engram_vocab_size",
    "engram_n_heads",
    "engram_head_dim",
    "engram_compressed_vocab_size",
    "dspark_block_size",
    "dspark_markov_rank",
    "dspark_n_routed_experts",
    "dspark_num_experts_per_tok",
]


@pytest.mark.parametrize("key", POSITIVE)
def test_positive_integers(key: str) -> None:
    for wrong in (ABSENT, None, 0, -1, True, 64.0, "64", [64], 10**30, 10**5000):
        assert f"text_config.{key}" in refused(f"text_config.{key}", wrong)


@pytest.mark.parametrize(
    "key", ["hidden_size", "patch_size", "downsample_ratio", "max_image_tokens", "min_pixels"]
)
def test_vision_positive_integers(key: str) -> None:
    for wrong in (ABSENT, None, 0, True, 2.0):
        assert "positive integer" in refused(f"vision_config.{key}", wrong)


NUMBERS = [
    "swiglu_limit",
    "rms_norm_eps",
    "rope_theta",
    "compress_rope_theta",
    "routed_scaling_factor",
    "hc_eps",
]


@pytest.mark.parametrize("key", NUMBERS)
def test_positive_numbers(key: str) -> None:
    bad = (ABSENT, None, 0, -1.0, True, "1", float("nan"), float("inf"), 1e39, 1e-60, 10**400)
    for wrong in bad:
        assert f"text_config.{key}" in refused(f"text_config.{key}", wrong)


@pytest.mark.parametrize(
    "key", ["factor", "beta_fast", "beta_slow", "original_max_position_embeddings"]
)
def test_rope_scaling_needs_all_numbers(key: str) -> None:
    for wrong in (ABSENT, 0, float("nan"), True):
        assert key in refused(f"text_config.rope_scaling.{key}", wrong)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("bos_token_id", -1),
        ("eos_token_id", 129280),
        ("pad_token_id", True),
        ("pad_token_id", ABSENT),
        ("image_token_id", 0),
        ("image_token_id", 129280),
        ("image_token_id", ABSENT),
        ("text_config.dspark_noise_token_id", 129280),
        ("text_config.dspark_noise_token_id", ABSENT),
        ("text_config.engram_pad_token_id", -1),
        ("text_config.engram_pad_token_id", ABSENT),
    ],
)
def test_token_ids_lie_in_the_vocabulary(path: str, value: object) -> None:
    assert "an integer from" in refused(path, value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_attention_heads", 63, "multiple of o_groups"),
        ("hidden_size", 5136, "multiple of 32"),
        ("head_dim", 520, "multiple of 32"),
        ("q_lora_rank", 1300, "multiple of 32"),
        ("o_lora_rank", 1000, "multiple of 32"),
        ("moe_intermediate_size", 2320, "multiple of 32"),
        ("index_head_dim", 100, "multiple of 32"),
        ("engram_head_dim", 200, "multiple of 32"),
        ("qk_rope_head_dim", 63, "even"),
        ("qk_rope_head_dim", 130, "at most"),
        ("num_experts_per_tok", 385, "at most n_routed_experts"),
        ("dspark_num_experts_per_tok", 129, "at most dspark_n_routed_experts"),
        ("n_routed_experts", 65536, "over all layers"),
        ("dspark_n_routed_experts", 65536, "over all draft layers"),
        ("engram_n_heads", 1000, "hash tables"),
    ],
)
def test_relations_between_dimensions(key: str, value: object, words: str) -> None:
    assert words in refused(f"text_config.{key}", value)


# Layer schedule


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compress_ratios": [0, 0] + [2] * 18 + [1] * 20}, "has length 40"),
        ({"compress_ratios": [0, 0] + [2] * 18 + [4] + [1] * 19 + [0] * 3}, "not 4"),
        ({"compress_ratios": [0, 0] + [2] * 18 + [True] * 20 + [0] * 3}, "not true"),
        ({"compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0, 1, 0]}, "to be 0"),
        ({"compress_ratios": [0, 0] + [2] * 38 + [0] * 3}, "no layer of ratio 1"),
        ({"compress_ratios": [0, 0, 2, 0] + [2] * 16 + [1] * 20 + [0] * 3}, "behind the first"),
        ({"compress_ratios": [0, 0, 0] + [2] * 17 + [1] * 20 + [0] * 3}, "is a source layer"),
        ({"compress_ratios": [0, 2] + [2] * 18 + [1] * 20 + [0] * 3}, "no layer at or before"),
        ({"compress_ratios": [0, 0] + [2] * 17 + [1] * 21 + [0] * 3}, "one ratio"),
        ({"compress_ratios": [0, 0] + [2] * 18 + [1] * 10 + [2] * 10 + [0] * 3}, "one ratio"),
        ({"kv_source_layer_ids": [2, 8, 14]}, "one ratio"),
        ({"kv_source_layer_ids": [2, 8, 14, 20, 24]}, "to be the last KV source"),
        ({"kv_source_layer_ids": [2, 14, 8, 20]}, "strictly increasing"),
        ({"kv_source_layer_ids": [2, 2, 8, 14, 20]}, "strictly increasing"),
        ({"kv_source_layer_ids": [2, 8, 14, 20, 40]}, "from 0 to 39"),
        ({"kv_source_layer_ids": [-1, 2, 8, 14, 20]}, "from 0 to 39"),
        ({"kv_source_layer_ids": [2, 8, 14.0, 20]}, "not 14.0"),
        ({"kv_source_layer_ids": "2, 8"}, "a list"),
        ({"kv_source_layer_ids": []}, "no layer at or before"),
        ({"index_source_layer_ids": [2, 8, 20, 24]}, "lacks the layers [14]"),
        ({"index_k_source_layer_ids": [2, 8, 20]}, "lacks the layers [14]"),
        ({"index_k_source_layer_ids": [2, 8, 14, 20, 25]}, "lacks the layers [25]"),
        ({"candidate_source_layer_id": 21}, "one of index_source_layer_ids"),
        ({"candidate_source_layer_id": 14}, "behind it has ratio 1"),
        ({"candidate_source_layer_id": -2}, "from -1 to 39"),
        ({"candidate_source_layer_id": 40}, "from -1 to 39"),
        ({"candidate_source_layer_id": False}, "from -1 to 39"),
        ({"candidate_topk_blocks": 2047}, "multiple of 8"),
        ({"candidate_topk_blocks": 56}, "hold index_topk 512"),
        ({"candidate_block_size": 4}, "8 or 16"),
    ],
)
def test_schedule_rules(changes: dict[str, object], words: str) -> None:
    config = released_config()
    section(config, "text_config").update(changes)
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse_config(config, "config.json")


def test_candidate_source_must_be_stated() -> None:
    assert "is missing" in refused("text_config.candidate_source_layer_id", ABSENT)


# Engram, drafts, vision


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("engram_layer_ids", [14, 1], "strictly increasing"),
        ("engram_layer_ids", [1, 20], "below 20"),
        ("engram_layer_ids", [1, 40], "from 0 to 39"),
        ("engram_layer_ids", [1], "one entry per Engram layer"),
        ("engram_max_ngram_size", 1, "from 2"),
        ("engram_max_ngram_size", ABSENT, "is missing"),
        ("engram_num_embeddings", [384006168, 0], "not 0"),
        ("engram_num_embeddings", ABSENT, "is missing"),
        ("engram_compressed_vocab_size", 0, "requires tokenizer compression"),
        ("engram_compressed_vocab_size", ABSENT, "requires tokenizer compression"),
        ("dspark_target_layer_ids", [19, 20], "one side of layer 20"),
        ("dspark_target_layer_ids", [], "at least one layer"),
        ("dspark_target_layer_ids", [38, 37], "strictly increasing"),
        ("dspark_target_layer_ids", [39, 40], "from 0 to 39"),
        ("num_nextn_predict_layers", -1, "from 0"),
        ("num_nextn_predict_layers", True, "from 0"),
        ("use_fp4_sparse_kv", 1, "true or false"),
    ],
)
def test_engram_and_draft_rules(key: str, value: object, words: str) -> None:
    assert words in refused(f"text_config.{key}", value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_attention_heads", 15, "multiple of 4"),
        ("hidden_size", 1056, "multiple of 4"),
        ("max_wh_ratio", 0.5, "at least 1"),
        ("max_wh_ratio", True, "finite number"),
        ("max_wh_ratio", float("nan"), "finite number"),
        ("max_wh_ratio", ABSENT, "is missing"),
    ],
)
def test_vision_rules(key: str, value: object, words: str) -> None:
    assert words in refused(f"vision_config.{key}", value)


def test_first_failure_wins() -> None:
    """The architecture is judged before the quantization block, and that before dimensions."""
    config = released_config()
    section(config, "text_config")["hidden_size"] = 0
    section(config, "quantization_config")["quant_method"] = "int8"
    with pytest.raises(ConfigError, match="quant_method"):
        parse_config(config, "config.json")
    config["architectures"] = ["Other"]
    with pytest.raises(ConfigError, match="unsupported architecture"):
        parse_config(config, "config.json")


def test_message_names_file_key_value_and_expectation() -> None:
    message = refused("text_config.hidden_size", -5)
    assert message == (
        "config.json: text_config.hidden_size is -5; "
        "expected a positive integer of at most 16777216."
    )


def test_messages_stay_short() -> None:
    for huge in ("x" * 10**6, list(range(10**5)), 10**4000, {"a": 1}):
        assert len(refused("text_config.hidden_size", huge)) < 300


# The file


def test_load(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small_config()), encoding="utf-8")
    assert load_config(tmp_path) == parse_config(small_config(), "anywhere")


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", CheckpointError),
        (b"{", CheckpointError),
        (b"\xff\xfe{}", CheckpointError),
        (b"[" * 200_000, CheckpointError),
        (b'{"a":' * 200_000, CheckpointError),
        (b"9" * 10_000, CheckpointError),
        (b"[]", ConfigError),
        (b"null", ConfigError),
        (b"NaN", ConfigError),
        (b"{}", ConfigError),
    ],
)
def test_damaged_file(tmp_path: Path, content: bytes, kind: type[Exception]) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(kind, match=re.escape("config.json")):
        load_config(tmp_path)


def test_missing_file_and_directory_in_its_place(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match="not a regular file"):
        load_config(tmp_path)


def test_numbers_beyond_floats_in_the_file(tmp_path: Path) -> None:
    """1e400 parses as infinity and must not pass as a number."""
    text = json.dumps(small_config()).replace('"hc_eps": 1e-06', '"hc_eps": 1e400')
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="hc_eps is inf"):
        load_config(tmp_path)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
PATHS = [
    *small_config(),
    *(f"text_config.{key}" for key in section(small_config(), "text_config")),
    *(f"vision_config.{key}" for key in section(small_config(), "vision_config")),
]


@settings(deadline=None, derandomize=True, max_examples=300)
@given(path=st.sampled_from(PATHS), value=JSON_VALUES)
def test_any_value_is_accepted_or_refused_cleanly(path: str, value: object) -> None:
    config = small_config()
    *parents, key = path.split(".")
    place = section(config, parents[0]) if parents else config
    place[key] = value
    with contextlib.suppress(ConfigError):
        parse_config(config, "config.json")


@pytest.mark.parametrize(
    ("key", "value"), [("hc_sinkhorn_iters", 10_000_000), ("sliding_window", 1_000_000_000)]
)
def test_sizes_that_would_only_waste_time_or_memory_are_refused(key: str, value: int) -> None:
    config = released_config()
    config["text_config"][key] = value
    with pytest.raises(ConfigError, match=key):
        parse_config(config, "config.json")

"""Reading and judging ``config.json``.

The checks run from the general to the special, and the first failure wins: architecture, nested
objects, values that are fixed for this model family, dimensions, divisibility, layer schedule,
Engram, drafts, vision. Sizes that only particular GPU kernels demand are not enforced; sizes that
the number formats demand (groups of 32 channels under one scale) are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from deepinfer_neuron.checkpoint.config_types import (
    DraftConfig,
    EngramConfig,
    ModelConfig,
    RopeScaling,
    VisionConfig,
)
from deepinfer_neuron.checkpoint.fields import MAX_INT32, Section, describe
from deepinfer_neuron.checkpoint.files import parse_json, read_small_file
from deepinfer_neuron.checkpoint.schedule import (
    LayerSpec,
    Role,
    SourceLists,
    check_schedule,
    derive_layers,
    first_uncompressed,
)
from deepinfer_neuron.errors import ConfigError

__all__ = [
    "DraftConfig",
    "EngramConfig",
    "LayerSpec",
    "ModelConfig",
    "Role",
    "RopeScaling",
    "VisionConfig",
    "load_config",
    "parse_config",
]

CONFIG_FILE = "config.json"
ARCHITECTURE = "DeepseekV41ForCausalLM"

_MAX_CONFIG_BYTES = 16 * 2**20
_MAX_SINKHORN = 1000
_MAX_LAYERS = 4096
_MAX_EXPERTS = 2**16
_MAX_ROUTED_EXPERTS = 2**17
_MAX_HASH_TABLES = 4096
_GROUP = 32

_TOP_FIXED: Mapping[str, object] = {"dtype": "bfloat16"}

_TEXT_FIXED: Mapping[str, object] = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hc_mult": 4,
}

_TEXT_FIXED_OR_ABSENT: Mapping[str, object] = {
    "hc_shifted": True,
    "dspark_target_attn_input": True,
}

_QUANTIZATION_FIXED: Mapping[str, object] = {
    "quant_method": "fp8",
    "expert_dtype": "fp4",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
}

_TEXT_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "o_groups",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "hc_sinkhorn_iters",
)

_TEXT_NUMBERS = (
    "swiglu_limit",
    "rms_norm_eps",
    "rope_theta",
    "compress_rope_theta",
    "routed_scaling_factor",
    "hc_eps",
)

_MULTIPLES_OF_GROUP = (
    "hidden_size",
    "head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "moe_intermediate_size",
    "index_head_dim",
)
"""Widths whose channels share one scale per 32 in a weight, an activation or a cache entry."""

_COMPATIBILITY = ("tokenizer_compatibility", ("release", "native"), "release")

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load_config(directory: Path) -> ModelConfig:
    """Read and judge ``config.json`` in ``directory``.

    Raises :class:`CheckpointError` if the file is missing, unreadable or not JSON, and
    :class:`ConfigError` if its contents cannot be served.
    """
    path = directory / CONFIG_FILE
    return parse_config(parse_json(read_small_file(path, _MAX_CONFIG_BYTES), str(path)), str(path))


def parse_config(data: object, source: str) -> ModelConfig:
    """The configuration in ``data`` (as ``json.loads`` gives it); ``source`` names the file.

    Raises :class:`ConfigError` at the first rule that is broken. Unknown keys are ignored.
    """
    top = _check_identity(data, source)
    text = top.section("text_config")
    vision = top.section("vision_config")
    quantization = top.section("quantization_config")
    _check_fixed(top, text)
    for key, expected in _QUANTIZATION_FIXED.items():
        quantization.fixed(key, expected)
    return _build(top, text, vision)


def _check_identity(data: object, source: str) -> Section:
    """The top-level object, once it is known to describe this architecture."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{source}: the file holds {describe(data)}; expected a JSON object.")
    top = Section(source, "", data)
    names = data.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise top.error("architectures", f'exactly one architecture, ["{ARCHITECTURE}"]')
    if names[0] != ARCHITECTURE:
        raise ConfigError(
            f"{source}: unsupported architecture {describe(names[0])}; supported: {ARCHITECTURE}."
        )
    if data.get("model_type") != "deepseek_v41":
        raise top.error("model_type", "'deepseek_v41'")
    return top


def _check_fixed(top: Section, text: Section) -> None:
    """Fields whose released value is the only one the computation is defined for."""
    for key, expected in _TOP_FIXED.items():
        top.fixed(key, expected)
    for key, expected in _TEXT_FIXED.items():
        text.fixed(key, expected)
    for key, expected in _TEXT_FIXED_OR_ABSENT.items():
        text.fixed_or_absent(key, expected)
    top.choice(*_COMPATIBILITY)


def _build(top: Section, text: Section, vision: Section) -> ModelConfig:
    """Check everything that is not a fixed value, in order, and assemble the result."""
    sizes = {key: text.positive(key) for key in _TEXT_POSITIVE}
    sizes["num_hidden_layers"] = text.positive("num_hidden_layers", _MAX_LAYERS)
    sizes["n_routed_experts"] = text.positive("n_routed_experts", _MAX_EXPERTS)
    longest = text.positive("max_position_embeddings", MAX_INT32)
    sizes["max_position_embeddings"] = longest
    sizes["sliding_window"] = text.positive("sliding_window", longest)
    sizes["hc_sinkhorn_iters"] = text.positive("hc_sinkhorn_iters", _MAX_SINKHORN)
    numbers = {key: text.number(key) for key in _TEXT_NUMBERS}
    scaling = _rope_scaling(text)
    for key in _TOKEN_IDS:
        sizes[key] = top.integer(key, 0, sizes["vocab_size"] - 1)
    sizes["image_token_id"] = top.integer("image_token_id", 1, sizes["vocab_size"] - 1)
    _check_divisibility(text, sizes)
    schedule, num_drafts = _schedule(text, sizes["num_hidden_layers"])
    blocks, block_size = _candidate_sizes(text, schedule, sizes["index_topk"])
    sizes["candidate_topk_blocks"], sizes["candidate_block_size"] = blocks, block_size
    return _assemble(
        sizes,
        numbers,
        schedule,
        rope_scaling=scaling,
        engram=_engram(text, schedule, sizes["vocab_size"]),
        draft=_draft(text, num_drafts, schedule, sizes),
        vision=_vision(vision),
        use_fp4_sparse_kv=text.boolean("use_fp4_sparse_kv", True),
        tokenizer_compatibility=top.choice(*_COMPATIBILITY),
    )


def _assemble(
    sizes: Mapping[str, int],
    numbers: Mapping[str, float],
    schedule: SourceLists,
    *,
    rope_scaling: RopeScaling | None,
    engram: EngramConfig | None,
    draft: DraftConfig | None,
    vision: VisionConfig,
    use_fp4_sparse_kv: bool,
    tokenizer_compatibility: str,
) -> ModelConfig:
    """The configuration made of values that have passed every check."""
    num_drafts = 0 if draft is None else draft.num_layers
    return ModelConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"],
        num_hidden_layers=sizes["num_hidden_layers"],
        num_attention_heads=sizes["num_attention_heads"],
        head_dim=sizes["head_dim"],
        qk_rope_head_dim=sizes["qk_rope_head_dim"],
        q_lora_rank=sizes["q_lora_rank"],
        o_lora_rank=sizes["o_lora_rank"],
        o_groups=sizes["o_groups"],
        swiglu_limit=numbers["swiglu_limit"],
        rms_norm_eps=numbers["rms_norm_eps"],
        max_position_embeddings=sizes["max_position_embeddings"],
        rope_theta=numbers["rope_theta"],
        compress_rope_theta=numbers["compress_rope_theta"],
        rope_scaling=rope_scaling,
        n_routed_experts=sizes["n_routed_experts"],
        num_experts_per_tok=sizes["num_experts_per_tok"],
        n_shared_experts=1,
        moe_intermediate_size=sizes["moe_intermediate_size"],
        routed_scaling_factor=numbers["routed_scaling_factor"],
        sliding_window=sizes["sliding_window"],
        compress_ratios=schedule.ratios + (0,) * num_drafts,
        kv_source_layer_ids=schedule.kv,
        index_source_layer_ids=schedule.index,
        index_k_source_layer_ids=schedule.index_k,
        index_n_heads=sizes["index_n_heads"],
        index_head_dim=sizes["index_head_dim"],
        index_topk=sizes["index_topk"],
        candidate_source_layer_id=schedule.candidate,
        candidate_topk_blocks=sizes["candidate_topk_blocks"],
        candidate_block_size=sizes["candidate_block_size"],
        hc_mult=4,
        hc_sinkhorn_iters=sizes["hc_sinkhorn_iters"],
        hc_eps=numbers["hc_eps"],
        engram=engram,
        draft=draft,
        vision=vision,
        use_fp4_sparse_kv=use_fp4_sparse_kv,
        bos_token_id=sizes["bos_token_id"],
        eos_token_id=sizes["eos_token_id"],
        pad_token_id=sizes["pad_token_id"],
        image_token_id=sizes["image_token_id"],
        tokenizer_compatibility=tokenizer_compatibility,
        layers=derive_layers(schedule),
    )


def _rope_scaling(text: Section) -> RopeScaling | None:
    """YaRN parameters of the compressed layers; absent or null means plain rotary embedding."""
    if not text.present("rope_scaling"):
        return None
    scaling = text.section("rope_scaling")
    scaling.fixed("rope_type", "yarn")
    return RopeScaling(
        factor=scaling.number("factor"),
        beta_fast=scaling.number("beta_fast"),
        beta_slow=scaling.number("beta_slow"),
        original_max_position_embeddings=scaling.positive(
            "original_max_position_embeddings", MAX_INT32
        ),
    )


def _check_divisibility(text: Section, sizes: Mapping[str, int]) -> None:
    """Relations between dimensions."""
    for key in _MULTIPLES_OF_GROUP:
        if sizes[key] % _GROUP:
            raise text.error(key, f"a multiple of {_GROUP}")
    if sizes["num_attention_heads"] % sizes["o_groups"]:
        raise text.error("num_attention_heads", f"a multiple of o_groups {sizes['o_groups']}")
    rope, narrowest = sizes["qk_rope_head_dim"], min(sizes["head_dim"], sizes["index_head_dim"])
    if rope % 2 or rope > narrowest:
        raise text.error(
            "qk_rope_head_dim",
            f"an even integer of at most head_dim and index_head_dim ({narrowest})",
        )
    if sizes["num_experts_per_tok"] > sizes["n_routed_experts"]:
        raise text.error(
            "num_experts_per_tok", f"at most n_routed_experts {sizes['n_routed_experts']}"
        )
    if sizes["n_routed_experts"] * sizes["num_hidden_layers"] > _MAX_ROUTED_EXPERTS:
        raise text.error(
            "n_routed_experts", f"at most {_MAX_ROUTED_EXPERTS} routed experts over all layers"
        )


def _schedule(text: Section, num_layers: int) -> tuple[SourceLists, int]:
    """The checked layer schedule and the number of draft blocks."""
    num_drafts = 0
    if text.present("num_nextn_predict_layers"):
        num_drafts = text.integer("num_nextn_predict_layers", 0, _MAX_LAYERS)
    ratios = text.integers("compress_ratios", 0, 2, increasing=False)
    if len(ratios) != num_layers + num_drafts:
        raise ConfigError(
            f"{text.source}: text_config.compress_ratios has length {len(ratios)}; expected one "
            f"entry per layer and draft layer, {num_layers} + {num_drafts}."
        )
    if any(ratios[num_layers:]):
        raise ConfigError(
            f"{text.source}: text_config.compress_ratios ends with {list(ratios[num_layers:])}; "
            f"expected the last {num_drafts} entries, the draft layers, to be 0."
        )
    last = num_layers - 1
    kv = text.integers("kv_source_layer_ids", 0, last, increasing=True)
    index = text.integers("index_source_layer_ids", 0, last, increasing=True)
    index_k = kv
    if text.present("index_k_source_layer_ids"):
        index_k = text.integers("index_k_source_layer_ids", 0, last, increasing=True)
    engram: tuple[int, ...] = ()
    if text.present("engram_layer_ids"):
        engram = text.integers("engram_layer_ids", 0, last, increasing=True)
    lists = SourceLists(
        ratios=ratios[:num_layers],
        kv=kv,
        index_k=index_k,
        index=index,
        candidate=_candidate_source(text, last),
        engram=engram,
    )
    check_schedule(lists, text.source)
    return lists, num_drafts


def _candidate_source(text: Section, last_layer: int) -> int | None:
    """Layer that preselects blocks for later layers; null and -1 both switch this off."""
    key = "candidate_source_layer_id"
    if key not in text.values:
        raise text.error(key, f"a layer from 0 to {last_layer}, or null")
    if text.values[key] is None:
        return None
    layer = text.integer(key, -1, last_layer)
    return None if layer == -1 else layer


def _candidate_sizes(text: Section, schedule: SourceLists, topk: int) -> tuple[int, int]:
    """Number and size of candidate blocks, ``(0, 0)`` without a candidate source."""
    if schedule.candidate is None:
        return 0, 0
    blocks = text.positive("candidate_topk_blocks")
    if blocks % 8:
        raise text.error("candidate_topk_blocks", "a multiple of 8")
    size = text.positive("candidate_block_size")
    if size not in (8, 16):
        raise text.error("candidate_block_size", "8 or 16")
    if blocks * size < topk:
        raise text.error(
            "candidate_topk_blocks",
            f"enough blocks of {size} positions to hold index_topk {topk}",
        )
    return blocks, size


def _engram(text: Section, schedule: SourceLists, vocab_size: int) -> EngramConfig | None:
    """The n-gram memory, ``None`` without Engram layers."""
    layers = schedule.engram
    if not layers:
        return None
    split = first_uncompressed(schedule.ratios)
    if split is not None and layers[-1] >= split:
        raise text.error("engram_layer_ids", f"layers below {split}, the first layer of ratio 1")
    ngram = text.integer("engram_max_ngram_size", 2, _MAX_HASH_TABLES)
    heads = text.positive("engram_n_heads")
    if len(layers) * (ngram - 1) * heads > _MAX_HASH_TABLES:
        raise text.error("engram_n_heads", f"at most {_MAX_HASH_TABLES} hash tables in all")
    bound = text.positive("engram_vocab_size", MAX_INT32)
    width = text.positive("engram_head_dim")
    if width % _GROUP:
        raise text.error("engram_head_dim", f"a multiple of {_GROUP}")
    pad = text.integer("engram_pad_token_id", 0, vocab_size - 1)
    if not text.values.get("engram_compressed_vocab_size"):
        raise text.error(
            "engram_compressed_vocab_size",
            "the size of the compressed vocabulary, since Engram requires tokenizer compression",
        )
    compressed = text.positive("engram_compressed_vocab_size", MAX_INT32)
    rows = text.integers("engram_num_embeddings", 1, MAX_INT32, increasing=False)
    if len(rows) != len(layers):
        raise text.error("engram_num_embeddings", f"one entry per Engram layer, {len(layers)}")
    return EngramConfig(
        layer_ids=layers,
        num_embeddings=rows,
        max_ngram_size=ngram,
        vocab_size=bound,
        n_heads=heads,
        head_dim=width,
        pad_token_id=pad,
        compressed_vocab_size=compressed,
    )


def _draft(
    text: Section, num_drafts: int, schedule: SourceLists, sizes: Mapping[str, int]
) -> DraftConfig | None:
    """The draft blocks, ``None`` when there are none."""
    if num_drafts == 0:
        return None
    targets = text.integers("dspark_target_layer_ids", 0, len(schedule.ratios) - 1, increasing=True)
    split = first_uncompressed(schedule.ratios) or 0
    if not targets or targets[0] < split <= targets[-1]:
        raise text.error(
            "dspark_target_layer_ids",
            f"at least one layer, all on one side of layer {split}, the first of ratio 1",
        )
    experts = text.positive("dspark_n_routed_experts", _MAX_EXPERTS)
    if experts * num_drafts > _MAX_ROUTED_EXPERTS:
        raise text.error(
            "dspark_n_routed_experts",
            f"at most {_MAX_ROUTED_EXPERTS} routed experts over all draft layers",
        )
    chosen = text.positive("dspark_num_experts_per_tok")
    if chosen > experts:
        raise text.error("dspark_num_experts_per_tok", f"at most dspark_n_routed_experts {experts}")
    return DraftConfig(
        num_layers=num_drafts,
        block_size=text.positive("dspark_block_size"),
        noise_token_id=text.integer("dspark_noise_token_id", 0, sizes["vocab_size"] - 1),
        target_layer_ids=targets,
        markov_rank=text.positive("dspark_markov_rank"),
        n_routed_experts=experts,
        num_experts_per_tok=chosen,
    )


def _vision(vision: Section) -> VisionConfig:
    """The image tower; fields a checkpoint may leave out take the released values."""
    width = vision.positive("hidden_size")
    heads = vision.positive("num_attention_heads", default=16)
    if width % heads or width // heads % 4:
        raise vision.error("hidden_size", f"{heads} heads of one width that is a multiple of 4")
    ratio: float | None = None
    if "max_wh_ratio" not in vision.values:
        raise vision.error("max_wh_ratio", "null, or a number of at least 1")
    if vision.values["max_wh_ratio"] is not None:
        ratio = vision.number("max_wh_ratio")
        if ratio < 1:
            raise vision.error("max_wh_ratio", "null, or a number of at least 1")
    return VisionConfig(
        num_hidden_layers=vision.positive("num_hidden_layers", _MAX_LAYERS, default=32),
        hidden_size=width,
        num_attention_heads=heads,
        # 2.7 times the width, rounded up to whole blocks of 128.
        intermediate_size=vision.positive(
            "intermediate_size", default=-(-int(2.7 * width) // 128) * 128
        ),
        patch_size=vision.positive("patch_size"),
        rope_theta=vision.number("rope_theta", default=10000.0),
        downsample_ratio=vision.positive("downsample_ratio"),
        max_image_tokens=vision.positive("max_image_tokens"),
        min_pixels=vision.positive("min_pixels", MAX_INT32),
        max_wh_ratio=ratio,
    )

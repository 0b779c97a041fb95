"""Configurations of the generated checkpoints: the same architecture at three small sizes.

A preset holds the numbers a person chose. What follows from them (special token ids, rows of the
Engram tables, size of the compressed vocabulary) is filled in by :func:`complete_config`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from deepinfer_neuron.checkpoint.engram import compress_vocabulary, engram_layout
from deepinfer_neuron.checkpoint.tiny_tokenizer import image_token_id, system_token_id
from deepinfer_neuron.errors import ConfigError

JsonObject = dict[str, object]

_FIXED_TEXT: Mapping[str, object] = {
    "model_type": "deepseek_v41_text",
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_max_ngram_size": 4,
    "engram_pad_token_id": 2,
    "dspark_block_size": 5,
}

_FIXED_VISION: Mapping[str, object] = {
    "model_type": "deepseek_v41_vision",
    "patch_size": 14,
    "rope_theta": 10000,
    "downsample_ratio": 3,
    "max_wh_ratio": None,
}

# Keys that a configuration may hold although no preset writes them.
_OPTIONAL_TEXT_KEYS = frozenset(
    {
        "dspark_noise_token_id",
        "dspark_target_attn_input",
        "engram_compressed_vocab_size",
        "engram_num_embeddings",
        "hc_shifted",
        "index_k_source_layer_ids",
        "use_fp4_sparse_kv",
    }
)


@dataclass(frozen=True)
class Preset:
    """One size of the generated checkpoints."""

    text: Mapping[str, object]
    vision: Mapping[str, object]
    shard_bytes: int
    """A shard is closed before it would exceed this size (one larger tensor is still allowed)."""


def _yarn(original: int) -> JsonObject:
    """The released rotary scaling for a training length of ``original`` tokens."""
    return {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": original,
    }


def _nano() -> Preset:
    """4.1 MB, for unit tests: every layer role once, filters that act on short prompts.

    Layers: 0 window only, 1 window and Engram, 2 Full (ratio 2), 3 Reuse of 2, 4 Full (ratio 2)
    and Engram, 5 Full (ratio 1, candidate source), 6 Reuse of 5, 7 Reindex inside the candidates,
    8 Reuse of 7; two draft blocks with six experts. The window separates from the rest at 9 tokens,
    top-k drops entries from 17 tokens on at ratio 1 and 34 at ratio 2, the candidate blocks (8 of
    8 entries) from 65 tokens on.
    """
    text = {
        "vocab_size": 512,
        "hidden_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 9,
        "num_attention_heads": 4,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 64,
        "o_lora_rank": 32,
        "o_groups": 2,
        "max_position_embeddings": 2048,
        "rope_scaling": _yarn(64),
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1, 0, 0],
        "kv_source_layer_ids": [2, 4, 5],
        "index_source_layer_ids": [2, 4, 5, 7],
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 16,
        "candidate_source_layer_id": 5,
        "candidate_topk_blocks": 8,
        "candidate_block_size": 8,
        "engram_layer_ids": [1, 4],
        "engram_vocab_size": 300,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "num_nextn_predict_layers": 2,
        "dspark_target_layer_ids": [6, 8],
        "dspark_markov_rank": 32,
        "dspark_n_routed_experts": 6,
        "dspark_num_experts_per_tok": 2,
    }
    vision = {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "max_image_tokens": 32,
        "min_pixels": 7056,
    }
    return Preset(text, vision, shard_bytes=1_500_000)


def _tiny() -> Preset:
    """40 MiB: 974 tensors, 41,927,384 bytes; the head widths and cache records of the release.

    The layer roles are those of ``nano``, with three draft blocks. The window separates at 17
    tokens, top-k drops entries from 65 tokens on at ratio 1 and 130 at ratio 2, the candidate
    blocks (64 of 8 entries) from 513 tokens on.
    """
    text = {
        "vocab_size": 1024,
        "hidden_size": 512,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 9,
        "num_attention_heads": 4,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 128,
        "o_lora_rank": 128,
        "o_groups": 2,
        "max_position_embeddings": 4096,
        "rope_scaling": _yarn(256),
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0],
        "kv_source_layer_ids": [2, 4, 5],
        "index_source_layer_ids": [2, 4, 5, 7],
        "index_n_heads": 4,
        "index_head_dim": 128,
        "index_topk": 64,
        "candidate_source_layer_id": 5,
        "candidate_topk_blocks": 64,
        "candidate_block_size": 8,
        "engram_layer_ids": [1, 4],
        "engram_vocab_size": 1000,
        "engram_n_heads": 2,
        "engram_head_dim": 128,
        "num_nextn_predict_layers": 3,
        "dspark_target_layer_ids": [6, 7, 8],
        "dspark_markov_rank": 64,
        "dspark_n_routed_experts": 6,
        "dspark_num_experts_per_tok": 2,
    }
    vision = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "intermediate_size": 256,
        "max_image_tokens": 64,
        "min_pixels": 7056,
    }
    return Preset(text, vision, shard_bytes=12_000_000)


def _mid() -> Preset:
    """About 2.1 GB: the proportions of the release at a fifth of its width, for measurements.

    16 layers (2 window only, 7 at ratio 2 with two sources, 7 at ratio 1 with one source and two
    Reindex layers), hidden size 1024, 16 heads of 512, 128 experts of which 6 work, and two Engram
    tables of 245 MB each. A decoded token reads about 220 MB of weights.
    """
    text = {
        "vocab_size": 4096,
        "hidden_size": 1024,
        "moe_intermediate_size": 384,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 256,
        "o_lora_rank": 256,
        "o_groups": 4,
        "max_position_embeddings": 65536,
        "rope_scaling": _yarn(4096),
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "sliding_window": 128,
        "compress_ratios": [0, 0, *[2] * 7, *[1] * 7, 0, 0, 0],
        "kv_source_layer_ids": [2, 6, 9],
        "index_source_layer_ids": [2, 6, 9, 12, 14],
        "index_n_heads": 16,
        "index_head_dim": 128,
        "index_topk": 512,
        "candidate_source_layer_id": 9,
        "candidate_topk_blocks": 128,
        "candidate_block_size": 8,
        "engram_layer_ids": [1, 6],
        "engram_vocab_size": 77_000,
        "engram_n_heads": 8,
        "engram_head_dim": 128,
        "num_nextn_predict_layers": 3,
        "dspark_target_layer_ids": [13, 14, 15],
        "dspark_markov_rank": 128,
        "dspark_n_routed_experts": 32,
        "dspark_num_experts_per_tok": 3,
    }
    vision = {
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 768,
        "max_image_tokens": 256,
        "min_pixels": 28224,
    }
    return Preset(text, vision, shard_bytes=400_000_000)


_MAKERS: Mapping[str, Callable[[], Preset]] = {"nano": _nano, "tiny": _tiny, "mid": _mid}

PRESETS = tuple(_MAKERS)
"""Names of the presets, smallest first."""


def get_preset(name: str) -> Preset:
    """The preset called ``name``.

    Raises:
        ConfigError: there is no such preset.
    """
    maker = _MAKERS.get(name)
    if maker is None:
        raise ConfigError(f"unknown preset {name!r}; choose one of {', '.join(PRESETS)}.")
    return maker()


def text_section(preset: Preset, overrides: Mapping[str, object] | None) -> JsonObject:
    """The ``text_config`` of a preset with the given keys replaced.

    Raises:
        ConfigError: an override is not a key of ``text_config``.
    """
    section = {**_FIXED_TEXT, **preset.text}
    allowed = section.keys() | _OPTIONAL_TEXT_KEYS
    unknown = sorted(set(overrides or {}) - allowed)
    if unknown:
        raise ConfigError(
            f"overrides names {', '.join(unknown)}, which are no keys of text_config; "
            f"allowed are {', '.join(sorted(allowed))}."
        )
    return {**section, **copy.deepcopy(dict(overrides or {}))}


def integer(section: Mapping[str, object], key: str) -> int:
    """A whole number out of a section.

    Raises:
        ConfigError: the value is something else.
    """
    value = section.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"text_config {key} is {value!r}; give a whole number.")
    return value


def _layer_ids(section: Mapping[str, object]) -> list[int]:
    """Engram layers of a section; empty when the section has no Engram.

    Raises:
        ConfigError: the value is not a list of whole numbers.
    """
    value = section.get("engram_layer_ids") or []
    if isinstance(value, list | tuple) and all(type(layer) is int for layer in value):
        return list(value)
    raise ConfigError(f"text_config engram_layer_ids is {value!r}; give a list of whole numbers.")


def _derived_engram(section: Mapping[str, object], tokenizer_json: Path) -> JsonObject:
    """``engram_compressed_vocab_size`` and ``engram_num_embeddings`` for a section.

    The first counts the classes into which the tokenizer's ids fall once case, accents and blanks
    are ignored; the second adds up each layer's bucket primes.
    """
    layer_ids = _layer_ids(section)
    compressed = int(compress_vocabulary(tokenizer_json).max()) + 1
    if not layer_ids:
        return {"engram_compressed_vocab_size": compressed, "engram_num_embeddings": []}
    layout = engram_layout(
        layer_ids,
        integer(section, "engram_vocab_size"),
        integer(section, "engram_max_ngram_size"),
        integer(section, "engram_n_heads"),
        compressed,
    )
    rows = [int(count) for count in layout.rows]
    return {"engram_compressed_vocab_size": compressed, "engram_num_embeddings": rows}


def complete_config(preset: Preset, section: JsonObject, tokenizer_json: Path) -> JsonObject:
    """The whole ``config.json`` for a ``text_config`` made by :func:`text_section`.

    ``tokenizer_json`` is the generated tokenizer of the same vocabulary size. Keys that an override
    already set are kept, even if they disagree with what would be derived.

    Raises:
        ConfigError: a number that the derived keys need is not a whole number.
    """
    vocab_size = integer(section, "vocab_size")
    derived = {
        "dspark_noise_token_id": system_token_id(vocab_size),
        **_derived_engram(section, tokenizer_json),
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": image_token_id(vocab_size),
        "tokenizer_compatibility": "native",
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": {**derived, **section},
        "vision_config": {**_FIXED_VISION, **preset.vision},
    }

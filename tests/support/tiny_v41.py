"""The configuration of ``tiny-v41``, the small checkpoint that has every feature of the release."""

from __future__ import annotations

from tests.support.released import released_config

_TOP: dict[str, object] = {"image_token_id": 1000, "tokenizer_compatibility": "native"}

_TEXT: dict[str, object] = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 9,
    "num_attention_heads": 4,
    "q_lora_rank": 128,
    "o_lora_rank": 128,
    "o_groups": 2,
    "max_position_embeddings": 4096,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 256,
    },
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [2, 4, 5],
    "index_source_layer_ids": [2, 4, 5, 7],
    "index_n_heads": 4,
    "index_topk": 64,
    "candidate_source_layer_id": 5,
    "candidate_topk_blocks": 64,
    "engram_layer_ids": [1, 4],
    "engram_num_embeddings": [6126, 6332],
    "engram_vocab_size": 1000,
    "engram_n_heads": 2,
    "engram_head_dim": 128,
    "dspark_noise_token_id": 1001,
    "dspark_target_layer_ids": [6, 7, 8],
    "dspark_markov_rank": 64,
    "dspark_n_routed_experts": 6,
    "dspark_num_experts_per_tok": 2,
}

_VISION: dict[str, object] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "intermediate_size": 256,
    "max_image_tokens": 64,
    "min_pixels": 7056,
}


def tiny_v41_config(compressed_vocab_size: int = 700) -> dict[str, object]:
    """A fresh copy of tiny-v41's ``config.json``.

    ``compressed_vocab_size`` depends on the tokenizer that is written beside it; the default only
    stands in where no tokenizer takes part.
    """
    config = released_config()
    config.pop("transformers_version")
    config.update(_TOP)
    for name, changes in (("text_config", _TEXT), ("vision_config", _VISION)):
        section = config[name]
        if isinstance(section, dict):
            section.update(changes)
    text = config["text_config"]
    if isinstance(text, dict):
        text["engram_compressed_vocab_size"] = compressed_vocab_size
    return config

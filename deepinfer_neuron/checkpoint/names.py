"""The complete inventory of tensors that a configuration calls for.

The inventory is data: a table of name patterns, each with the symbols of its shape, its storage
and its role. :func:`inventory` only fills in the numbers. Names carry no ``model.`` prefix.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from deepinfer_neuron.checkpoint.config_types import ModelConfig
from deepinfer_neuron.checkpoint.schedule import LayerSpec

ITEM_BYTES: Mapping[str, int] = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
"""Bytes per element of the storage types a checkpoint uses."""

SCALE_GROUP = 32
"""Channels (and, in FP8 matrices, rows) that share one scale."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor the checkpoint has to hold."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Storage type in the notation of the file format, a key of :data:`ITEM_BYTES`."""
    role: str
    """The component of the model that the tensor belongs to."""

    @property
    def nbytes(self) -> int:
        """Size of the stored tensor in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Storage(enum.Enum):
    """How a pattern is stored; three of the five bring a scale tensor along."""

    BF16 = "bf16"
    F32 = "f32"
    FP8 = "fp8"
    """E4M3 matrix, one power-of-two scale per block of 32 rows and 32 columns."""
    FP8_ROWS = "fp8_rows"
    """E4M3 table, one power-of-two scale per row and 32 columns."""
    FP4 = "fp4"
    """E2M1 matrix, two columns per byte, one power-of-two scale per row and 32 columns."""


@dataclass(frozen=True)
class Pattern:
    """A tensor name (for scaled storage the name before ``.weight`` and ``.scale``) and shape.

    ``shape`` holds symbols, to which a configuration gives numbers; the name is relative to the
    block that the pattern belongs to.
    """

    name: str
    shape: tuple[str, ...]
    storage: Storage
    role: str


_GLOBAL = (
    Pattern("embed.weight", ("V", "D"), Storage.BF16, "embed"),
    Pattern("head.weight", ("V", "D"), Storage.BF16, "head"),
    Pattern("norm.weight", ("D",), Storage.BF16, "norm"),
    Pattern("image_start", ("D",), Storage.BF16, "norm"),
    Pattern("image_end", ("D",), Storage.BF16, "norm"),
    Pattern("image_newline", ("D",), Storage.BF16, "norm"),
    Pattern("vision.patch_embed.proj.weight", ("Dv", "patch"), Storage.BF16, "vision"),
    Pattern("vision.patch_embed.proj.bias", ("Dv",), Storage.BF16, "vision"),
    Pattern("vision.norm.weight", ("Dv",), Storage.BF16, "vision"),
    Pattern("aligner.w1.weight", ("D", "merged"), Storage.BF16, "aligner"),
    Pattern("aligner.w1.bias", ("D",), Storage.BF16, "aligner"),
    Pattern("aligner.w2.weight", ("D", "D"), Storage.BF16, "aligner"),
    Pattern("aligner.w2.bias", ("D",), Storage.BF16, "aligner"),
)

_VISION_BLOCK = (
    Pattern("norm1.weight", ("Dv",), Storage.BF16, "vision"),
    Pattern("norm2.weight", ("Dv",), Storage.BF16, "vision"),
    Pattern("attn.wqkv.weight", ("3Dv", "Dv"), Storage.BF16, "vision"),
    Pattern("attn.wqkv.bias", ("3Dv",), Storage.BF16, "vision"),
    Pattern("attn.wo.weight", ("Dv", "Dv"), Storage.BF16, "vision"),
    Pattern("attn.wo.bias", ("Dv",), Storage.BF16, "vision"),
    Pattern("mlp.w1.weight", ("2Fv", "Dv"), Storage.BF16, "vision"),
    Pattern("mlp.w2.weight", ("Dv", "Fv"), Storage.BF16, "vision"),
)

_BLOCK = (
    Pattern("attn_norm.weight", ("D",), Storage.BF16, "norm"),
    Pattern("ffn_norm.weight", ("D",), Storage.BF16, "norm"),
    Pattern("hc_attn_fn", ("C", "mD"), Storage.F32, "hyper_connection"),
    Pattern("hc_attn_base", ("C",), Storage.F32, "hyper_connection"),
    Pattern("hc_attn_scale", ("3",), Storage.F32, "hyper_connection"),
    Pattern("hc_ffn_fn", ("C", "mD"), Storage.F32, "hyper_connection"),
    Pattern("hc_ffn_base", ("C",), Storage.F32, "hyper_connection"),
    Pattern("hc_ffn_scale", ("3",), Storage.F32, "hyper_connection"),
    Pattern("attn.attn_sink", ("H",), Storage.F32, "attention"),
    Pattern("attn.wq_a", ("Q", "D"), Storage.FP8, "attention"),
    Pattern("attn.q_norm.weight", ("Q",), Storage.BF16, "attention"),
    Pattern("attn.wq_b", ("HDh", "Q"), Storage.FP8, "attention"),
    Pattern("attn.wkv", ("Dh", "D"), Storage.FP8, "attention"),
    Pattern("attn.kv_norm.weight", ("Dh",), Storage.BF16, "attention"),
    Pattern("attn.wo_a", ("GO", "Gw"), Storage.FP8, "attention"),
    Pattern("attn.wo_b", ("D", "GO"), Storage.FP8, "attention"),
    Pattern("ffn.gate.weight", ("E", "D"), Storage.BF16, "router"),
    Pattern("ffn.gate.bias", ("E",), Storage.F32, "router"),
    Pattern("ffn.gate.bias_vl", ("E",), Storage.F32, "router"),
    Pattern("ffn.shared_experts.w1", ("Fs", "D"), Storage.FP8, "shared_expert"),
    Pattern("ffn.shared_experts.w2", ("D", "Fs"), Storage.FP8, "shared_expert"),
    Pattern("ffn.shared_experts.w3", ("Fs", "D"), Storage.FP8, "shared_expert"),
)

_EXPERT = (
    Pattern("w1", ("F", "D"), Storage.FP4, "expert"),
    Pattern("w2", ("D", "F"), Storage.FP4, "expert"),
    Pattern("w3", ("F", "D"), Storage.FP4, "expert"),
)

_KV_OWNER = (
    Pattern("attn.compressor.wkv.weight", ("Dh", "D"), Storage.BF16, "compressor"),
    Pattern("attn.compressor.norm.weight", ("Dh",), Storage.BF16, "compressor"),
)

_PAIR_KV_OWNER = (Pattern("attn.compressor.wgate.weight", ("Dh", "D"), Storage.BF16, "compressor"),)

_INDEX_K_OWNER = (
    Pattern("attn.indexer.wk.weight", ("Di", "Dh"), Storage.BF16, "indexer"),
    Pattern("attn.indexer.k_norm.weight", ("Di",), Storage.BF16, "indexer"),
)

_INDEX_OWNER = (
    Pattern("attn.indexer.wq_b", ("HiDi", "Q"), Storage.FP8, "indexer"),
    Pattern("attn.indexer.weights_proj.weight", ("Hi", "D"), Storage.BF16, "indexer"),
)

_ENGRAM = (
    Pattern("engram.embed", ("rows", "de"), Storage.FP8_ROWS, "engram_table"),
    Pattern("engram.wkv", ("(m+1)D", "We"), Storage.FP8, "engram"),
    Pattern("engram.q_weight", ("m", "D"), Storage.BF16, "engram"),
    Pattern("engram.k_weight", ("m", "D"), Storage.BF16, "engram"),
)

_FIRST_DRAFT = (
    Pattern("main_proj", ("D", "NtD"), Storage.FP8, "draft"),
    Pattern("main_norm.weight", ("D",), Storage.BF16, "draft"),
)

_LAST_DRAFT = (
    Pattern("norm.weight", ("D",), Storage.BF16, "draft"),
    Pattern("markov_head.embed.weight", ("V", "M"), Storage.BF16, "markov"),
    Pattern("markov_head.head.weight", ("V", "M"), Storage.BF16, "markov"),
    Pattern("confidence_head.proj.weight", ("1", "D+M"), Storage.BF16, "draft"),
)

_HEAD_MIXER = ("hc_head_base", "hc_head_fn", "hc_head_scale")
"""Mixer in front of the head, part of the family but not of models that shift their mixes."""

_NUMBER = "(0|[1-9][0-9]{0,5})"
_BLOCK_NAME = re.compile(rf"(layers|mtp)\.{_NUMBER}\.(.+)", re.DOTALL)
_EXPERT_NAME = re.compile(rf"ffn\.experts\.{_NUMBER}\.(w[123]\.(?:weight|scale))")


@dataclass(frozen=True)
class BlockName:
    """A tensor name below ``layers.{i}.`` or ``mtp.{i}.``, taken apart."""

    block: str
    """The prefix without the last dot, such as ``layers.3``."""
    suffix: str
    expert: int | None
    """Index of the routed expert, ``None`` for every other tensor."""

    @property
    def known(self) -> bool:
        """Whether some layer of some configuration has a tensor of this suffix."""
        return self.expert is not None or self.suffix in _KNOWN_SUFFIXES


def canonical_name(name: str) -> str:
    """``name`` without the leading ``model.`` that some writers add."""
    return name.removeprefix("model.")


def split_block_name(name: str) -> BlockName | None:
    """Take a name below ``layers.`` or ``mtp.`` apart; ``None`` for all other names."""
    match = _BLOCK_NAME.fullmatch(name)
    if match is None:
        return None
    suffix = match.group(3)
    expert = _EXPERT_NAME.fullmatch(suffix)
    index = None if expert is None else int(expert.group(1))
    return BlockName(f"{match.group(1)}.{match.group(2)}", suffix, index)


def is_surplus(name: str) -> bool:
    """Whether a name that a configuration does not call for would belong to another schedule."""
    block = split_block_name(name)
    return name in _HEAD_MIXER if block is None else block.known


def expert_count(config: ModelConfig, block: str) -> int | None:
    """Routed experts of ``layers.{i}`` or ``mtp.{i}``, ``None`` if there is no such block."""
    kind, _, number = block.partition(".")
    if kind == "layers":
        return config.n_routed_experts if int(number) < config.num_hidden_layers else None
    if config.draft is None or int(number) >= config.draft.num_layers:
        return None
    return config.draft.n_routed_experts


def inventory(config: ModelConfig) -> list[TensorSpec]:
    """Every tensor ``config`` calls for: global ones, backbone layers, then draft blocks."""
    symbols = _symbols(config)
    specs = list(_expand(_GLOBAL, "", symbols))
    for block in range(config.vision.num_hidden_layers):
        specs += _expand(_VISION_BLOCK, f"vision.blocks.{block}.", symbols)
    for layer in config.layers:
        specs += _layer(config, layer, symbols)
    for block in range(config.num_draft_layers):
        specs += _draft_block(config, block, symbols)
    return specs


def _symbols(config: ModelConfig) -> dict[str, int]:
    """Numbers for the shape symbols that do not depend on the layer."""
    vision, width, latent = config.vision, config.hidden_size, config.head_dim
    symbols = {
        "1": 1,
        "3": 3,
        "V": config.vocab_size,
        "D": width,
        "C": config.hc_mix_width,
        "m": config.hc_mult,
        "mD": config.hc_width,
        "(m+1)D": (config.hc_mult + 1) * width,
        "H": config.num_attention_heads,
        "Dh": latent,
        "HDh": config.num_attention_heads * latent,
        "Q": config.q_lora_rank,
        "GO": config.o_groups * config.o_lora_rank,
        "Gw": config.o_group_width,
        "Hi": config.index_n_heads,
        "Di": config.index_head_dim,
        "HiDi": config.index_n_heads * config.index_head_dim,
        "F": config.moe_intermediate_size,
        "Fs": config.shared_intermediate_size,
        "Dv": vision.hidden_size,
        "3Dv": 3 * vision.hidden_size,
        "Fv": vision.intermediate_size,
        "2Fv": 2 * vision.intermediate_size,
        "patch": 3 * vision.patch_size**2,
        "merged": vision.hidden_size * vision.downsample_ratio**2,
    }
    if config.engram is not None:
        symbols |= {"de": config.engram.head_dim, "We": config.engram.row_bundle}
    if config.draft is not None:
        rank = config.draft.markov_rank
        targets = len(config.draft.target_layer_ids)
        symbols |= {"M": rank, "D+M": width + rank, "NtD": targets * width}
    return symbols


def _layer(config: ModelConfig, layer: LayerSpec, symbols: dict[str, int]) -> list[TensorSpec]:
    """Tensors of one backbone layer."""
    prefix = f"layers.{layer.index}."
    numbers = symbols | {"E": config.n_routed_experts}
    patterns: list[Pattern] = list(_BLOCK)
    if layer.owns_kv:
        patterns += _KV_OWNER
        # Only pairs of tokens are weighed against each other; ratio 1 has nothing to gate.
        patterns += _PAIR_KV_OWNER if layer.ratio > 1 else ()
    patterns += _INDEX_K_OWNER if layer.owns_index_k else ()
    patterns += _INDEX_OWNER if layer.owns_index else ()
    if layer.engram is not None and config.engram is not None:
        patterns += _ENGRAM
        numbers["rows"] = config.engram.num_embeddings[layer.engram]
    specs = list(_expand(patterns, prefix, numbers))
    for expert in range(config.n_routed_experts):
        specs += _expand(_EXPERT, f"{prefix}ffn.experts.{expert}.", numbers)
    return specs


def _draft_block(config: ModelConfig, block: int, symbols: dict[str, int]) -> list[TensorSpec]:
    """Tensors of one draft block; all but experts and Markov head count as ``draft``."""
    if config.draft is None:
        return []
    prefix = f"mtp.{block}."
    numbers = symbols | {"E": config.draft.n_routed_experts}
    specs = list(_expand(_BLOCK, prefix, numbers, role="draft"))
    specs += _expand(_FIRST_DRAFT if block == 0 else (), prefix, numbers)
    specs += _expand(_LAST_DRAFT if block == config.draft.num_layers - 1 else (), prefix, numbers)
    for expert in range(config.draft.n_routed_experts):
        specs += _expand(_EXPERT, f"{prefix}ffn.experts.{expert}.", numbers, role="draft_expert")
    return specs


def _expand(
    patterns: Sequence[Pattern],
    prefix: str,
    symbols: Mapping[str, int],
    role: str | None = None,
) -> Iterator[TensorSpec]:
    """The tensors of ``patterns``, each scaled one followed by its scale."""
    for pattern in patterns:
        shape = tuple(symbols[symbol] for symbol in pattern.shape)
        yield from _store(pattern.storage, prefix + pattern.name, shape, role or pattern.role)


def _store(
    storage: Storage, name: str, shape: tuple[int, ...], role: str
) -> tuple[TensorSpec, ...]:
    """One logical tensor as it lies on disk, with its scale if the storage has one."""
    if storage is Storage.BF16:
        return (TensorSpec(name, shape, "BF16", role),)
    if storage is Storage.F32:
        return (TensorSpec(name, shape, "F32", role),)
    rows, columns = shape
    weight, scale = f"{name}.weight", f"{name}.scale"
    # Blocks at the edges of a matrix may be partial, so scale dimensions round up.
    groups = -(-columns // SCALE_GROUP)
    if storage is Storage.FP4:
        return (
            TensorSpec(weight, (rows, columns // 2), "I8", role),
            TensorSpec(scale, (rows, groups), "F8_E8M0", role),
        )
    scale_rows = rows if storage is Storage.FP8_ROWS else -(-rows // SCALE_GROUP)
    return (
        TensorSpec(weight, shape, "F8_E4M3", role),
        TensorSpec(scale, (scale_rows, groups), "F8_E8M0", role),
    )


def _suffixes(pattern: Pattern) -> tuple[str, ...]:
    """Names on disk of a pattern, relative to its block."""
    if pattern.storage in (Storage.BF16, Storage.F32):
        return (pattern.name,)
    return (f"{pattern.name}.weight", f"{pattern.name}.scale")


_KNOWN_SUFFIXES = frozenset(
    suffix
    for group in (
        _BLOCK,
        _KV_OWNER,
        _PAIR_KV_OWNER,
        _INDEX_K_OWNER,
        _INDEX_OWNER,
        _ENGRAM,
        _FIRST_DRAFT,
        _LAST_DRAFT,
    )
    for pattern in group
    for suffix in _suffixes(pattern)
)

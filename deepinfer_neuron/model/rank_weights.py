"""The tensors that one of several cores holds, counted from the inventory of a configuration.

Routed experts are split over the expert-parallel ranks, rows of the Engram tables over all cores.
Everything else is *dense*: held whole by every core, or split over all cores where that needs no
more than two extra exchanges per layer. Split are the matrices along heads (``wq_b``, ``wo_a``,
``wo_b``), along the width of the shared expert, and along the vocabulary; the narrow projections to
the latents stay whole, because gathering their outputs would take longer than reading them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from deepinfer_neuron.checkpoint.config import ModelConfig
from deepinfer_neuron.checkpoint.names import TensorSpec, expert_count, inventory, split_block_name

Component = str

ATTENTION = "attention"
SHARED = "shared expert"
SMALL = "gate, mixers, index, compressor"
ENGRAM = "Engram projection"
EXPERTS = "routed experts"
TABLES = "Engram tables"
EMBEDDING = "embedding"
HEAD = "LM head"
DRAFTS = "drafts"
VISION = "vision tower"

COMPONENTS: tuple[Component, ...] = (
    ATTENTION, SHARED, SMALL, ENGRAM, EXPERTS, TABLES, EMBEDDING, HEAD, DRAFTS, VISION,
)  # fmt: skip

_COMPONENT_OF_ROLE = {
    "attention": ATTENTION,
    "shared_expert": SHARED,
    "router": SMALL,
    "hyper_connection": SMALL,
    "norm": SMALL,
    "compressor": SMALL,
    "indexer": SMALL,
    "engram": ENGRAM,
    "expert": EXPERTS,
    "engram_table": TABLES,
    "embed": EMBEDDING,
    "head": HEAD,
    "draft": DRAFTS,
    "draft_expert": DRAFTS,
    "markov": DRAFTS,
    "vision": VISION,
    "aligner": VISION,
}

_SPLIT_SUFFIXES = (
    "attn.wq_b",
    "attn.wo_a",
    "attn.wo_b",
    "shared_experts.w1",
    "shared_experts.w2",
    "shared_experts.w3",
    "engram.wkv",
    "mtp.0.main_proj",
    "embed.weight",
    "markov_head.head.weight",
)
_SPLIT_NAMES = ("head.weight",)
_GATHERED = ("embed.weight", "engram.embed")
"""Tables of which a step reads single rows."""


@dataclass(frozen=True)
class RankSplit:
    """How the weights are spread.

    Attributes:
        cores: all cores.
        ep: expert-parallel ranks.
        dense_sharded: whether dense matrices are split over all cores.
    """

    cores: int
    ep: int
    dense_sharded: bool = False


@dataclass(frozen=True)
class RankTensor:
    """One tensor (codes and scales together) as a core holds it.

    Attributes:
        name: in the checkpoint, without ``.weight`` where there is a scale.
        component: what it is counted as.
        block: ``layers.3``, ``mtp.0``, or nothing for a global tensor.
        values: elements on this core.
        code_bytes: their stored bytes.
        scale_bytes: bytes of their scales.
        quantized: stored as codes that have to be converted before a product.
        gathered: a table of which a step reads single rows.
        copies: tensors like this one that the core holds (its experts).
    """

    name: str
    component: Component
    block: str
    values: int
    code_bytes: int
    scale_bytes: int
    quantized: bool
    gathered: bool
    copies: int = 1

    @property
    def bytes(self) -> int:
        """Bytes of one copy as stored."""
        return self.code_bytes + self.scale_bytes

    @property
    def suffix(self) -> str:
        """The name inside its block."""
        return self.name.removeprefix(f"{self.block}.")


@functools.lru_cache(maxsize=4)
def _distinct(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """The inventory with one routed expert per block: the others are like it."""
    specs = []
    for spec in inventory(config):
        parts = split_block_name(spec.name)
        if parts is None or not parts.expert:
            specs.append(spec)
    return tuple(specs)


@functools.lru_cache(maxsize=64)
def rank_tensors(config: ModelConfig, split: RankSplit) -> tuple[RankTensor, ...]:
    """What a core holds of every tensor, the draft blocks and the vision tower included.

    Args:
        config: the model.
        split: how the weights are spread.

    Returns:
        one record per tensor; the routed experts of a block are one record with ``copies``.
    """
    tensors = []
    specs = _distinct(config)
    scales = {s.name.removesuffix(".scale"): s for s in specs if s.name.endswith(".scale")}
    for spec in specs:
        if spec.name.endswith(".scale"):
            continue
        stem = spec.name.removesuffix(".weight")
        name = stem if stem in scales else spec.name
        tensors.append(_rank_tensor(config, split, spec, name, scales.get(name)))
    return tuple(tensors)


def _rank_tensor(
    config: ModelConfig, split: RankSplit, spec: TensorSpec, name: str, scale: TensorSpec | None
) -> RankTensor:
    parts = split_block_name(spec.name)
    block = "" if parts is None else parts.block
    ways = _ways(split, spec.role, name)
    values = math.prod(spec.shape) * (2 if spec.dtype == "I8" else 1)
    experts = expert_count(config, block) if parts is not None and parts.expert == 0 else None
    return RankTensor(
        name=name,
        component=_COMPONENT_OF_ROLE[spec.role],
        block=block,
        values=-(-values // ways),
        code_bytes=-(-spec.nbytes // ways),
        scale_bytes=0 if scale is None else -(-scale.nbytes // ways),
        quantized=scale is not None,
        gathered=name.endswith(_GATHERED),
        copies=1 if experts is None else -(-experts // split.ep),
    )


def _ways(split: RankSplit, role: str, name: str) -> int:
    """Between how many cores a tensor is divided."""
    if role == "engram_table":
        return split.cores
    if not split.dense_sharded or role in ("indexer", "vision", "aligner"):
        return 1
    # A routed expert is named like the shared one, and belongs to one core as a whole.
    whole = role in ("expert", "draft_expert") or "markov_head.embed" in name
    divided = name.endswith(_SPLIT_SUFFIXES) or name in _SPLIT_NAMES
    return split.cores if divided and not whole else 1

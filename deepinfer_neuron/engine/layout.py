"""How a model is to be spread over cores, as a person writes it: ``cores=64,nextn=5``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from deepinfer_neuron.checkpoint.config import ModelConfig
from deepinfer_neuron.engine.config import DEFAULT_BATCHED_TOKENS, DEFAULT_MODEL_LEN
from deepinfer_neuron.engine.outputs import MOST_DRAFTS
from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.model.rank_weights import RankSplit
from deepinfer_neuron.runner.buckets import Ladder
from deepinfer_neuron.runner.worker import blocks_for

Dense = Literal["replicated", "sharded"]

DENSE: tuple[Dense, ...] = get_args(Dense)

MOST_CORES = 4096
DEFAULT_SEQUENCES = 32
_NUMBERS = (
    "cores", "ep", "cp", "nextn", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
    "host_embed",
)  # fmt: skip
_KEYS = (*_NUMBERS, "dense")


@dataclass(frozen=True)
class Layout:
    """A checked placement request.

    Attributes:
        cores: logical cores, each with its own memory and process.
        ep: ranks that share the routed experts of a layer; divides ``cores`` and the experts.
        cp: ranks that share the rows of a prompt; each keeps the complete caches.
        nextn: drafts per sequence and step.
        max_model_len: tokens of a sequence.
        max_num_seqs: sequences that hold memory at once.
        max_num_batched_tokens: rows of a step.
        dense: whether dense matrices are whole on every core, or split over all of them.
        host_embed: the token embedding stays in host memory.
    """

    cores: int
    ep: int
    cp: int
    nextn: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    dense: Dense
    host_embed: bool

    @property
    def split(self) -> RankSplit:
        """How the weights are spread."""
        return RankSplit(self.cores, self.ep, self.dense == "sharded")

    def ladder(self, config: ModelConfig) -> Ladder:
        """The shapes that an engine of this layout runs."""
        rows = -(-self.max_num_batched_tokens // self.cp)
        return Ladder.build(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=rows,
            max_model_len=self.max_model_len,
            nextn=self.nextn,
            lowest_width=blocks_for(least_model_len(config)),
        )


def least_model_len(config: ModelConfig) -> int:
    """Smallest ``max_model_len`` of a model on a device with graphs of fixed shape.

    The candidate filter keeps a fixed number of blocks of entries, so as many must exist.
    """
    source = config.candidate_source_layer_id
    if source is None:
        return 2
    entries = config.candidate_topk_blocks * config.candidate_block_size
    return entries * config.layers[source].ratio


def parse_layout(text: str, config: ModelConfig) -> Layout:
    """The layout in ``text``, such as ``cores=64,nextn=5``; what is left out gets a default.

    Raises:
        ConfigError: an unknown or repeated key, a value out of range, or values that contradict
            each other or the model.
    """
    return make_layout(_read(text), config)


def make_layout(given: Mapping[str, str], config: ModelConfig) -> Layout:
    """The layout with these values, as text. See :func:`parse_layout`."""
    dense = given.get("dense", "replicated")
    if dense not in DENSE:
        raise ConfigError(f"dense={dense} is not known; give one of {', '.join(DENSE)}")
    if "cores" not in given:
        raise ConfigError("the plan does not say how many cores; give cores=64, for example")
    cores = _number(given, "cores", 1, MOST_CORES)
    nextn = _nextn(given, config)
    ep = _number(given, "ep", 1, MOST_CORES, default_ep(config, cores, nextn))
    cp = _number(given, "cp", 1, MOST_CORES, 1)
    _check_parallel(config, cores, ep, cp, nextn)
    sequences = _number(given, "max_num_seqs", 1, 65536, DEFAULT_SEQUENCES)
    rows = max(DEFAULT_BATCHED_TOKENS, sequences * (nextn + 1))
    batched = _number(given, "max_num_batched_tokens", 1, 2**20, rows)
    if batched < sequences:
        raise ConfigError(
            f"max_num_batched_tokens={batched} is less than max_num_seqs={sequences}; every "
            "running sequence needs a row, so raise the one or lower the other"
        )
    return Layout(
        cores=cores,
        ep=ep,
        cp=cp,
        nextn=nextn,
        max_model_len=_model_len(given, config),
        max_num_seqs=sequences,
        max_num_batched_tokens=batched,
        dense=dense,
        host_embed=bool(_number(given, "host_embed", 0, 1, 0)),
    )


def _read(text: str) -> dict[str, str]:
    """Keys and values of ``a=1,b=2``."""
    given: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in _KEYS:
            raise ConfigError(
                f"{part.strip()!r} is no part of a plan; give key=value with keys out of "
                f"{', '.join(_KEYS)}, separated by commas"
            )
        if key in given:
            raise ConfigError(f"the plan gives {key} twice; give it once")
        given[key] = value
    return given


def _number(
    given: Mapping[str, str], key: str, low: int, high: int, default: int | None = None
) -> int:
    """An integer within bounds, or the default if it was left out."""
    text = given.get(key)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch("[0-9]{1,9}", text) or not low <= int(text) <= high:
        raise ConfigError(f"{key}={text} is out of range; give an integer from {low} to {high}")
    return int(text)


def _nextn(given: Mapping[str, str], config: ModelConfig) -> int:
    draft = config.draft
    nextn = _number(
        given, "nextn", 0, MOST_DRAFTS, 0 if draft is None else min(draft.block_size, MOST_DRAFTS)
    )
    if nextn and draft is None:
        raise ConfigError(f"nextn={nextn}, but the checkpoint has no draft blocks; give nextn=0")
    return nextn


def _expert_counts(config: ModelConfig, nextn: int) -> tuple[int, ...]:
    """Routed experts of a layer, and of a draft block if there are drafts."""
    if nextn and config.draft is not None:
        return config.n_routed_experts, config.draft.n_routed_experts
    return (config.n_routed_experts,)


def default_ep(config: ModelConfig, cores: int, nextn: int) -> int:
    """The most ranks that divide the cores and the experts of every layer."""
    return math.gcd(cores, *_expert_counts(config, nextn))


def _check_parallel(config: ModelConfig, cores: int, ep: int, cp: int, nextn: int) -> None:
    """Ranks divide cores, and experts divide over ranks."""
    for name, ranks in (("ep", ep), ("cp", cp)):
        if cores % ranks:
            raise ConfigError(
                f"{name}={ranks} does not divide cores={cores}; give a divisor of {cores}"
            )
    for count in _expert_counts(config, nextn):
        if count % ep:
            raise ConfigError(
                f"ep={ep} does not divide the {count} routed experts of a layer; give a divisor "
                f"of {default_ep(config, cores, nextn)}"
            )


def _model_len(given: Mapping[str, str], config: ModelConfig) -> int:
    least, most = least_model_len(config), config.max_position_embeddings
    default = max(least, min(DEFAULT_MODEL_LEN, most))
    length = _number(given, "max_model_len", 1, 2**30, default)
    if length > most:
        raise ConfigError(f"max_model_len={length}, but the model supports at most {most} tokens")
    if length < least:
        raise ConfigError(
            f"max_model_len={length} is too small for this model: its candidate filter keeps "
            f"{config.candidate_topk_blocks} blocks of {config.candidate_block_size} entries, and "
            f"a graph of fixed shape has to hold them; give at least {least}"
        )
    return length

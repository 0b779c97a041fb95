"""Environment variables, read once into plain typed data."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from deepinfer_neuron.errors import ConfigError

WeightsMode = Literal["auto", "packed", "expanded"]
"""How quantized weights are held: as stored, as bf16, or whichever the memory allows."""

WEIGHTS_MODES: tuple[WeightsMode, ...] = get_args(WeightsMode)

_BLACKLIST = "DEEPINFER_DECODE_TOKEN_BLACKLIST"
_NEXTN = "DEEPINFER_USE_NEXTN_DECODE"
_RANGE = re.compile(r"([0-9]{1,10})(?:\.\.([0-9]{1,10}))?")
_FALSE_WORDS = frozenset({"0", "", "false", "False"})


@dataclass(frozen=True)
class Settings:
    """What the environment says.

    ``batch_invariant`` (``DEEPINFER_BATCH_INVARIANT``, default off): a request's result does not
    depend on what else is in the batch, bit for bit.
    ``weights`` (``DEEPINFER_NEURON_WEIGHTS``, default ``auto``): see :data:`WeightsMode`.
    ``token_blacklist`` (``DEEPINFER_DECODE_TOKEN_BLACKLIST``, default empty): ids that are never
    sampled, ascending and disjoint, as in ``0..3,7,10..12`` (both ends of a range included).
    ``sum_smaller_probs`` (``DEEPINFER_COMPUTE_SUM_SMALLER_PROBS``, default off): report with every
    token the probability of drawing a token at most as probable.
    ``force_topk`` (``DEEPINFER_SAMPLER_FORCE_TOPK``, default 0, which is off): sample among this
    many largest logits only.
    ``xgrammar_timeout`` (``DEEPINFER_XGRAMMAR_TIMEOUT``, default 20): seconds in which a grammar
    has to compile.
    ``xgrammar_disable_cache`` (``DEEPINFER_XGRAMMAR_DISABLE_CACHE``, default off): compile a
    grammar again for every request.
    ``xgrammar_cache_limit_bytes`` (``DEEPINFER_XGRAMMAR_CACHE_LIMIT_BYTES``, default 10 GiB): bytes
    of the compiled grammars that are kept.
    ``so_builder_cpus`` (``DEEPINFER_SO_BUILDER_CPUS``, default 4): grammars compiled at once.
    ``zero_overhead_scheduling`` (``DEEPINFER_ZERO_OVERHEAD_SCHEDULING``, default on): plan a step
    while the one before runs. Changes no result.
    ``prefill_attempt_interval`` (``DEEPINFER_PREFILL_ATTEMPT_INTERVAL``, default 1): while requests
    are running, only every so many steps carry prompt rows.
    ``nextn`` (``DEEPINFER_USE_NEXTN_DECODE``, default the block length of the checkpoint): drafts
    per request and step; 0 switches drafts off.
    ``mtp_varlen`` (``DEEPINFER_ENABLE_MTP_VARLEN``, default off): verify only as many drafts as
    their confidence and the measured cost of rows justify.
    ``backtracking_tokens`` (``DEEPINFER_MAX_BACKTRACKING_TOKENS``, default 0): least number of
    tokens that the caches can undo; at least ``nextn + 1`` in any case.
    ``confidence_temperatures`` (``DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE``, default 1.0): one
    divisor of the confidence logits, or one per draft, separated by commas.
    ``simulate`` (``DEEPINFER_NEURON_SIMULATE``, default off): device ``neuron`` means the simulated
    device, not a chip.
    ``host_embed`` (``DEEPINFER_NEURON_HOST_EMBED``, default off): a device leaves the token
    embedding in host memory; saves memory, and costs two more copies per pass.
    ``perf_cache_dir`` (``DEEPINFER_DECODE_PERF_CACHE_DIR``, default none) and ``perf_cache_ttl``
    (``DEEPINFER_DECODE_PERF_CACHE_TTL_SEC``, default 3600): where measured step times are kept, and
    for how many seconds.
    """

    batch_invariant: bool = False
    weights: WeightsMode = "auto"
    token_blacklist: tuple[range, ...] = ()
    sum_smaller_probs: bool = False
    force_topk: int = 0
    xgrammar_timeout: int = 20
    xgrammar_disable_cache: bool = False
    xgrammar_cache_limit_bytes: int = 10 << 30
    so_builder_cpus: int = 4
    zero_overhead_scheduling: bool = True
    prefill_attempt_interval: int = 1
    nextn: int | None = None
    mtp_varlen: bool = False
    backtracking_tokens: int = 0
    confidence_temperatures: tuple[float, ...] = (1.0,)
    simulate: bool = False
    host_embed: bool = False
    perf_cache_dir: str = ""
    perf_cache_ttl: int = 3600

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """Read the settings from ``environ`` (such as ``os.environ``).

        Raises :class:`ConfigError` if a variable holds a value that it does not allow.
        """
        return cls(
            batch_invariant=_flag(environ, "DEEPINFER_BATCH_INVARIANT"),
            weights=_weights(environ, "DEEPINFER_NEURON_WEIGHTS"),
            token_blacklist=_ranges(environ, _BLACKLIST),
            sum_smaller_probs=_flag(environ, "DEEPINFER_COMPUTE_SUM_SMALLER_PROBS"),
            force_topk=_count(environ, "DEEPINFER_SAMPLER_FORCE_TOPK"),
            xgrammar_timeout=_count(environ, "DEEPINFER_XGRAMMAR_TIMEOUT", "20"),
            xgrammar_disable_cache=_flag(environ, "DEEPINFER_XGRAMMAR_DISABLE_CACHE"),
            xgrammar_cache_limit_bytes=_count(
                environ, "DEEPINFER_XGRAMMAR_CACHE_LIMIT_BYTES", str(10 << 30)
            ),
            so_builder_cpus=_count(environ, "DEEPINFER_SO_BUILDER_CPUS", "4") or 1,
            zero_overhead_scheduling=_flag(environ, "DEEPINFER_ZERO_OVERHEAD_SCHEDULING", "1"),
            prefill_attempt_interval=_count(environ, "DEEPINFER_PREFILL_ATTEMPT_INTERVAL") or 1,
            nextn=_count(environ, _NEXTN) if environ.get(_NEXTN) else None,
            mtp_varlen=_flag(environ, "DEEPINFER_ENABLE_MTP_VARLEN"),
            backtracking_tokens=_count(environ, "DEEPINFER_MAX_BACKTRACKING_TOKENS"),
            confidence_temperatures=_temperatures(
                environ, "DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE"
            ),
            simulate=_flag(environ, "DEEPINFER_NEURON_SIMULATE"),
            host_embed=_flag(environ, "DEEPINFER_NEURON_HOST_EMBED"),
            perf_cache_dir=environ.get("DEEPINFER_DECODE_PERF_CACHE_DIR", ""),
            perf_cache_ttl=_count(environ, "DEEPINFER_DECODE_PERF_CACHE_TTL_SEC", "3600"),
        )

    def blacklisted_tokens(self, vocab_size: int) -> tuple[int, ...]:
        """The ids of ``token_blacklist``.

        Raises :class:`ConfigError` if one is not below ``vocab_size``.
        """
        last = self.token_blacklist[-1][-1] if self.token_blacklist else -1
        if last >= vocab_size:
            raise ConfigError(
                f"{_BLACKLIST} names token {last}; the vocabulary ends at {vocab_size - 1}, "
                "shorten the list."
            )
        return tuple(token for part in self.token_blacklist for token in part)


def _flag(environ: Mapping[str, str], name: str, unset: str = "") -> bool:
    """Whether the flag ``name`` is on: ``0``, empty, ``false`` and ``False`` mean off.

    ``unset`` is what counts when the variable is not there.
    """
    return environ.get(name, unset) not in _FALSE_WORDS


def _weights(environ: Mapping[str, str], name: str) -> WeightsMode:
    """The weights mode in ``name``; unset and empty mean ``auto``."""
    value = environ.get(name) or "auto"
    for mode in WEIGHTS_MODES:
        if value == mode:
            return mode
    raise ConfigError(
        f"{name}={value!r} is not a weights mode; set it to one of {', '.join(WEIGHTS_MODES)} "
        "or unset it."
    )


def _ranges(environ: Mapping[str, str], name: str) -> tuple[range, ...]:
    """Ranges of ids such as ``0..3,7,10..12``, each starting behind the end of the one before."""
    value = environ.get(name, "")
    ranges: list[range] = []
    for part in value.split(",") if value else ():
        match = _RANGE.fullmatch(part.strip())
        first = int(match[1]) if match else 0
        last = int(match[2] or first) if match else -1
        if last < first or (ranges and first <= ranges[-1][-1]):
            raise ConfigError(
                f"{name}={value!r} is no list of token ids at {part!r}; give ascending ids or "
                "ranges such as 0..3,7,10..12 or unset it."
            )
        ranges.append(range(first, last + 1))
    return tuple(ranges)


def _temperatures(environ: Mapping[str, str], name: str) -> tuple[float, ...]:
    """Positive numbers separated by commas; unset and empty mean 1."""
    value = environ.get(name) or "1.0"
    try:
        temperatures = tuple(float(part) for part in value.split(","))
    except ValueError:
        temperatures = ()
    if not temperatures or not all(0.0 < number < math.inf for number in temperatures):
        raise ConfigError(
            f"{name}={value!r} is no list of temperatures; give one positive number, or one per "
            "draft separated by commas, or unset it."
        )
    return temperatures


def _count(environ: Mapping[str, str], name: str, unset: str = "0") -> int:
    """A number of at least 0; unset and empty mean ``unset``."""
    value = environ.get(name) or unset
    if not re.fullmatch(r"[0-9]{1,15}", value):
        raise ConfigError(f"{name}={value!r} is no number of at least 0; set one or unset it.")
    return int(value)

"""Settings of an engine, and the sizes that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_neuron.cache.pools import BLOCK_TOKENS, page_tail_length, window_blocks
from deepinfer_neuron.cache.records import CodecSet
from deepinfer_neuron.checkpoint.config import ModelConfig
from deepinfer_neuron.checkpoint.config_types import DraftConfig
from deepinfer_neuron.engine.outputs import MOST_DRAFTS
from deepinfer_neuron.errors import ConfigError

DEFAULT_MODEL_LEN = 4096
DEFAULT_NUM_SEQS = 32
DEFAULT_BATCHED_TOKENS = 512
_CACHE_SHARE = 0.25
"""Share of the available memory that the paged caches may take by default."""
_PAGE_SHARE = 0.1
"""Share that the window pages of the prefix cache may take."""


@dataclass(frozen=True)
class BucketOptions:
    """What a device compiles graphs for; without meaning on a host that compiles none.

    Attributes:
        prefill_rows: rows of the smallest prompt pass; larger ones double up to
            ``max_num_batched_tokens``.
        context: tokens of the narrowest block table; wider ones double up to ``max_model_len``.
        warm_up_seconds: no further pass is compiled before the first request after this time;
            ``None`` for no limit, 0 for no warm-up.
    """

    prefill_rows: int = 128
    context: int = 16384
    warm_up_seconds: float | None = None

    def checked(self) -> BucketOptions:
        """These options.

        Raises:
            ConfigError: one of them is out of range.
        """
        check_integer("prefill_rows", self.prefill_rows, 1, 2**20)
        check_integer("context", self.context, 1, 2**31 - 1)
        seconds = self.warm_up_seconds
        if seconds is not None and not (isinstance(seconds, int | float) and seconds >= 0):
            raise ConfigError(
                f"warm_up_seconds is {seconds!r}; give a number of seconds from 0 on, or None"
            )
        return self


@dataclass(frozen=True)
class EngineConfig:
    """Checked limits of an engine.

    Attributes:
        max_model_len: most tokens of a sequence, prompt included.
        max_num_seqs: sequences that hold memory at once.
        max_num_batched_tokens: rows of one step.
        num_blocks: blocks of the paged caches, the dummy block 0 included.
        num_pages: window pages of the prefix cache, the dummy page 0 included; 1 without it.
        prefill_attempt_interval: while requests are running, only every so many steps carry
            prompt rows.
        asynchronous: plan a step while the one before runs.
        nextn: drafts per request and step, 0 for none.
        buckets: sizes that a device compiles graphs for.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    num_pages: int
    prefill_attempt_interval: int
    asynchronous: bool
    nextn: int
    buckets: BucketOptions = BucketOptions()


@dataclass(frozen=True)
class EngineOptions:
    """What a caller may leave open. See :class:`EngineConfig` for the meaning."""

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    num_blocks: int | None = None
    enable_prefix_caching: bool = True
    prefill_attempt_interval: int = 1
    asynchronous: bool = True
    nextn: int | None = None
    buckets: BucketOptions = BucketOptions()

    def resolve(self, config: ModelConfig, available_memory: int) -> EngineConfig:
        """Fill in what was left open.

        Args:
            config: the model.
            available_memory: bytes the caches may share with everything else.

        Raises:
            ConfigError: a value out of range, or limits that contradict each other.
        """
        length = _model_len(self.max_model_len, config.max_position_embeddings)
        sequences = self._sequences()
        nextn = self._nextn(config.draft)
        batched = self._batched(sequences, nextn)
        blocks = self._blocks(length, sequences, block_bytes(config), available_memory)
        return EngineConfig(
            max_model_len=length,
            max_num_seqs=sequences,
            max_num_batched_tokens=batched,
            num_blocks=blocks,
            num_pages=self._pages(blocks, page_bytes(config, nextn), available_memory),
            prefill_attempt_interval=check_integer(
                "prefill_attempt_interval", self.prefill_attempt_interval, 1, 2**31 - 1
            ),
            asynchronous=self.asynchronous,
            nextn=nextn,
            buckets=self.buckets.checked(),
        )

    def _sequences(self) -> int:
        if self.max_num_seqs is not None:
            return check_integer("max_num_seqs", self.max_num_seqs, 1, 65536)
        rows = self.max_num_batched_tokens
        return max(1, min(DEFAULT_NUM_SEQS, rows)) if isinstance(rows, int) else DEFAULT_NUM_SEQS

    def _nextn(self, draft: DraftConfig | None) -> int:
        if self.nextn is None:
            return min(draft.block_size, MOST_DRAFTS) if draft is not None else 0
        given = check_integer("nextn", self.nextn, 0, MOST_DRAFTS)
        if given and draft is None:
            raise ConfigError(
                f"nextn is {given}, but the checkpoint has no draft blocks; give 0 or leave it out"
            )
        return given

    def _batched(self, sequences: int, nextn: int) -> int:
        if self.max_num_batched_tokens is None:
            return max(DEFAULT_BATCHED_TOKENS, sequences * (nextn + 1))
        given = check_integer("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**31 - 1)
        if given < sequences:
            raise ConfigError(
                f"max_num_batched_tokens is {given} but max_num_seqs is {sequences}; every running "
                "sequence needs a row, so raise the one or lower the other"
            )
        return given

    def _blocks(self, length: int, sequences: int, size: int, memory: int) -> int:
        per_sequence = -(-length // BLOCK_TOKENS)
        if self.num_blocks is None:
            affordable = int(memory * _CACHE_SHARE) // max(1, size)
            return 1 + max(per_sequence, min(per_sequence * sequences, affordable))
        given = check_integer("num_blocks", self.num_blocks, 2, 2**31 - 1)
        if given - 1 < per_sequence:
            raise ConfigError(
                f"num_blocks is {given}; a sequence of max_model_len {length} needs "
                f"{per_sequence} blocks of {BLOCK_TOKENS} tokens beside the reserved one. Give at "
                f"least {per_sequence + 1}, or lower max_model_len to {(given - 1) * BLOCK_TOKENS}."
            )
        return given

    def _pages(self, blocks: int, size: int, memory: int) -> int:
        if not self.enable_prefix_caching:
            return 1
        return 1 + min(blocks - 1, int(memory * _PAGE_SHARE) // max(1, size))


def block_bytes(config: ModelConfig) -> int:
    """Bytes of one block in all layers' paged caches."""
    codecs = CodecSet.of(config.head_dim, config.index_head_dim, rounding=True)
    return sum(
        BLOCK_TOKENS
        // spec.ratio
        * (codecs.compressed.width * spec.owns_kv + codecs.index.width * spec.owns_index_k)
        for spec in config.layers
        if spec.ratio
    )


def page_bytes(config: ModelConfig, nextn: int = 0) -> int:
    """Bytes of one window page in all layers, those of the draft blocks included if they run."""
    width = CodecSet.of(config.head_dim, config.index_head_dim, rounding=True).window.width
    drafts = config.draft.num_layers if nextn and config.draft is not None else 0
    return (len(config.layers) + drafts) * page_tail_length(config.sliding_window) * width


def blocks_per_window(config: ModelConfig) -> int:
    """Blocks whose pages cover one window."""
    return window_blocks(config.sliding_window)


def check_integer(name: str, value: object, low: int, high: int) -> int:
    """The value, if it is an integer within the bounds; else a ``ConfigError``."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}; give an integer from {low} to {high}")
    return value


def _model_len(given: int | None, supported: int) -> int:
    if given is None:
        return min(DEFAULT_MODEL_LEN, supported)
    if isinstance(given, int) and not isinstance(given, bool) and given > supported:
        raise ConfigError(
            f"max_model_len is {given}; the model supports at most {supported} "
            "(max_position_embeddings)"
        )
    return check_integer("max_model_len", given, 2, supported)

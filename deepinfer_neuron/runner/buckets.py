"""The bucket ladder: the closed list of shapes that a device is ever asked to run.

A device compiles one graph per shape, for minutes each, so a step is padded up to the next shape of
a short ladder instead of running at its own size:

| size | buckets |
|---|---|
| sequences of a decode pass | powers of two up to ``max_num_seqs`` |
| rows per sequence of a decode pass | next power of two of ``1 + nextn``: 5 drafts run as 8 rows |
| rows of a prompt pass (one sequence) | powers of two from 128 up to ``max_num_batched_tokens`` |
| blocks of a block table | powers of two up to ``max_model_len``, in blocks of 128 tokens |
| rows per sequence of a draft pass | next power of two of the drafts |

Powers of two everywhere: the row count of the sparse decode attention has to be one on the device,
and doubling bounds the waste of a bucket by half of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deepinfer_neuron.cache.pools import BLOCK_TOKENS
from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.model.shapes import PassShape

LOWEST_PREFILL_ROWS = 128


@dataclass(frozen=True)
class Ladder:
    """Every size that a pass may have, ascending; see the table of this module.

    Attributes:
        sequences: sequences of a decode pass.
        decode_rows: rows per sequence of a decode pass.
        prefill_rows: rows of a prompt pass.
        widths: blocks of a block table.
        nextn: most drafts per sequence, 0 without drafts.

    Raises:
        ConfigError: a list that is empty, does not ascend or holds anything but powers of two, or
            decode rows that do not hold ``1 + nextn``.
    """

    sequences: tuple[int, ...]
    decode_rows: tuple[int, ...]
    prefill_rows: tuple[int, ...]
    widths: tuple[int, ...]
    nextn: int = 0

    def __post_init__(self) -> None:
        for name in ("sequences", "decode_rows", "prefill_rows", "widths"):
            _check_buckets(name, getattr(self, name))
        if self.nextn < 0 or self.decode_rows[-1] < 1 + self.nextn:
            raise ConfigError(
                f"decode_rows ends with {self.decode_rows[-1]}, but nextn is {self.nextn}; a "
                f"sequence needs 1 + nextn rows, so end with at least {_power(1 + self.nextn)}"
            )

    @classmethod
    def build(
        cls,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        nextn: int = 0,
        lowest_prefill: int = LOWEST_PREFILL_ROWS,
        lowest_width: int = 1,
        varying_drafts: bool = False,
    ) -> Ladder:
        """The ladder of an engine's limits.

        Args:
            max_num_seqs: sequences of a step.
            max_num_batched_tokens: rows of a step.
            max_model_len: tokens of a sequence.
            nextn: drafts per sequence and step.
            lowest_prefill: rows of the smallest prompt pass, rounded up to a power of two.
            lowest_width: blocks of the smallest block table, rounded up to a power of two.
            varying_drafts: also have smaller decode rows, for steps that verify fewer drafts.

        Raises:
            ConfigError: a limit below 1, or ``nextn`` below 0.
        """
        limits = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": max_model_len,
            "nextn": nextn + 1,
            "lowest_prefill": lowest_prefill,
            "lowest_width": lowest_width,
        }
        for name, value in limits.items():
            if value < 1:
                raise ConfigError(f"{name} is {value - (name == 'nextn')}; it is too small")
        rows = _power(1 + nextn)
        return cls(
            sequences=_powers(1, max_num_seqs),
            decode_rows=_powers(1, rows) if varying_drafts else (rows,),
            prefill_rows=_powers(lowest_prefill, max_num_batched_tokens),
            widths=_powers(lowest_width, _blocks(max_model_len)),
            nextn=nextn,
        )

    def decode_shape(self, num_sequences: int, drafts: int, blocks: int = 1) -> PassShape:
        """The smallest decode pass that fits.

        Args:
            num_sequences: sequences, at least 1.
            drafts: most drafts that one of them verifies.
            blocks: blocks of the longest block table.

        Raises:
            ConfigError: more than the ladder holds.
        """
        if not 0 <= drafts <= self.nextn:
            raise ConfigError(f"{drafts} drafts per sequence; the ladder is made for {self.nextn}")
        rows = _bucket("rows per sequence", 1 + drafts, self.decode_rows, "nextn")
        return PassShape(
            sequences=_bucket("sequences", num_sequences, self.sequences, "max_num_seqs"),
            rows=rows,
            blocks=self.table_width(blocks),
            outputs=self._outputs(rows),
        )

    def prefill_shape(self, rows: int, blocks: int = 1) -> PassShape:
        """The smallest prompt pass, of one sequence, that fits.

        Args:
            rows: tokens of the chunk, at least 1.
            blocks: blocks of its table; at least those of the chunk itself are taken.

        Raises:
            ConfigError: more than the ladder holds.
        """
        bucket = _bucket("prompt rows", rows, self.prefill_rows, "max_num_batched_tokens")
        return PassShape(1, bucket, self.table_width(max(blocks, _blocks(rows))), outputs=1)

    def draft_shape(self, num_sequences: int) -> PassShape:
        """The smallest pass of the draft blocks that fits; they read no paged cache.

        Raises:
            ConfigError: more sequences than the ladder holds, or a ladder without drafts.
        """
        if not self.nextn:
            raise ConfigError("this ladder has no draft passes; nextn is 0")
        sequences = _bucket("sequences", num_sequences, self.sequences, "max_num_seqs")
        return PassShape(sequences, _power(self.nextn), blocks=0, outputs=self.nextn)

    def table_width(self, blocks: int) -> int:
        """The narrowest block table that holds ``blocks`` blocks.

        Raises:
            ConfigError: more than the ladder holds.
        """
        return _bucket("blocks of a sequence", blocks, self.widths, "max_model_len")

    def decode_passes(self) -> tuple[PassShape, ...]:
        """Every decode pass."""
        return tuple(
            PassShape(sequences, rows, blocks, self._outputs(rows))
            for sequences in self.sequences
            for rows in self.decode_rows
            for blocks in self.widths
        )

    def prefill_passes(self) -> tuple[PassShape, ...]:
        """Every prompt pass: those whose table holds the fewest rows that choose the bucket."""
        below = (0, *self.prefill_rows[:-1])
        return tuple(
            PassShape(1, rows, blocks, outputs=1)
            for rows, smaller in zip(self.prefill_rows, below, strict=True)
            for blocks in self.widths
            if blocks >= _blocks(smaller + 1)
        )

    def draft_passes(self) -> tuple[PassShape, ...]:
        """Every pass of the draft blocks, none without drafts."""
        return tuple(self.draft_shape(count) for count in self.sequences) if self.nextn else ()

    def passes(self) -> tuple[PassShape, ...]:
        """Every pass of the backbone that can occur, each once: decode passes, then prompts."""
        return tuple(dict.fromkeys((*self.decode_passes(), *self.prefill_passes())))

    def _outputs(self, rows: int) -> int:
        """Wanted rows per sequence of a decode pass: the last token and its drafts."""
        return min(rows, 1 + self.nextn)


def _blocks(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK_TOKENS)


def _power(value: int) -> int:
    """The smallest power of two that is at least ``value``, which is at least 1."""
    return 1 << (value - 1).bit_length()


def _powers(low: int, high: int) -> tuple[int, ...]:
    """Powers of two from ``low`` to ``high``, both rounded up; at least one."""
    first, last = _power(low), max(_power(low), _power(high))
    return tuple(1 << n for n in range(first.bit_length() - 1, last.bit_length()))


def _check_buckets(name: str, buckets: Sequence[int]) -> None:
    """Raise ``ConfigError`` unless the buckets are ascending powers of two."""
    good = all(bucket >= 1 and bucket == _power(bucket) for bucket in buckets)
    if not buckets or not good or list(buckets) != sorted(set(buckets)):
        raise ConfigError(f"{name} is {_list(buckets)}; give ascending powers of two, at least one")


def _bucket(what: str, wanted: int, buckets: Sequence[int], limit: str) -> int:
    """The smallest bucket that holds ``wanted``."""
    if wanted >= 1:
        for bucket in buckets:
            if wanted <= bucket:
                return bucket
    raise ConfigError(
        f"{wanted} {what} do not fit the buckets {_list(buckets)}; give 1 to {buckets[-1]}, or "
        f"build the ladder with a larger {limit}"
    )


def _list(numbers: Iterable[int]) -> str:
    """Numbers in words."""
    return ", ".join(str(number) for number in numbers) or "empty"

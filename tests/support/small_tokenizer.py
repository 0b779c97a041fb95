"""A hand-made byte-level BPE tokenizer of 300 ids, small enough to read.

0 to 2 are the sentence and pad tokens, 3 to 258 the bytes in order, then the merges listed here,
then the added tokens. Only those marked so are *special*, that is, skipped when decoding.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
IMAGE = "<｜deepseek_image｜>"
THINK = "<think>"
HOLDER = "<｜place▁holder▁no▁0｜>"

FIRST_BYTE_ID = 3

# Ġ is the symbol of a space, Ċ of a line feed; "Ã ©" builds "é", "ð Ł ĺ" the first three of the
# four bytes of a smiley.
MERGES = (
    *("t h", "th e", "T h", "Th e", "Ġ the", "Ġ The", "T H", "TH E", "Ġ THE"),
    *("Ġ Ġ", "ĠĠ ĠĠ", "Ċ Ċ", "h e", "l l", "he ll", "hell o", "H e", "He ll", "Hell o"),
    *("Ã ©", "c a", "ca f", "caf Ã©", "caf e", "ð Ł", "ðŁ ĺ", "ä ½", "ä½ ł"),
)
ADDED = (
    *((HOLDER, True), ("<｜System｜>", False), ("<｜User｜>", False), ("<｜Assistant｜>", False)),
    *((THINK, False), ("</think>", False), ("｜DSML｜", False), (IMAGE, False)),
    *((f"<｜place▁holder▁no▁{number}｜>", True) for number in range(1, 6)),
)


def byte_symbol(byte: int) -> str:
    """Vocabulary symbol of a byte, by rule: printable Latin-1 as is, the others from 256 on."""
    printable = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    hidden = [b for b in range(256) if b not in printable]
    return chr(byte) if byte in printable else chr(256 + hidden.index(byte))


VOCABULARY = (
    *(BOS, EOS, PAD),
    *map(byte_symbol, range(256)),
    *(merge.replace(" ", "") for merge in MERGES),
)
SIZE = len(VOCABULARY) + len(ADDED)


def token_id(spelling: str) -> int:
    """Id of a spelling."""
    return [*VOCABULARY, *(name for name, _ in ADDED)].index(spelling)


def tokenizer_json() -> dict[str, Any]:
    """Content of ``tokenizer.json``, free to be changed by a test."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    names = [(BOS, True), (EOS, True), (PAD, True), *ADDED]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id(name),
                "content": name,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": special,
            }
            for name, special in names
        ],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {spelling: number for number, spelling in enumerate(VOCABULARY)},
            "merges": list(MERGES),
        },
    }


def tokenizer_config() -> dict[str, Any]:
    """Content of ``tokenizer_config.json``, free to be changed by a test."""
    return {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": {"__type": "AddedToken", "content": EOS},
        "pad_token": PAD,
    }


def write_tokenizer(
    directory: Path,
    tokenizer: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
) -> Path:
    """Writes both files into ``directory`` and returns it."""
    files = {
        "tokenizer.json": tokenizer_json() if tokenizer is None else tokenizer,
        "tokenizer_config.json": tokenizer_config() if settings is None else settings,
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content), encoding="utf-8")
    return directory


@dataclass(frozen=True)
class ModelStub:
    """The part of a model's configuration that concerns the tokenizer, fitting the small one."""

    vocab_size: int = SIZE
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int = token_id(IMAGE)
    tokenizer_compatibility: str = "native"

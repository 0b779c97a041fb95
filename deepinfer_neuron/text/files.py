"""Reading the tokenizer files of a checkpoint directory, trusting nothing in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer as LibraryTokenizer

from deepinfer_neuron.errors import TokenizerError
from deepinfer_neuron.text.byte_level import BYTE_OF_SYMBOL

_FETCH_AGAIN = "Download the file again or use the one of this checkpoint."


def read_json(path: Path) -> dict[str, object]:
    """Reads a JSON object; raises ``TokenizerError`` if it is missing, damaged or not an object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or error
        raise TokenizerError(f"{path} cannot be read ({reason}). {_FETCH_AGAIN}") from error
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not valid JSON ({error}). {_FETCH_AGAIN}") from error
    if not isinstance(data, dict):
        raise TokenizerError(
            f"{path} holds a {type(data).__name__} where a JSON object is expected. {_FETCH_AGAIN}"
        )
    return data


@dataclass(frozen=True)
class TokenizerPair:
    """One vocabulary, opened twice.

    ``full`` knows every token. ``plain`` has no added tokens at all, so nothing that a text may
    contain can become a control id. ``size`` is the number of ids stored in the file.
    """

    full: LibraryTokenizer
    plain: LibraryTokenizer
    size: int


def open_pair(path: Path) -> TokenizerPair:
    """Opens ``tokenizer.json`` at ``path``.

    Raises ``TokenizerError`` unless it is a byte-level BPE tokenizer with all 256 byte symbols,
    whose ids are 0 to size-1 without holes, and whose added tokens keep the ids they are listed
    with.
    """
    data = read_json(path)
    model = _object(data, "model", path)
    vocabulary = _object(model, "vocab", path)
    _require_byte_level(data, model, path)
    full = _open(data, path)
    ids = full.get_vocab(with_added_tokens=True).values()
    size = len(ids)
    if set(ids) != set(range(size)):
        raise TokenizerError(
            f"{path} gives {size} tokens ids up to {max(ids)}; ids must be 0 to {size - 1}, each "
            f"used once. {_FETCH_AGAIN}"
        )
    added = _added_ids(data, full, path)
    words = {spelling: number for spelling, number in vocabulary.items() if number not in added}
    missing = len(BYTE_OF_SYMBOL.keys() - words.keys())
    if missing:
        raise TokenizerError(
            f"{path} lacks {missing} of the 256 byte symbols, so some texts could not be encoded. "
            f"{_FETCH_AGAIN}"
        )
    plain = {**data, "added_tokens": [], "post_processor": None, "model": {**model, "vocab": words}}
    return TokenizerPair(full, _open(plain, path), size)


def _object(data: Mapping[str, object], key: str, path: Path) -> dict[str, object]:
    """The JSON object at ``key``."""
    value = data.get(key)
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} has no {key!r} object. {_FETCH_AGAIN}")
    return value


def _require_byte_level(
    data: Mapping[str, object], model: Mapping[str, object], path: Path
) -> None:
    """Decoding joins bytes, which is right for byte-level BPE and for nothing else."""
    decoder = data.get("decoder")
    decoder_type = decoder.get("type") if isinstance(decoder, dict) else None
    unsupported = ("continuing_subword_prefix", "end_of_word_suffix", "dropout")
    extras = any(model.get(key) for key in unsupported)
    if model.get("type") != "BPE" or decoder_type != "ByteLevel" or extras:
        raise TokenizerError(
            f"{path} holds a {model.get('type')!r} model with decoder {decoder_type!r}; supported "
            f"is 'BPE' without {', '.join(unsupported)}, decoded by 'ByteLevel'. Use the tokenizer "
            "of a DeepSeek-V4.1 checkpoint."
        )


def _open(data: Mapping[str, object], path: Path) -> LibraryTokenizer:
    """Hands the JSON to the library, without truncation and padding."""
    try:
        tokenizer = LibraryTokenizer.from_str(json.dumps(data))
        tokenizer.no_truncation()
        tokenizer.no_padding()
    except Exception as error:
        raise TokenizerError(
            f"{path} is not a usable tokenizer ({error}). {_FETCH_AGAIN}"
        ) from error
    return tokenizer


def _added_ids(data: Mapping[str, object], full: LibraryTokenizer, path: Path) -> set[int]:
    """Ids of the added tokens; the library renumbers silently where a listed id does not fit."""
    entries = data.get("added_tokens")
    found: set[int] = set()
    for entry in entries if isinstance(entries, list) else []:
        spelling, listed = entry["content"], entry["id"]
        actual = full.token_to_id(spelling)
        if actual != listed:
            raise TokenizerError(
                f"{path} lists the added token {spelling!r} with id {listed}, but it is {actual} "
                f"in the vocabulary. {_FETCH_AGAIN}"
            )
        found.add(listed)
    return found

"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deepinfer_neuron.errors import RequestError, TokenizerError
from deepinfer_neuron.text.byte_level import spelling_bytes
from deepinfer_neuron.text.files import TokenizerPair, open_pair, read_json
from deepinfer_neuron.text.policy import ModelIds, Verdict, apply_policy


class Tokenizer:
    """The tokenizer of one checkpoint, checked against the model it serves.

    There are two ways in. :meth:`encode` takes text from a user: whatever it spells, it never
    becomes a control id. :meth:`encode_with_specials` takes a prompt that the engine rendered
    itself, where the spelling of a control token means that token.
    """

    def __init__(self, pair: TokenizerPair, verdict: Verdict, model: ModelIds) -> None:
        """Takes opened files that passed the policy checks; use :meth:`load` for a directory."""
        self._full = pair.full
        self._plain = pair.plain
        self._adds_bos = verdict.adds_bos
        self._vocab_size = verdict.vocab_size
        self._bos_token_id = model.bos_token_id
        self._eos_token_id = model.eos_token_id
        self._pad_token_id = model.pad_token_id
        self._image_token_id = model.image_token_id
        added = pair.full.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._id_limit = pair.full.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, directory: str | Path, config: ModelIds) -> Tokenizer:
        """Opens ``tokenizer.json`` and ``tokenizer_config.json`` of a checkpoint directory.

        ``config`` is the model's configuration. Raises ``TokenizerError`` when a file is missing
        or damaged or disagrees with ``config`` under its ``tokenizer_compatibility``.
        """
        root = Path(directory)
        settings_path = root / "tokenizer_config.json"
        settings = read_json(settings_path)
        pair = open_pair(root / "tokenizer.json")
        verdict = apply_policy(pair.full, pair.size, settings, settings_path, config)
        return cls(pair, verdict, config)

    @property
    def vocab_size(self) -> int:
        """Number of ids the tokenizer shares with the model, at most the model's ``vocab_size``.

        Tokens that exist only at run time are not counted.
        """
        return self._vocab_size

    @property
    def bos_token_id(self) -> int:
        """Id at the start of a text."""
        return self._bos_token_id

    @property
    def eos_token_id(self) -> int:
        """Id that ends a text."""
        return self._eos_token_id

    @property
    def pad_token_id(self) -> int:
        """Id of padding."""
        return self._pad_token_id

    @property
    def image_token_id(self) -> int:
        """Id of the image placeholder."""
        return self._image_token_id

    @property
    def adds_bos(self) -> bool:
        """Whether :meth:`encode` starts a text with the BOS id."""
        return self._adds_bos

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Encodes a user's text, led by BOS unless ``add_bos`` or the policy says otherwise.

        Spellings of control tokens are ordinary characters here. Raises ``RequestError`` for text
        that is not valid Unicode.
        """
        _require_unicode(text)
        ids = self._plain.encode(text, add_special_tokens=False).ids
        return [self._bos_token_id, *ids] if add_bos and self._adds_bos else list(ids)

    def encode_with_specials(self, text: str) -> list[int]:
        """Encodes a rendered prompt: spellings of control tokens become their ids.

        Nothing is added; a rendered prompt spells its own BOS. Raises ``RequestError`` for text
        that is not valid Unicode.
        """
        _require_unicode(text)
        return list(self._full.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Joins the text of ``ids``; bytes that form no character become U+FFFD.

        Raises ``TokenizerError`` for an id outside the vocabulary.
        """
        numbers = [self._checked(i) for i in ids]
        return str(self._full.decode(numbers, skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that one id contributes to decoded text, which may be part of a character.

        Raises ``TokenizerError`` for an id outside the vocabulary.
        """
        return spelling_bytes(str(self._full.id_to_token(self._checked(token_id))))

    def is_special(self, token_id: int) -> bool:
        """Whether ``decode`` skips this id by default."""
        return token_id in self._special_ids

    def token_id(self, spelling: str) -> int | None:
        """Id of a token by its spelling in the vocabulary, or None."""
        found: int | None = self._full.token_to_id(spelling)
        return found

    def _checked(self, token_id: int) -> int:
        """The id as a plain int, if the vocabulary has it."""
        number = int(token_id)
        if 0 <= number < self._id_limit:
            return number
        raise TokenizerError(
            f"Token id {number} is outside the vocabulary; allowed are 0 to {self._id_limit - 1}. "
            "Pass ids that this checkpoint's tokenizer produced."
        )


def _require_unicode(text: str) -> None:
    """Refuses text that cannot be written as UTF-8, such as half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"The text cannot be encoded as UTF-8 at character {error.start} ({error.reason}). "
            "Replace the character, for instance with U+FFFD."
        ) from error

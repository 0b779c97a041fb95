"""What a tokenizer must look like before it may serve a model.

A wrong tokenizer does not crash: it silently feeds wrong ids. So every agreement between
``tokenizer.json``, ``tokenizer_config.json`` and the model's configuration is checked once, and
each disagreement has its own message.

Two policies exist. ``release`` knows the released tokenizer: fixed ids for the sentence and pad
tokens, BOS always prepended, and 21 span tokens that are registered at run time behind the model's
vocabulary. ``native`` takes the files as they are and checks only that they agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tokenizers import AddedToken
from tokenizers import Tokenizer as LibraryTokenizer

from deepinfer_neuron.errors import TokenizerError

BOS_TOKEN = "<｜begin▁of▁sentence｜>"
EOS_TOKEN = "<｜end▁of▁sentence｜>"
PAD_TOKEN = "<｜▁pad▁｜>"
IMAGE_TOKEN = "<｜deepseek_image｜>"
SPAN_TOKENS = tuple(f"<|place_holder_mm_span_{number:04}|>" for number in range(21))
FIRST_SPAN_ID = 129280

_BOS_ID, _EOS_ID, _PAD_ID = 0, 1, 2
_USE_NATIVE = (
    "Use the released tokenizer files, or set tokenizer_compatibility to 'native' in config.json "
    "if this is a checkpoint with a tokenizer of its own."
)
_SAME_RELEASE = "Use the tokenizer files and the config.json of one checkpoint."


class ModelIds(Protocol):
    """The part of a model's configuration that a tokenizer has to agree with."""

    @property
    def vocab_size(self) -> int:
        """Number of ids the model embeds."""

    @property
    def bos_token_id(self) -> int:
        """Id at the start of a text."""

    @property
    def eos_token_id(self) -> int:
        """Id that ends a text."""

    @property
    def pad_token_id(self) -> int:
        """Id of padding."""

    @property
    def image_token_id(self) -> int:
        """Id of the image placeholder."""

    @property
    def tokenizer_compatibility(self) -> str:
        """``release`` or ``native``."""


@dataclass(frozen=True)
class Verdict:
    """Outcome of the checks: whether plain text starts with BOS, and the ids the model embeds."""

    adds_bos: bool
    vocab_size: int


def apply_policy(
    tokenizer: LibraryTokenizer,
    size: int,
    settings: Mapping[str, object],
    settings_path: Path,
    model: ModelIds,
) -> Verdict:
    """Checks a tokenizer of ``size`` stored ids against ``model``; raises ``TokenizerError``.

    ``settings`` is the content of ``tokenizer_config.json`` at ``settings_path``. Code that it
    may name (``auto_map``) is never run. Under ``release`` the span tokens are added to
    ``tokenizer``.
    """
    if model.tokenizer_compatibility == "release":
        return _apply_release(tokenizer, size, _Settings(settings, settings_path), model)
    if model.tokenizer_compatibility == "native":
        return _apply_native(tokenizer, size, _Settings(settings, settings_path), model)
    raise TokenizerError(
        f"tokenizer_compatibility is {model.tokenizer_compatibility!r}; allowed are 'release' and "
        "'native'. Correct config.json."
    )


@dataclass(frozen=True)
class _Settings:
    """Typed look at ``tokenizer_config.json``."""

    data: Mapping[str, object]
    path: Path

    def token(self, key: str) -> str | None:
        """Spelling of a named token, written as a string or as an object with ``content``."""
        value = self.data.get(key)
        spelling = value.get("content") if isinstance(value, dict) else value
        if spelling is None or isinstance(spelling, str):
            return spelling
        raise TokenizerError(
            f"{self.path} has {key} {value!r}; expected a string or an object with a 'content' "
            f"string. {_SAME_RELEASE}"
        )

    def flag(self, key: str, default: bool) -> bool:
        """A switch; an absent one has its default."""
        value = self.data.get(key, default)
        if isinstance(value, bool):
            return value
        raise TokenizerError(
            f"{self.path} has {key} {value!r}; expected true or false. Correct that file."
        )


def _apply_release(
    tokenizer: LibraryTokenizer, size: int, settings: _Settings, model: ModelIds
) -> Verdict:
    """Checks and fix-ups of the released tokenizer."""
    spans = sum(tokenizer.token_to_id(name) is not None for name in SPAN_TOKENS)
    _check_size(size - spans, model)
    _check_release_token(tokenizer, settings, "bos_token", BOS_TOKEN, _BOS_ID)
    _check_release_token(tokenizer, settings, "eos_token", EOS_TOKEN, _EOS_ID)
    _check_release_pad(tokenizer, settings)
    settings.flag("add_bos_token", default=True)
    if settings.flag("add_eos_token", default=False):
        raise TokenizerError(
            f"{settings.path} sets add_eos_token, which would end every prompt before it is "
            "answered. Set it to false."
        )
    for key, expected, given in (
        ("bos_token_id", _BOS_ID, model.bos_token_id),
        ("eos_token_id", _EOS_ID, model.eos_token_id),
        ("pad_token_id", _PAD_ID, model.pad_token_id),
    ):
        _check_same(key, given, expected)
    _check_image(tokenizer, model)
    _register_spans(tokenizer)
    return Verdict(adds_bos=True, vocab_size=size - spans)


def _apply_native(
    tokenizer: LibraryTokenizer, size: int, settings: _Settings, model: ModelIds
) -> Verdict:
    """Agreement checks only; nothing is changed."""
    _check_size(size, model)
    for key, given in (
        ("bos_token", model.bos_token_id),
        ("eos_token", model.eos_token_id),
        ("pad_token", model.pad_token_id),
    ):
        spelling = settings.token(key)
        if spelling is not None:
            _check_same(f"{key}_id", given, tokenizer.token_to_id(spelling))
        elif not 0 <= given < size:
            raise TokenizerError(
                f"config.json {key}_id is {given} but the tokenizer has ids 0 to {size - 1}. "
                f"{_SAME_RELEASE}"
            )
    _check_image(tokenizer, model)
    return Verdict(adds_bos=settings.flag("add_bos_token", default=True), vocab_size=size)


def _check_size(size: int, model: ModelIds) -> None:
    """The model must embed every id the tokenizer can produce."""
    if size > model.vocab_size:
        raise TokenizerError(
            f"The tokenizer has {size} ids but config.json vocab_size is {model.vocab_size}: the "
            f"model has no embedding for the rest. {_SAME_RELEASE}"
        )


def _check_same(key: str, given: int, actual: int | None) -> None:
    """One id of config.json against the tokenizer's."""
    if given != actual:
        holds = "none" if actual is None else str(actual)
        raise TokenizerError(
            f"config.json {key} is {given} but the tokenizer has {holds}. {_SAME_RELEASE}"
        )


def _check_image(tokenizer: LibraryTokenizer, model: ModelIds) -> None:
    """A wrong placeholder id would put image features on ordinary text without any error."""
    actual = tokenizer.token_to_id(IMAGE_TOKEN)
    if actual != model.image_token_id:
        holds = "none" if actual is None else str(actual)
        raise TokenizerError(
            f"config image_token_id {model.image_token_id} but tokenizer has {holds} for "
            f"{IMAGE_TOKEN!r}. {_SAME_RELEASE}"
        )


def _check_release_token(
    tokenizer: LibraryTokenizer, settings: _Settings, key: str, spelling: str, token_id: int
) -> None:
    """BOS and EOS: the configured text and its id."""
    named = settings.token(key)
    if named != spelling:
        raise TokenizerError(
            f"{settings.path} names {named!r} as {key}; the release has {spelling!r}. {_USE_NATIVE}"
        )
    actual = tokenizer.token_to_id(spelling)
    if actual != token_id:
        raise TokenizerError(
            f"The {key} {spelling!r} has id {actual} in tokenizer.json; the release has "
            f"{token_id}. {_USE_NATIVE}"
        )


def _check_release_pad(tokenizer: LibraryTokenizer, settings: _Settings) -> None:
    """The pad token must exist; the configured one may be that or the EOS token once more."""
    actual = tokenizer.token_to_id(PAD_TOKEN)
    if actual != _PAD_ID:
        raise TokenizerError(
            f"The pad token {PAD_TOKEN!r} has id {actual} in tokenizer.json; the release has "
            f"{_PAD_ID}. {_USE_NATIVE}"
        )
    named = settings.token("pad_token")
    if named not in (PAD_TOKEN, EOS_TOKEN):
        raise TokenizerError(
            f"{settings.path} names {named!r} as pad_token; allowed are {PAD_TOKEN!r} and "
            f"{EOS_TOKEN!r}. {_USE_NATIVE}"
        )


def _register_spans(tokenizer: LibraryTokenizer) -> None:
    """Adds the missing span tokens at run time and checks the ids that all of them have."""
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in SPAN_TOKENS]
    )
    for expected, name in enumerate(SPAN_TOKENS, start=FIRST_SPAN_ID):
        actual = tokenizer.token_to_id(name)
        if actual != expected:
            raise TokenizerError(
                f"The span token {name!r} has or would receive id {actual}; the release has "
                f"{expected}. {_USE_NATIVE}"
            )

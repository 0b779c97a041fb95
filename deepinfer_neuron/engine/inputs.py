"""What a caller may give as a prompt, and how it becomes token ids."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import TypedDict

from deepinfer_neuron.errors import RequestError
from deepinfer_neuron.sampling.params import SamplingParams
from deepinfer_neuron.text.tokenizer import Tokenizer


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]


Prompt = str | TextPrompt | TokensPrompt


@dataclass(frozen=True)
class EncodedPrompt:
    """Checked token ids, and the text they came from, if any."""

    text: str | None
    token_ids: list[int]


def encode_prompt(prompt: object, tokenizer: Tokenizer, vocab_size: int) -> EncodedPrompt:
    """Token ids of a prompt.

    Args:
        prompt: text, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``.
        tokenizer: encodes text.
        vocab_size: exclusive bound of the ids.

    Raises:
        RequestError: another form, an empty prompt, or an id outside the vocabulary.
    """
    if isinstance(prompt, str):
        return _encode_text(prompt, tokenizer)
    if isinstance(prompt, abc.Mapping) and prompt.keys() == {"prompt"}:
        return _encode_text(prompt["prompt"], tokenizer)
    if isinstance(prompt, abc.Mapping) and prompt.keys() == {"prompt_token_ids"}:
        return EncodedPrompt(None, checked_ids(prompt["prompt_token_ids"], vocab_size))
    raise RequestError(
        f"a prompt is {str(prompt)[:80]!r}; give a str, {{'prompt': text}} or "
        "{'prompt_token_ids': ids}"
    )


def checked_ids(ids: object, vocab_size: int) -> list[int]:
    """Token ids as a list, each within the vocabulary; else a ``RequestError``."""
    if not isinstance(ids, abc.Sequence) or isinstance(ids, str | bytes):
        raise RequestError(f"prompt_token_ids is a {type(ids).__name__}; give a list of integers")
    if len(ids) == 0:
        raise RequestError("prompt_token_ids is empty; give at least one token id")
    for position, token in enumerate(ids):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise RequestError(
                f"prompt_token_ids[{position}] is {token!r}; give integers from 0 to "
                f"{vocab_size - 1}"
            )
    return list(ids)


def params_per_prompt(given: object, count: int) -> list[SamplingParams]:
    """One set of parameters per prompt from one for all, a list, or ``None`` for the defaults."""
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    if not isinstance(given, abc.Sequence):
        raise RequestError(f"sampling_params is a {type(given).__name__}; give SamplingParams")
    if len(given) != count:
        raise RequestError(
            f"{len(given)} sampling parameters were given for {count} prompts; give one for all "
            "or one per prompt"
        )
    for item in given:
        if not isinstance(item, SamplingParams):
            raise RequestError(
                f"a sampling parameter is a {type(item).__name__}; give SamplingParams"
            )
    return list(given)


def _encode_text(text: object, tokenizer: Tokenizer) -> EncodedPrompt:
    if not isinstance(text, str):
        raise RequestError(f"the prompt's text is a {type(text).__name__}; give a str")
    if not text:
        raise RequestError(
            "the prompt is empty; give text, or {'prompt_token_ids': [bos_token_id]} to start "
            "from nothing"
        )
    return EncodedPrompt(text, tokenizer.encode(text))

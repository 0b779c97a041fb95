"""The offline interface: load a checkpoint, generate text."""

from __future__ import annotations

import os
import time
from collections import abc
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, NoReturn, TypedDict, cast

from tqdm import tqdm

from deepinfer_neuron.checkpoint.reader import Checkpoint
from deepinfer_neuron.engine.generator import Generator
from deepinfer_neuron.engine.outputs import (
    CompletionOutput,
    FinishReason,
    RequestMetrics,
    RequestOutput,
)
from deepinfer_neuron.engine.sequence import Sequence
from deepinfer_neuron.errors import ConfigError, RequestError
from deepinfer_neuron.ops.arithmetic import fixed_arithmetic, free_arithmetic
from deepinfer_neuron.platform import get_platform
from deepinfer_neuron.runner.worker import Worker, expanded_bytes
from deepinfer_neuron.sampling.params import SamplingParams
from deepinfer_neuron.settings import WEIGHTS_MODES, Settings, WeightsMode
from deepinfer_neuron.text.tokenizer import Tokenizer

__all__ = [
    "LLM",
    "CompletionOutput",
    "FinishReason",
    "Prompt",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
]

_DEFAULT_MODEL_LEN = 4096
_DEFAULT_BATCHED_TOKENS = 512
_EXPAND_BELOW = 0.5
"""Expand weights only if they take less than this share of the available memory."""


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]


Prompt = str | TextPrompt | TokensPrompt


class LLM:
    """A loaded model.

    Args:
        model: checkpoint directory.
        device: ``"cpu"``.
        dtype: ``"bfloat16"``, the only activation format the checkpoints are made for.
        max_model_len: most tokens of a sequence, prompt included; by default 4096 or what the
            model supports, whichever is less.
        max_num_seqs: most sequences decoded together.
        max_num_batched_tokens: most prompt tokens of one prefill step, 512 by default.
        weights: ``"packed"`` keeps quantized weights memory-mapped as stored, ``"expanded"``
            decodes them to bf16 once, ``"auto"`` expands when they fit into half of the available
            memory. Results agree. By default what ``DEEPINFER_NEURON_WEIGHTS`` says.
        batch_invariant: fixed-order arithmetic, whose results for a request do not depend on what
            else runs. By default what ``DEEPINFER_BATCH_INVARIANT`` says.
        seed: seed of the requests that bring none.
        progress: show a bar while loading.

    Raises:
        CheckpointError, TokenizerError: damaged or inconsistent files.
        ConfigError: an unsupported configuration or setting.
        PlatformError: the device is not usable.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        device: str = "cpu",
        dtype: Literal["bfloat16"] = "bfloat16",
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int | None = None,
        weights: WeightsMode | None = None,
        batch_invariant: bool | None = None,
        seed: int = 0,
        progress: bool = False,
    ) -> None:
        settings = Settings.from_env(os.environ)
        platform = get_platform(device)
        if dtype != "bfloat16":
            raise ConfigError(f"dtype {dtype!r} is not supported; use 'bfloat16'")
        self.checkpoint = Checkpoint.open(model)
        config = self.checkpoint.config
        self.max_model_len = _model_len(max_model_len, config.max_position_embeddings)
        self._seed = _integer("seed", seed, 0, 2**64 - 1)
        self._next_id = 0
        self.tokenizer = Tokenizer.load(self.checkpoint.directory, config)
        mode = settings.weights if weights is None else weights
        fixed = settings.batch_invariant if batch_invariant is None else batch_invariant
        self.weights = _weights_mode(
            mode, expanded_bytes(config), platform.available_memory_bytes()
        )
        worker = Worker(
            self.checkpoint,
            fixed_arithmetic() if fixed else free_arithmetic(),
            expanded=self.weights == "expanded",
            max_length=self.max_model_len,
            progress=progress,
        )
        batched = _DEFAULT_BATCHED_TOKENS
        if max_num_batched_tokens is not None:
            batched = _integer("max_num_batched_tokens", max_num_batched_tokens, 1, 2**31 - 1)
        self._generator = Generator(
            worker,
            config.eos_token_id,
            self.max_model_len,
            _integer("max_num_seqs", max_num_seqs, 1, 65536),
            batched,
        )

    def generate(
        self,
        prompts: Prompt | abc.Sequence[Prompt],
        sampling_params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: text, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``; one or a list.
            sampling_params: one for all, or one per prompt; defaults if not given.
            use_tqdm: show a progress bar.

        Returns:
            one output per prompt, in order.

        Raises:
            RequestError: a prompt is empty, too long, or holds an id outside the vocabulary; or
                the number of parameters differs from the number of prompts. Nothing has run then.
        """
        batch = [prompts] if isinstance(prompts, (str, dict)) else list(prompts)
        params = _params_per_prompt(sampling_params, len(batch))
        arrival = time.monotonic()
        sequences = [
            Sequence(ids, p, self._request_seed(p, index), arrival)
            for index, (ids, p) in enumerate(
                zip((self._token_ids(prompt) for prompt in batch), params, strict=True)
            )
        ]
        with tqdm(desc="generating", unit="token", disable=not use_tqdm) as bar:
            self._generator.run(sequences, lambda _: _advance(bar))
        return [self._output(_text(p), s) for p, s in zip(batch, sequences, strict=True)]

    def close(self) -> None:
        """Release the checkpoint's files; the object cannot generate any more."""
        self.checkpoint.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _token_ids(self, prompt: Prompt) -> list[int]:
        """Checked token ids of a prompt."""
        if isinstance(prompt, str):
            ids = self._encode(prompt)
        elif isinstance(prompt, dict) and prompt.keys() == {"prompt"}:
            ids = self._encode(prompt.get("prompt"))
        elif isinstance(prompt, dict) and prompt.keys() == {"prompt_token_ids"}:
            given = prompt.get("prompt_token_ids")
            ids = _checked_ids(given, self.checkpoint.config.vocab_size)
        else:
            raise RequestError(_prompt_form(prompt))
        if len(ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(ids)} tokens; at most {self.max_model_len - 1} fit into "
                f"max_model_len {self.max_model_len} with one token to generate. Shorten the "
                "prompt or raise max_model_len."
            )
        return ids

    def _encode(self, text: object) -> list[int]:
        if not isinstance(text, str):
            raise RequestError(f"the prompt's text is a {type(text).__name__}; give a str")
        if not text:
            raise RequestError(
                "the prompt is empty; give text, or {'prompt_token_ids': [bos_token_id]} to start "
                "from nothing"
            )
        return self.tokenizer.encode(text)

    def _request_seed(self, params: SamplingParams, index: int) -> int:
        """The request's own seed, or one that differs between the requests of this object."""
        if params.seed is not None:
            return params.seed
        return (self._seed * 0x9E3779B97F4A7C15 + self._next_id + index) % 2**64

    def _output(self, text: str | None, sequence: Sequence) -> RequestOutput:
        assert sequence.finish_reason is not None
        completion = CompletionOutput(
            0,
            self.tokenizer.decode(sequence.token_ids),
            sequence.token_ids,
            sequence.finish_reason,
        )
        request_id = str(self._next_id)
        self._next_id += 1
        return RequestOutput(
            request_id, text, sequence.prompt_token_ids, [completion], True, sequence.metrics()
        )


def _advance(bar: tqdm[NoReturn]) -> None:
    bar.update()


def _text(prompt: Prompt) -> str | None:
    """The text of a prompt that was given as text."""
    if isinstance(prompt, str):
        return prompt
    text = cast(Mapping[str, object], prompt).get("prompt")
    return text if isinstance(text, str) else None


def _prompt_form(prompt: object) -> str:
    return (
        f"a prompt is {str(prompt)[:80]!r}; give a str, {{'prompt': text}} or "
        "{'prompt_token_ids': ids}"
    )


def _checked_ids(ids: object, vocab_size: int) -> list[int]:
    if not isinstance(ids, abc.Sequence) or isinstance(ids, (str, bytes)):
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


def _params_per_prompt(
    given: SamplingParams | abc.Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if given is None:
        given = SamplingParams()
    params = [given] * count if isinstance(given, SamplingParams) else list(given)
    if len(params) != count:
        raise RequestError(
            f"{len(params)} sampling parameters were given for {count} prompts; give one for all "
            "or one per prompt"
        )
    for item in params:
        if not isinstance(item, SamplingParams):
            raise RequestError(
                f"a sampling parameter is a {type(item).__name__}; give SamplingParams"
            )
    return params


def _integer(name: str, value: object, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}; give an integer from {low} to {high}")
    return value


def _model_len(given: int | None, supported: int) -> int:
    if given is None:
        return min(_DEFAULT_MODEL_LEN, supported)
    if isinstance(given, int) and not isinstance(given, bool) and given > supported:
        raise ConfigError(
            f"max_model_len is {given}; the model supports at most {supported} "
            "(max_position_embeddings)"
        )
    return _integer("max_model_len", given, 2, supported)


def _weights_mode(mode: str, expanded: int, available: int) -> WeightsMode:
    if mode not in WEIGHTS_MODES:
        raise ConfigError(f"weights is {mode!r}; give one of {', '.join(WEIGHTS_MODES)}")
    if mode == "packed":
        return "packed"
    if mode == "expanded" or expanded <= _EXPAND_BELOW * available:
        return "expanded"
    return "packed"

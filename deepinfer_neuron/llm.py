"""The offline interface: load a checkpoint, generate text."""

from __future__ import annotations

import os
import threading
import time
from collections import abc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeVar

from tqdm import tqdm

from deepinfer_neuron.assets import model_or_demo
from deepinfer_neuron.checkpoint.reader import Checkpoint
from deepinfer_neuron.engine.build import Parts, build_engine
from deepinfer_neuron.engine.choices import arithmetic_of, weights_mode
from deepinfer_neuron.engine.config import BucketOptions, EngineOptions, check_integer
from deepinfer_neuron.engine.core import EngineCore, NewRequest, Tracked
from deepinfer_neuron.engine.inputs import (
    EncodedPrompt,
    Prompt,
    encode_prompt,
    params_per_prompt,
)
from deepinfer_neuron.engine.outputs import (
    CompletionOutput,
    EngineStats,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from deepinfer_neuron.errors import ConfigError, RequestError
from deepinfer_neuron.platform import get_platform
from deepinfer_neuron.runner.worker import expanded_bytes
from deepinfer_neuron.sampling.params import SamplingParams
from deepinfer_neuron.sampling.state import completion_seed
from deepinfer_neuron.settings import Settings, WeightsMode
from deepinfer_neuron.text.chat import ChatFormat, ParsedMessage, RenderedChat
from deepinfer_neuron.text.tokenizer import Tokenizer

__all__ = [
    "LLM",
    "ChatOptions",
    "ChatOutput",
    "CompletionDelta",
    "CompletionOutput",
    "EngineStats",
    "FinishReason",
    "Prompt",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "TokenLogprobs",
]

_T = TypeVar("_T")


@dataclass(frozen=True)
class CompletionDelta:
    """What one step added to a streamed completion."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    """``None`` while more will come."""
    stop_reason: int | str | None


Messages = Sequence[Mapping[str, object]]
"""One conversation: OpenAI messages."""


@dataclass(frozen=True)
class ChatOptions:
    """How conversations are put to the model.

    Attributes:
        tools: OpenAI function tools.
        tool_choice: ``"auto"`` (also ``None``), ``"none"``, ``"required"`` or a named function.
        thinking: whether the model reasons before it answers.
        reasoning_effort: ``"low"``, ``"high"`` (also ``None``), ``"xhigh"``, ``"max"``.
        response_format: tells the model the form of its answer; a structured output forces it.
        continue_final_message: continue the last message instead of answering it.
    """

    tools: Sequence[Mapping[str, object]] | None = None
    tool_choice: str | Mapping[str, object] | None = None
    thinking: bool = True
    reasoning_effort: str | None = None
    response_format: Mapping[str, object] | None = None
    continue_final_message: bool = False

    def render(self, form: ChatFormat, messages: Messages) -> RenderedChat:
        """The prompt of a conversation."""
        return form.render(
            messages,
            tools=self.tools,
            tool_choice=self.tool_choice,
            thinking=self.thinking,
            reasoning_effort=self.reasoning_effort,
            response_format=self.response_format,
            continue_final_message=self.continue_final_message,
        )


@dataclass(frozen=True)
class ChatOutput:
    """The answer to a conversation."""

    request: RequestOutput
    """Tokens, raw text and times; ``prompt`` is the rendered conversation."""
    messages: list[ParsedMessage]
    """Content, reasoning and tool calls of each completion."""


@dataclass(frozen=True)
class _Job:
    """A prompt on its way, with its completions."""

    prompt: EncodedPrompt
    request_id: str
    completions: list[Tracked]

    def output(self) -> RequestOutput:
        first = self.completions[0]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            outputs=[tracked.completion.output() for tracked in self.completions],
            finished=all(tracked.finished for tracked in self.completions),
            metrics=first.metrics(),
            prompt_logprobs=first.prompt_logprobs(),
        )


class LLM:
    """A loaded model.

    Calls may come from several threads; their requests share the batch. ``engine`` is the part
    below: whoever steps it by hand must be the only one to use the object.

    Args:
        model: checkpoint directory; the small demo model of the package when not given.
        tokenizer: directory of the tokenizer files, if not the checkpoint's.
        device: ``"cpu"`` or ``"neuron"``.
        dtype: ``"bfloat16"``, the only activation format the checkpoints are made for.
        max_model_len: most tokens of a sequence, prompt included; by default 4096 or what the
            model supports, whichever is less.
        max_num_seqs: most sequences that hold memory at once; by default 32, or
            ``max_num_batched_tokens`` if that is less.
        max_num_batched_tokens: most rows of one step; by default 512, or what ``max_num_seqs``
            whole blocks of drafts take, whichever is more.
        num_blocks: blocks of 128 tokens in the paged caches, one of them reserved; by default
            what ``max_num_seqs`` sequences can need, within a quarter of the available memory.
        nextn: drafts per request and step, up to 7; 0 switches drafts off. By default what
            ``DEEPINFER_USE_NEXTN_DECODE`` says, else the block length of the checkpoint's drafts.
            Greedy results do not depend on it, sampled ones keep their distribution.
        enable_prefix_caching: let prompts continue from known prefixes. Changes no result.
        prefill_attempt_interval: while requests are running, only every so many steps carry
            prompt rows; 1 by default, or what ``DEEPINFER_PREFILL_ATTEMPT_INTERVAL`` says.
        asynchronous: plan a step while the one before runs. Changes no result. On by default, or
            what ``DEEPINFER_ZERO_OVERHEAD_SCHEDULING`` says.
        weights: ``"packed"`` keeps quantized weights memory-mapped as stored, ``"expanded"``
            decodes them to bf16 once, ``"auto"`` expands when they fit into half of the available
            memory; on Neuron it expands what shortens a decode step within the memory left. By
            default what ``DEEPINFER_NEURON_WEIGHTS`` says.
        batch_invariant: fixed-order arithmetic, whose results for a request do not depend on what
            else runs. By default what ``DEEPINFER_BATCH_INVARIANT`` says.
        compile: ``"regions"`` compiles every part of the network once per shape, ``"off"`` runs it
            operator by operator. By default ``"off"`` on the CPU and ``"regions"`` on Neuron.
        simulate: with device ``"neuron"``, the simulated device instead of a chip. Also switched on
            by ``DEEPINFER_NEURON_SIMULATE``.
        buckets: sizes that graphs are compiled for.
        seed: seed of the requests that bring none.
        progress: show a bar while loading.

    Raises:
        CheckpointError, TokenizerError: damaged or inconsistent files.
        ConfigError: an unsupported configuration or setting.
        PlatformError: the device is not usable.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        tokenizer: str | Path | None = None,
        device: str = "cpu",
        dtype: Literal["bfloat16"] = "bfloat16",
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        num_blocks: int | None = None,
        nextn: int | None = None,
        enable_prefix_caching: bool = True,
        prefill_attempt_interval: int | None = None,
        asynchronous: bool | None = None,
        weights: WeightsMode | None = None,
        batch_invariant: bool | None = None,
        compile: Literal["off", "regions"] | None = None,
        simulate: bool | None = None,
        buckets: BucketOptions | None = None,
        seed: int = 0,
        progress: bool = False,
    ) -> None:
        self.settings = settings = Settings.from_env(os.environ)
        simulated = _given(simulate, settings.simulate)
        self.platform = platform = get_platform(device, compile=compile, simulate=simulated)
        if dtype != "bfloat16":
            raise ConfigError(f"dtype {dtype!r} is not supported; use 'bfloat16'")
        self._seed = check_integer("seed", seed, 0, 2**64 - 1)
        self.checkpoint = Checkpoint.open(model_or_demo(model))
        config = self.checkpoint.config
        self.tokenizer = Tokenizer.load(tokenizer or self.checkpoint.directory, config)
        memory = platform.available_memory_bytes()
        if nextn is None and config.draft is not None:
            nextn = settings.nextn
        size = expanded_bytes(config, drafts=nextn != 0)
        mode = weights or settings.weights
        self.weights = weights_mode(mode, size, memory, planned=platform.name == "neuron")
        self.config = EngineOptions(
            max_model_len,
            max_num_seqs,
            max_num_batched_tokens,
            num_blocks,
            enable_prefix_caching,
            _given(prefill_attempt_interval, settings.prefill_attempt_interval),
            _given(asynchronous, settings.zero_overhead_scheduling),
            nextn,
            buckets or BucketOptions(),
        ).resolve(config, memory)
        fixed = _given(batch_invariant, settings.batch_invariant)
        parts = Parts(
            self.checkpoint, self.tokenizer, settings, arithmetic_of(platform, fixed),
            None if self.weights == "auto" else self.weights == "expanded", platform, progress,
        )  # fmt: skip
        self.engine: EngineCore = build_engine(parts, self.config)
        self._lock = threading.Lock()
        self._closed = False
        self._next_id = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: text, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``; one or a list.
            sampling_params: one for all, or one per prompt; defaults if not given.
            use_tqdm: show a progress bar.

        Returns:
            one output per prompt, in order. A request that failed on its own, such as one with a
            wrong grammar, has finish reason ``"error"`` and the cause as its stop reason.

        Raises:
            RequestError: a prompt is empty, too long, or holds an id outside the vocabulary; or
                the number of parameters differs from the number of prompts. Nothing has run then.
        """
        batch = _as_list(prompts)
        params = params_per_prompt(sampling_params, len(batch))
        encoded = [self._encode(prompt) for prompt in batch]
        jobs = self._submit(encoded, params)
        tracked = [item for job in jobs for item in job.completions]
        with (
            self._aborting(tracked),
            tqdm(desc="generating", unit="token", disable=not use_tqdm) as bar,
        ):
            produced = 0
            while not all(item.finished for item in tracked):
                self._step()
                count = sum(len(item.request.token_ids) for item in tracked)
                bar.update(count - produced)
                produced = count
        return [job.output() for job in jobs]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[CompletionDelta]:
        """Complete a prompt piece by piece.

        The request starts with the first delta and ends when the iterator is closed.

        Args:
            prompt: as for :meth:`generate`.
            sampling_params: its parameters.

        Yields:
            what each step added; the last delta of a completion has a finish reason.

        Raises:
            RequestError: as :meth:`generate` does, before anything is yielded.
        """
        params = params_per_prompt(sampling_params, 1)
        return self._deltas(self._encode(prompt), params)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        options: ChatOptions | None = None,
    ) -> list[ChatOutput]:
        """Answer conversations.

        Args:
            messages: OpenAI messages of one conversation, or a list of conversations.
            sampling_params: as for :meth:`generate`.
            use_tqdm: show a progress bar.
            options: tools, thinking and the like, for all conversations.

        Returns:
            one output per conversation, each with a parsed message per completion.

        Raises:
            RequestError: messages or options that the model's chat form cannot hold; otherwise
                as :meth:`generate`.
        """
        format_ = ChatFormat(self.tokenizer)
        wanted = options or ChatOptions()
        rendered = [wanted.render(format_, chat) for chat in _conversations(messages)]
        prompts: list[Prompt] = [{"prompt_token_ids": list(chat.token_ids)} for chat in rendered]
        outputs = self.generate(prompts, sampling_params, use_tqdm)
        return [
            ChatOutput(
                replace(output, prompt=chat.text),
                [format_.parse(completion.text, chat.start) for completion in output.outputs],
            )
            for output, chat in zip(outputs, rendered, strict=True)
        ]

    def stats(self) -> EngineStats:
        """Counters since loading, and present load."""
        with self._lock:
            return self.engine.stats()

    def close(self) -> None:
        """Stop the engine and release the checkpoint's files."""
        with self._lock:
            self._closed = True
            self.engine.close()
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

    def _encode(self, prompt: object) -> EncodedPrompt:
        encoded = encode_prompt(prompt, self.tokenizer, self.checkpoint.config.vocab_size)
        if len(encoded.token_ids) >= self.config.max_model_len:
            raise RequestError(
                f"the prompt has {len(encoded.token_ids)} tokens; at most "
                f"{self.config.max_model_len - 1} fit into max_model_len "
                f"{self.config.max_model_len} with one token to generate. Shorten the prompt or "
                "raise max_model_len."
            )
        return encoded

    def _submit(
        self, prompts: Sequence[EncodedPrompt], params: Sequence[SamplingParams]
    ) -> list[_Job]:
        """Give prompts to the engine, each with as many requests as it wants completions."""
        arrival = time.monotonic()
        jobs = []
        for wanted in params:
            wanted.check_vocabulary(self.checkpoint.config.vocab_size)
        with self._lock:
            if self._closed:
                raise RequestError("this LLM is closed; load the model again")
            for prompt, wanted in zip(prompts, params, strict=True):
                number = self._next_id
                self._next_id += 1
                seed = wanted.seed
                if seed is None:
                    seed = (self._seed * 0x9E3779B97F4A7C15 + number) % 2**64
                completions = [
                    self.engine.add(
                        NewRequest(
                            request_id=f"{number}-{index}",
                            prompt_token_ids=prompt.token_ids,
                            params=_completion_params(wanted, index),
                            seed=completion_seed(seed, index),
                            index=index,
                            arrival_time=arrival,
                        )
                    )
                    for index in range(wanted.n)
                ]
                jobs.append(_Job(prompt, str(number), completions))
        return jobs

    def _step(self) -> None:
        with self._lock:
            if self.engine.has_unfinished:
                self.engine.step()

    def _aborting(self, tracked: Sequence[Tracked]) -> _AbortOnExit:
        return _AbortOnExit(self.engine, self._lock, tracked)

    def _deltas(
        self, prompt: EncodedPrompt, params: list[SamplingParams]
    ) -> Iterator[CompletionDelta]:
        """Deltas of a prompt; it is submitted when the first one is asked for."""
        tracked = self._submit([prompt], params)[0].completions
        sent = [(0, 0)] * len(tracked)
        open_ends = set(range(len(tracked)))
        with self._aborting(tracked):
            while open_ends:
                self._step()
                for place in sorted(open_ends):
                    completion = tracked[place].completion
                    characters, tokens = sent[place]
                    text, ids = completion.text[characters:], completion.token_ids[tokens:]
                    finished = tracked[place].finished
                    if not finished and not ids:
                        continue
                    sent[place] = (len(completion.text), len(completion.token_ids))
                    if finished:
                        open_ends.discard(place)
                    yield CompletionDelta(
                        completion.index,
                        text,
                        ids,
                        completion.finish_reason if finished else None,
                        completion.stop_reason if finished else None,
                    )


class _AbortOnExit:
    """Ends whatever is still running of a call when it leaves, on every path."""

    def __init__(self, core: EngineCore, lock: threading.Lock, tracked: Sequence[Tracked]) -> None:
        self._core, self._lock, self._tracked = core, lock, tracked

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            for item in self._tracked:
                if not item.finished:
                    self._core.abort(item.request.request_id)


def _completion_params(params: SamplingParams, index: int) -> SamplingParams:
    """Only the first completion of a prompt scores it."""
    if index == 0 or params.prompt_logprobs is None:
        return params
    return replace(params, prompt_logprobs=None)


def _as_list(prompts: object) -> list[object]:
    if isinstance(prompts, str | abc.Mapping):
        return [prompts]
    if not isinstance(prompts, abc.Sequence):
        raise RequestError(f"prompts is a {type(prompts).__name__}; give a prompt or a list")
    return list(prompts)


def _conversations(messages: object) -> list[Messages]:
    """One conversation or a list of them, as a list."""
    if not isinstance(messages, abc.Sequence) or isinstance(messages, str | bytes):
        raise RequestError(
            f"messages is a {type(messages).__name__}; give a list of messages, or a list of such "
            "lists"
        )
    if messages and all(isinstance(item, abc.Mapping) for item in messages):
        return [messages]
    return list(messages)


def _given(value: _T | None, default: _T) -> _T:
    return default if value is None else value

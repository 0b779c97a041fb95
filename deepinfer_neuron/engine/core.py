"""The engine: requests in, tokens out, one step at a time.

In asynchronous mode a step is planned and queued while the one before it still runs, and its
results are processed while the next one runs. What the plan cannot know (the token of the step in
flight, whether a request ends with it) is settled when the step runs, or afterwards: a row of a
request that turned out to be finished is thrown away. Tokens and log-probabilities are those of
the synchronous mode.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from deepinfer_neuron.engine.completion import Completion, token_logprobs
from deepinfer_neuron.engine.outputs import (
    DecodeCounts,
    DeviceStats,
    EngineStats,
    FinishReason,
    RequestMetrics,
    TokenLogprobs,
)
from deepinfer_neuron.engine.request import Request, State
from deepinfer_neuron.engine.scheduler import Scheduled, Scheduler
from deepinfer_neuron.errors import RequestError
from deepinfer_neuron.runner.executor import Executor, Progress, StepResult
from deepinfer_neuron.runner.sequence import SequenceData
from deepinfer_neuron.sampling.drafts import survival
from deepinfer_neuron.sampling.grammar import GrammarCompiler, GrammarMatcher, PendingGrammar
from deepinfer_neuron.sampling.params import SamplingParams
from deepinfer_neuron.sampling.state import SamplingState
from deepinfer_neuron.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_GRAMMAR_POLL_SECONDS = 0.001


@dataclass(frozen=True)
class _Inflight:
    scheduled: Scheduled
    future: Future[StepResult]


@dataclass
class _StepTimes:
    """Seconds spent in steps, in total and by part."""

    step: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    draft: float = 0.0

    def add(self, result: StepResult) -> None:
        self.step += result.seconds
        self.forward += result.forward_seconds
        self.sample += result.sample_seconds
        self.draft += result.draft_seconds


@dataclass(frozen=True)
class NewRequest:
    """What a caller gives for one completion."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    index: int = 0
    """Which completion of its prompt."""
    arrival_time: float | None = None


@dataclass
class Tracked:
    """A request with its completion and, until it is ready, its grammar."""

    request: Request
    completion: Completion
    seed: int
    grammar: PendingGrammar | None = None

    @property
    def finished(self) -> bool:
        """Whether it has its last token, or never will."""
        return self.request.state is State.FINISHED

    def metrics(self) -> RequestMetrics:
        """Times so far."""
        request = self.request
        return RequestMetrics(
            request.arrival_time,
            request.first_token_time,
            request.finish_time if request.finish_time is not None else time.monotonic(),
            len(request.token_ids),
            request.hit_tokens,
            request.preemptions,
            request.decode.copy(),
        )

    def prompt_logprobs(self) -> list[TokenLogprobs] | None:
        """Scores of the prompt, where asked for and finished."""
        if self.request.params.prompt_logprobs is None:
            return None
        return [token_logprobs(item) for item in self.request.data.prompt_results]


class EngineCore:
    """Runs requests through scheduler and executor.

    Not thread-safe: callers serialize their calls.

    Args:
        executor: runs steps.
        scheduler: plans them.
        tokenizer: decodes tokens.
        grammars: compiles grammars.
        eos_token_id: ends a completion.
        max_model_len: most tokens of a sequence.
        asynchronous: plan a step while the one before runs.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        grammars: GrammarCompiler,
        *,
        eos_token_id: int,
        max_model_len: int,
        asynchronous: bool,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._eos = eos_token_id
        self._max_model_len = max_model_len
        self._asynchronous = asynchronous
        # Steps run in a thread in both modes: an interrupt then hits the wait, never a step.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="deepinfer-step")
        self._tracked: dict[str, Tracked] = {}
        self._compiling: list[Tracked] = []
        self._inflight: deque[_Inflight] = deque()
        self._finished: Counter[FinishReason] = Counter()
        self._schedule_seconds = 0.0
        self._times = _StepTimes()
        self._decode = DecodeCounts()
        self._decode_rows = 0

    def add(self, new: NewRequest) -> Tracked:
        """Take a request.

        Raises:
            RequestError: its id is in use, or its prompt leaves no room for a token.
        """
        if new.request_id in self._tracked:
            raise RequestError(
                f"request id {new.request_id!r} is in use; give every running request its own id"
            )
        prompt, params = new.prompt_token_ids, new.params
        if len(prompt) >= self._max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens; at most {self._max_model_len - 1} fit into "
                f"max_model_len {self._max_model_len} with one token to generate. Shorten the "
                "prompt or raise max_model_len."
            )
        max_length = min(self._max_model_len, len(prompt) + params.max_tokens)
        tracked = Tracked(
            Request(
                request_id=new.request_id,
                prompt_token_ids=prompt,
                params=params,
                data=self._data(new, max_length),
                arrival_time=time.monotonic() if new.arrival_time is None else new.arrival_time,
                max_length=max_length,
            ),
            Completion(new.index, params, self._tokenizer, self._eos),
            new.seed,
        )
        self._tracked[new.request_id] = tracked
        if params.structured_output is None:
            self.scheduler.add(tracked.request)
        else:
            tracked.request.state = State.COMPILING
            tracked.grammar = self._grammars.submit(params.structured_output)
            self._compiling.append(tracked)
        return tracked

    def abort(self, request_id: str) -> bool:
        """End a request now; ``False`` if it is unknown or finished already."""
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return False
        tracked.completion.abort()
        self._end(tracked)
        return True

    @property
    def has_unfinished(self) -> bool:
        """Whether some request is not finished, or a step is still in flight."""
        return bool(self._tracked) or bool(self._inflight)

    def step(self) -> list[Tracked]:
        """Plan and run a step; in asynchronous mode, plan one and finish the one before.

        Returns:
            the requests that got a token or ended, finished ones included.
        """
        changed = self._poll_grammars()
        started = time.monotonic()
        scheduled = self.scheduler.schedule()
        self._schedule_seconds += time.monotonic() - started
        if scheduled is not None:
            future = self._thread.submit(self.executor.run, scheduled.plan)
            self._inflight.append(_Inflight(scheduled, future))
        elif not self._inflight and self._compiling:
            time.sleep(_GRAMMAR_POLL_SECONDS)
        allowed = 1 if self._asynchronous and scheduled is not None else 0
        while len(self._inflight) > allowed:
            changed += self._settle()
        return changed

    def close(self) -> None:
        """Wait for the step in flight and stop the thread."""
        self._thread.shutdown(wait=True)

    def stats(self) -> EngineStats:
        """Counters and present load."""
        scheduler = self.scheduler
        usage, counters = scheduler.blocks.usage(), scheduler.counters
        slots = scheduler.config.max_num_seqs
        used = len(scheduler.running) + len(scheduler.prefilling)
        rate = counters.prefix_hits / counters.prefix_queries if counters.prefix_queries else 0.0
        return EngineStats(
            running=used,
            waiting=len(scheduler.waiting) + len(self._compiling),
            steps=counters.steps,
            prefill_tokens=counters.prefill_tokens,
            decode_tokens=self._decode.steps + sum(self._decode.accepted),
            finished={str(reason): count for reason, count in self._finished.items()},
            preemptions=counters.preemptions,
            blocks_total=usage.total,
            blocks_used=usage.used,
            blocks_cached=usage.cached,
            slots_total=slots,
            slots_used=used,
            prefix_hit_rate=rate,
            schedule_seconds=self._schedule_seconds,
            step_seconds=self._times.step,
            forward_seconds=self._times.forward,
            sample_seconds=self._times.sample,
            draft_seconds=self._times.draft,
            decode_rows=self._decode_rows,
            decode=self._decode.copy(),
            device=self._device_stats(),
        )

    def _device_stats(self) -> DeviceStats | None:
        work = self.executor.device_work()
        if work is None:
            return None
        return DeviceStats(
            work.graphs, work.late_graphs, work.launches, work.passes, work.uploads, work.downloads
        )

    def _data(self, new: NewRequest, max_length: int) -> SequenceData:
        compressed = self.executor.worker.compress(new.prompt_token_ids)
        state = self._state(new.prompt_token_ids, new.params, new.seed, None)
        return SequenceData(new.prompt_token_ids, compressed, new.params, state, max_length)

    def _state(
        self,
        prompt: list[int],
        params: SamplingParams,
        seed: int,
        matcher: GrammarMatcher | None,
    ) -> SamplingState:
        vocabulary = self.executor.worker.config.vocab_size
        return SamplingState(params, seed, prompt, self._eos, vocabulary, matcher)

    def _poll_grammars(self) -> list[Tracked]:
        """Queue the requests whose grammar is ready; end those whose grammar is wrong."""
        changed = []
        for tracked in list(self._compiling):
            grammar, request = tracked.grammar, tracked.request
            status = grammar.poll() if grammar is not None else "ready"
            if status == "pending":
                continue
            if grammar is not None and status == "ready":
                self._compiling.remove(tracked)
                request.data.state = self._state(
                    request.prompt_token_ids, request.params, tracked.seed, grammar.matcher()
                )
                self.scheduler.add(request)
            elif grammar is not None:
                tracked.completion.fail(grammar.error)
                self._end(tracked)
                changed.append(tracked)
        return changed

    def _settle(self) -> list[Tracked]:
        """Wait for the oldest step in flight and apply it."""
        inflight = self._inflight[0]
        try:
            result = inflight.future.result()
        except KeyboardInterrupt:
            wait((inflight.future,))
            self._settle()
            raise
        except Exception as error:
            self._inflight.popleft()
            _log.exception("a step failed")
            return self._fail(inflight.scheduled, error)
        self._inflight.popleft()
        return self._process(inflight.scheduled, result)

    def _fail(self, scheduled: Scheduled, error: Exception) -> list[Tracked]:
        """End the requests of a step that broke; the others go on."""
        changed = []
        for request in scheduled.requests:
            if request.state is not State.FINISHED:
                tracked = self._tracked[request.request_id]
                tracked.completion.fail(f"the step failed: {type(error).__name__}: {error}")
                self._end(tracked)
                changed.append(tracked)
        return changed

    def _process(self, scheduled: Scheduled, result: StepResult) -> list[Tracked]:
        """Apply a step's results to its requests."""
        self._times.add(result)
        if self.scheduler.budget is not None:
            self.scheduler.budget.observe(result, len(scheduled.requests))
        changed: list[Tracked] = []
        now = time.monotonic()
        entries = zip(scheduled.requests, result.progress, scheduled.plan.samples, strict=True)
        for request, progress, samples in entries:
            if samples:
                request.inflight.popleft()
            if request.state is State.FINISHED:
                continue
            tracked = self._tracked[request.request_id]
            known = len(request.token_ids)
            self._append(tracked, progress, now)
            if known and len(request.token_ids) > known:
                ended = tracked.completion.finish_reason is not None
                self._count(request, progress, len(request.token_ids) - known, ended)
            if request.slot and progress.cached:
                self.scheduler.commit(request, min(progress.cached, request.known))
            if tracked.completion.finish_reason is not None:
                self._end(tracked)
            if progress.tokens:
                changed.append(tracked)
        return changed

    def _append(self, tracked: Tracked, progress: Progress, now: float) -> None:
        """Give a request its new tokens, up to the one it ends with."""
        request, completion = tracked.request, tracked.completion
        limit = request.max_length - len(request.prompt_token_ids)
        for token in progress.tokens:
            if token.failed is None:
                request.token_ids.append(token.token_id)
                if request.first_token_time is None:
                    request.first_token_time = now
            completion.push(token, limit)
            if completion.finish_reason is not None:
                return
        if progress.tokens:
            request.drafts = len(progress.next_confidences)
            request.survivals.append(survival(progress.next_confidences))

    def _count(self, request: Request, progress: Progress, kept: int, ended: bool) -> None:
        """Count a decode step that gave a request ``kept`` tokens, perhaps its last ones."""
        self._decode_rows += 1 + progress.verified
        for counts in (request.decode, self._decode):
            counts.add(min(progress.accepted, kept - 1), progress.confidences, cut=ended)

    def _end(self, tracked: Tracked) -> None:
        """Give back everything a finished request holds."""
        request = tracked.request
        if request.state is State.COMPILING:
            self._compiling.remove(tracked)
        self.scheduler.finish(request)
        request.finish_reason = tracked.completion.finish_reason
        request.finish_time = time.monotonic()
        if request.finish_reason is not None:
            self._finished[request.finish_reason] += 1
        del self._tracked[request.request_id]

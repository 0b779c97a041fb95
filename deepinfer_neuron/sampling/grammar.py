"""Grammars: compiled in the background, followed token by token.

A compilation cannot be stopped from outside. One that takes too long is given up: its requests
fail, its thread is left to end by itself, and another thread takes its place while there are not
too many such strays. Compiling releases the interpreter, so steps go on meanwhile.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from deepinfer_neuron.errors import PlatformError
from deepinfer_neuron.sampling.structured import StructuredOutput
from deepinfer_neuron.settings import Settings
from deepinfer_neuron.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import xgrammar

ROLLBACK_TOKENS = 9
"""Tokens that a matcher can take back: a block of drafts and two more."""

SLOWEST_MASK_SECONDS = 0.5
"""A grammar whose mask takes longer would hold up every request of a step."""

COST_SECONDS = 2.0
COST_SECONDS_PER_TOKEN = 0.02
"""Processor time that following one sequence may take: once, and for each call."""

_MOST_STRAYS = 4

_SOURCE = re.compile(r"^\[[^]]*\] \S+:\d+: ")
"""Time and source line in front of the library's messages."""

_Key = tuple[str, str]


class PendingGrammar:
    """A grammar on its way.

    Args:
        spec: what to compile.
        deadline: on the monotonic clock; later the grammar counts as failed.
    """

    def __init__(self, spec: StructuredOutput, deadline: float) -> None:
        self.spec = spec
        self.error = ""
        self._deadline = deadline
        self._compiled: xgrammar.CompiledGrammar | None = None

    def poll(self) -> Literal["pending", "ready", "failed"]:
        """Where it stands; a failure's cause is in ``error``."""
        if self.error:
            return "failed"
        if self._compiled is not None:
            return "ready"
        if time.monotonic() > self._deadline:
            self.error = (
                "the grammar did not compile in time; simplify it or raise "
                "DEEPINFER_XGRAMMAR_TIMEOUT"
            )
            return "failed"
        return "pending"

    def matcher(self) -> GrammarMatcher:
        """A fresh matcher for one sequence; the grammar must be ready."""
        if self._compiled is None:
            raise RuntimeError("the grammar is not ready")
        return GrammarMatcher(self._compiled, self.spec)

    def resolve(self, compiled: xgrammar.CompiledGrammar) -> None:
        """Set the result."""
        self._compiled = compiled

    def fail(self, error: str) -> None:
        """Set the cause of a failure."""
        self.error = error


class GrammarCompiler:
    """Compiles grammars for one tokenizer and keeps the results, least recently used out first.

    Args:
        tokenizer: of the model.
        vocab_size: width of the model's logits; ids behind the tokenizer's are never allowed.
        settings: time-out, threads, and bounds of the cache.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, settings: Settings) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._settings = settings
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[PendingGrammar] = queue.SimpleQueue()
        self._threads = 0
        self._busy_since: dict[int, float] = {}
        self._cache: OrderedDict[_Key, xgrammar.CompiledGrammar] = OrderedDict()
        self._waiting: dict[_Key, list[PendingGrammar]] = {}
        self._compiler: xgrammar.GrammarCompiler | None = None

    def submit(self, spec: StructuredOutput) -> PendingGrammar:
        """Start compiling; the same grammar submitted twice is compiled once."""
        pending = PendingGrammar(spec, time.monotonic() + self._settings.xgrammar_timeout)
        key = (spec.kind, spec.text)
        with self._lock:
            cached = self._cache.get(key)
            if cached is not None:
                self._cache.move_to_end(key)
                pending.resolve(cached)
                return pending
            if key in self._waiting:
                self._waiting[key].append(pending)
                return pending
            if not self._make_room_for_a_thread():
                pending.fail("too many grammars are still being compiled; try again later")
                return pending
            self._waiting[key] = [pending]
        self._jobs.put(pending)
        return pending

    def _make_room_for_a_thread(self) -> bool:
        """Start a thread unless enough are working; ``False`` if the strays are too many."""
        limit = self._settings.xgrammar_timeout
        now = time.monotonic()
        strays = sum(now - since > limit for since in self._busy_since.values())
        if strays > _MOST_STRAYS:
            return False
        if self._threads - strays < self._settings.so_builder_cpus:
            self._threads += 1
            threading.Thread(target=self._work, daemon=True, name="deepinfer-grammar").start()
        return True

    def _work(self) -> None:
        me = threading.get_ident()
        while True:
            job = self._jobs.get()
            key = (job.spec.kind, job.spec.text)
            with self._lock:
                self._busy_since[me] = time.monotonic()
            compiled, error = self._compile(job.spec)
            with self._lock:
                del self._busy_since[me]
                waiting = self._waiting.pop(key, [])
                if compiled is not None:
                    self._keep(key, compiled)
            for pending in waiting:
                if compiled is not None:
                    pending.resolve(compiled)
                else:
                    pending.fail(error)

    def _keep(self, key: _Key, compiled: xgrammar.CompiledGrammar) -> None:
        if self._settings.xgrammar_disable_cache:
            return
        self._cache[key] = compiled
        limit = self._settings.xgrammar_cache_limit_bytes
        total = sum(int(item.memory_size_bytes) for item in self._cache.values())
        while self._cache and total > limit:
            _, old = self._cache.popitem(last=False)
            total -= int(old.memory_size_bytes)

    def _compile(self, spec: StructuredOutput) -> tuple[xgrammar.CompiledGrammar | None, str]:
        """The compiled grammar, or the reason why there is none."""
        try:
            compiler = self._library_compiler()
            if spec.kind == "regex":
                compiled = compiler.compile_regex(spec.text)
            elif spec.kind == "json_schema":
                compiled = compiler.compile_json_schema(spec.text, strict_mode=True)
            elif spec.kind == "json_object":
                compiled = compiler.compile_builtin_json_grammar()
            elif spec.kind == "structural_tag":
                compiled = compiler.compile_structural_tag(spec.text)
            else:
                compiled = compiler.compile_grammar(spec.text)
            started = time.monotonic()
            matcher = GrammarMatcher(compiled, StructuredOutput(json_object=True))
            mask = torch.zeros(-(-self._vocab_size // 32), dtype=torch.int32)
            matcher.fill_bitmask(mask)
            if not bool(mask.any()):
                return None, f"{spec.kind} was refused: no output can follow it"
            if time.monotonic() - started > SLOWEST_MASK_SECONDS:
                return None, "the grammar is too costly to follow; simplify it"
        except Exception as error:
            reason = _SOURCE.sub("", " ".join(str(error).split()))
            return None, f"{spec.kind} was refused: {reason}"
        return compiled, ""

    def _library_compiler(self) -> xgrammar.GrammarCompiler:
        with self._lock:
            if self._compiler is not None:
                return self._compiler
        try:
            import xgrammar
        except ImportError as error:
            raise PlatformError(
                "structured outputs need the package xgrammar; install deepinfer-neuron[structured]"
            ) from error
        info = xgrammar.TokenizerInfo(
            [self._token_bytes(token) for token in range(self._vocab_size)],
            xgrammar.VocabType.RAW,
            vocab_size=self._vocab_size,
            stop_token_ids=[self._tokenizer.eos_token_id],
        )
        compiler = xgrammar.GrammarCompiler(info, max_threads=2, cache_enabled=False)
        with self._lock:
            self._compiler = compiler
        return compiler

    def _token_bytes(self, token: int) -> bytes:
        """What a token adds to the output; empty for those that no grammar may use."""
        outside = token >= self._tokenizer.vocab_size
        if outside or self._tokenizer.is_special(token):
            return b""
        return self._tokenizer.token_bytes(token)


class GrammarMatcher:
    """Follows one sequence.

    Args:
        compiled: the grammar.
        spec: trigger and bound tokens.
    """

    def __init__(self, compiled: xgrammar.CompiledGrammar, spec: StructuredOutput) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._trigger = spec.trigger_token_ids
        self._bound = spec.bound_token_id
        self._failure = _failure_table(self._trigger)
        self._progress = [0]
        """Matched trigger tokens after each accepted token, newest last."""
        self._after_bound = -1
        self._after_end = -1
        self._budget = COST_SECONDS

    def constrained(self) -> bool:
        """Whether the next token is restricted."""
        return self._after_bound >= 0 or self._progress[-1] == len(self._trigger)

    def finished(self) -> bool:
        """Whether the grammar has accepted the end-of-sequence token."""
        return self._after_end >= 0

    def accept(self, token: int) -> bool:
        """Advance by a token; ``False`` (and no change) if the grammar refuses it."""
        progress = self._progress[-1]
        if progress < len(self._trigger):
            if self._after_bound >= 0 and token != self._trigger[progress]:
                return False
            self._push(self._step(progress, token))
            if self._after_bound >= 0:
                self._after_bound += 1
            elif token == self._bound:
                self._after_bound = 0
            return True
        if self.finished():
            self._after_end += 1
        elif not self._charge(lambda: self._matcher.accept_token(token)):
            return False
        else:
            if self._matcher.is_terminated():
                self._after_end = 0
        self._push(progress)
        if self._after_bound >= 0:
            self._after_bound += 1
        return True

    def fill_bitmask(self, bitmask: Tensor) -> None:
        """Write the allowed tokens into int32 ``[words]``: bit ``j % 32`` of word ``j // 32``."""
        progress = self._progress[-1]
        if progress < len(self._trigger):
            bitmask.zero_()
            token = self._trigger[progress]
            bit = 1 << (token % 32)
            bitmask[token // 32] = bit if bit < 1 << 31 else bit - (1 << 32)
        elif self.finished():
            bitmask.fill_(-1)
        else:
            words = np.asarray(bitmask).reshape(1, -1)
            self._charge(lambda: self._matcher.fill_next_token_bitmask(words, 0))

    def rollback(self, count: int) -> None:
        """Take back the last ``count`` accepted tokens, at most :data:`ROLLBACK_TOKENS`."""
        if count > len(self._progress) - 1:
            raise ValueError(f"cannot take back {count} tokens, only {len(self._progress) - 1}")
        for _ in range(count):
            if self._progress[-1] == len(self._trigger) == self._progress[-2]:
                self._take_back_one()
            self._progress.pop()
            self._after_bound = max(self._after_bound - 1, -1)

    def _charge(self, work: Callable[[], bool]) -> bool:
        """Do a piece of the library's work on this sequence's budget."""
        started = time.thread_time()
        result = work()
        self._budget += COST_SECONDS_PER_TOKEN - (time.thread_time() - started)
        if self._budget < 0:
            raise RuntimeError("it is too costly to follow; simplify it")
        return result

    def _take_back_one(self) -> None:
        if self._after_end > 0:
            self._after_end -= 1
            return
        self._after_end = -1
        self._matcher.rollback(1)

    def _push(self, progress: int) -> None:
        self._progress.append(progress)
        if len(self._progress) > ROLLBACK_TOKENS + 1:
            del self._progress[0]

    def _step(self, progress: int, token: int) -> int:
        """Progress in the trigger after one more token, overlapping prefixes included."""
        while progress and self._trigger[progress] != token:
            progress = self._failure[progress - 1]
        return progress + (self._trigger[progress] == token)


def _failure_table(pattern: tuple[int, ...]) -> list[int]:
    """Length of the longest proper prefix that is also a suffix, for every prefix."""
    table = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = table[length - 1]
        length += pattern[index] == pattern[length]
        table[index] = length
    return table

"""Decides what the next step runs.

Every running request gets its row first; what is left of the token budget goes to prompts, so a
long prompt slows running requests by at most one budget of rows per step and never stops them. A
prompt is admitted when its blocks fit; when a running request needs a block and none is left, the
youngest request gives its memory back and is computed again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deepinfer_neuron.cache.blocks import ROOT, BlockManager, Digest, block_digest
from deepinfer_neuron.cache.pools import BLOCK_TOKENS
from deepinfer_neuron.engine.budget import DraftBudget
from deepinfer_neuron.engine.request import Request, State, Survival
from deepinfer_neuron.runner.plan import CONTINUE, Admission, StepPlan

Ints = NDArray[np.int64]

_MOST_POSTPONED = 32
"""Waiting requests looked past in one step because somebody is computing their prefix."""


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of the scheduler."""

    max_num_seqs: int
    """Requests that hold memory at once."""
    max_num_batched_tokens: int
    """Rows of one step; at least ``max_num_seqs``."""
    max_blocks_per_seq: int
    """Blocks of the longest sequence."""
    prefill_attempt_interval: int = 1
    """While requests are running, only every so many steps carry prompt rows."""
    nextn: int = 0
    """Most drafts that a running request verifies in a step."""


@dataclass(frozen=True)
class Scheduled:
    """A planned step and the requests behind its rows."""

    plan: StepPlan
    requests: tuple[Request, ...]
    """One per entry of the plan, in its order."""


@dataclass
class SchedulerCounters:
    """What the scheduler has done since it was made."""

    steps: int = 0
    prefill_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Prompt tokens found there."""


class Scheduler:
    """Owns slots, blocks and queues.

    Args:
        config: limits.
        blocks: block manager.
        budget: decides how many drafts a step verifies; ``None`` for as many as there are.
    """

    def __init__(
        self, config: SchedulerConfig, blocks: BlockManager, budget: DraftBudget | None = None
    ) -> None:
        self.config = config
        self.budget = budget
        self.blocks = blocks
        self.counters = SchedulerCounters()
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.running: list[Request] = []
        """In order of admission."""
        slots = config.max_num_seqs + 1
        self._free_slots = list(range(slots - 1, 0, -1))
        self._tables = np.zeros((slots, config.max_blocks_per_seq), dtype=np.int64)
        self._expected: dict[Digest, int] = {}
        self._since_prefill = 0

    @property
    def num_unfinished(self) -> int:
        """Requests in any queue."""
        return len(self.waiting) + len(self.prefilling) + len(self.running)

    def add(self, request: Request) -> None:
        """Queue a request behind the others."""
        request.state = State.WAITING
        self.waiting.append(request)

    def schedule(self) -> Scheduled | None:
        """Plan the next step, or ``None`` if there is nothing to run.

        Counts of the requests are advanced as if the step had run.
        """
        width = self._width()
        preempted = self._make_room(width)
        rows = _Rows()
        for request in self.running:
            if request.wants_more:
                rows.add(request, CONTINUE, width, True)
        drafts = self._decode(rows, width)
        used = len(rows.requests) * width if drafts is None else len(rows.requests) + drafts
        decoding = len(rows.requests)
        self._since_prefill += 1
        interval = self.config.prefill_attempt_interval
        if not decoding or self._since_prefill >= interval:
            budget = self.config.max_num_batched_tokens - used
            admissions = self._prefill(rows, budget, admit=not preempted)
        else:
            admissions = []
        if not rows.requests:
            return None
        if len(rows.requests) > decoding:
            self._since_prefill = 0
        self.counters.steps += 1
        return Scheduled(self._plan(rows, tuple(admissions), drafts), tuple(rows.requests))

    def _width(self) -> int:
        """Rows of each running request: one, and drafts as far as the budget reaches.

        Where a prompt could go on, drafts leave it some rows; with a budget for the whole blocks
        of ``max_num_seqs`` requests that never costs a draft.
        """
        block, budget = 1 + self.config.nextn, self.config.max_num_batched_tokens
        prompts = self.prefilling or (self.waiting and self._free_slots)
        reserved = min(block, budget // 2) if prompts else 0
        return max(1, min(block, (budget - reserved) // max(1, len(self.running))))

    def _decode(self, rows: _Rows, width: int) -> int | None:
        """Count the planned rows of running requests; drafts they share, ``None`` for no limit."""
        drafts = None
        if self.budget is not None and rows.requests:
            chances = [_latest_survival(request, width - 1) for request in rows.requests]
            drafts = self.budget.drafts(chances)
        for request in rows.requests:
            request.inflight.append(width)
        return drafts

    def finish(self, request: Request) -> None:
        """Take a request out of its queue and give its memory back."""
        if request.state is State.WAITING:
            self.waiting.remove(request)
        elif request.state is State.PREFILL:
            self.prefilling.remove(request)
        elif request.state is State.RUNNING:
            self.running.remove(request)
        self._free(request)
        request.state = State.FINISHED

    def commit(self, request: Request, stop: int) -> None:
        """The caches now hold the request's tokens before ``stop``: offer its full blocks.

        Args:
            request: one that holds memory.
            stop: at most the number of its known tokens.
        """
        request.cached = stop
        full = stop // BLOCK_TOKENS
        if full == request.committed or not self.blocks.caching:
            return
        prompt_blocks = len(request.prompt_token_ids) // BLOCK_TOKENS
        for index in range(request.committed, full):
            digest = self._digest(request, index)
            self.blocks.commit(request.blocks[index], digest)
            if index < prompt_blocks:
                self._expect(digest, -1)
        request.committed = full

    # Memory of running requests.

    def _make_room(self, width: int) -> bool:
        """Give every running request blocks for its next rows; preempt where none is left."""
        preempted = False
        for request in list(self.running):
            while request.state is State.RUNNING and request.wants_more:
                missing = -(-request.most_cached(width) // BLOCK_TOKENS) - len(request.blocks)
                if missing <= 0:
                    break
                if self.blocks.available >= missing:
                    self._extend(request, missing)
                    break
                self._preempt(self._youngest())
                preempted = True
        return preempted

    def _youngest(self) -> Request:
        holders = self.prefilling or self.running
        return max(holders, key=lambda request: (request.arrival_time, request.request_id))

    def _preempt(self, request: Request) -> None:
        (self.prefilling if request.state is State.PREFILL else self.running).remove(request)
        self._free(request)
        request.state = State.WAITING
        request.preemptions += 1
        self.counters.preemptions += 1
        self.waiting.appendleft(request)

    def _free(self, request: Request) -> None:
        if not request.slot:
            return
        self._expect_blocks(request, -1)
        self.blocks.release(request.blocks)
        self._free_slots.append(request.slot)
        request.blocks, request.slot = [], 0
        request.computed = request.cached = request.committed = 0

    def _extend(self, request: Request, count: int) -> None:
        start = len(request.blocks)
        blocks = self.blocks.allocate(count)
        request.blocks += blocks
        self._tables[request.slot, start : start + count] = blocks

    # Prompts.

    def _prefill(self, rows: _Rows, budget: int, *, admit: bool) -> list[Admission]:
        """Fill the budget with prompt rows; returns the requests that got a slot."""
        admissions: list[Admission] = []
        for request in list(self.prefilling):
            budget -= self._prefill_chunk(request, rows, budget)
        postponed: list[Request] = []
        while admit and budget > 0 and self.waiting and self._free_slots:
            if len(postponed) == _MOST_POSTPONED:
                break
            request = self.waiting[0]
            matched = self._match(request)
            if matched is None:
                postponed.append(self.waiting.popleft())
                continue
            if not self._fits(request, matched):
                break
            self.waiting.popleft()
            admissions.append(self._admit(request, matched))
            budget -= self._prefill_chunk(request, rows, budget)
        self.waiting.extendleft(reversed(postponed))
        return admissions

    def _match(self, request: Request) -> list[int] | None:
        """Cached blocks to continue from; ``None`` if another request is computing the next one."""
        if not self.blocks.caching or request.data.scores_prompt:
            return []
        most = (request.known - 1) // BLOCK_TOKENS
        digests = [self._digest(request, index) for index in range(most)]
        blocks = self.blocks.match(digests)
        missing = digests[len(blocks) : len(blocks) + 1]
        if missing and not self.blocks.holds(missing[0]) and missing[0] in self._expected:
            return None
        return blocks

    def _fits(self, request: Request, matched: Sequence[int]) -> bool:
        needed = request.blocks_to_resume - len(matched)
        return needed <= self.blocks.available - self.blocks.unreferenced(matched)

    def _admit(self, request: Request, matched: list[int]) -> Admission:
        request.slot = self._free_slots.pop()
        request.state = State.PREFILL
        self.prefilling.append(request)
        self.blocks.share(matched)
        request.blocks = list(matched)
        self._tables[request.slot, : len(matched)] = matched
        self._extend(request, request.blocks_to_resume - len(matched))
        cached = len(matched) * BLOCK_TOKENS
        request.computed = request.cached = cached
        request.committed = len(matched)
        self._expect_blocks(request, 1)
        if not request.preemptions:
            request.hit_tokens = cached
            self.counters.prefix_queries += request.known
            self.counters.prefix_hits += cached
        pages = tuple(self.blocks.page(block) for block in matched)
        return Admission(request.slot, request.data, cached, pages)

    def _prefill_chunk(self, request: Request, rows: _Rows, budget: int) -> int:
        """Plan as many of a request's missing rows as the budget allows; returns how many."""
        begin, known = request.computed, request.known
        count = min(budget, known - begin)
        if count <= 0:
            return 0
        complete = begin + count == known
        # A request that was preempted goes on with the drafts it had; its last row waits for them.
        if complete and count > 1 and budget - count < request.drafts:
            count, complete = count - 1, False
        drafts = min(request.drafts, budget - count) if complete else 0
        self.counters.prefill_tokens += count
        rows.add(request, begin, count + drafts, complete)
        request.computed += count
        if complete:
            request.inflight.append(1 + drafts)
            request.state = State.RUNNING
            self.prefilling.remove(request)
            self.running.append(request)
        return count + drafts

    # Digests, and which of them somebody is computing.

    def _digest(self, request: Request, index: int) -> Digest:
        while len(request.digests) <= index:
            start = len(request.digests) * BLOCK_TOKENS
            tokens = [*request.prompt_token_ids[start : start + BLOCK_TOKENS]]
            first = max(0, start - len(request.prompt_token_ids))
            tokens += request.token_ids[first : first + BLOCK_TOKENS - len(tokens)]
            parent = request.digests[-1] if request.digests else ROOT
            request.digests.append(block_digest(parent, tokens))
        return request.digests[index]

    def _expect_blocks(self, request: Request, change: int) -> None:
        """A request starts (or stops) computing the full blocks of its prompt."""
        if not self.blocks.caching:
            return
        for index in range(request.committed, len(request.prompt_token_ids) // BLOCK_TOKENS):
            self._expect(self._digest(request, index), change)

    def _expect(self, digest: Digest, change: int) -> None:
        count = self._expected.get(digest, 0) + change
        if count > 0:
            self._expected[digest] = count
        else:
            self._expected.pop(digest, None)

    def _plan(self, rows: _Rows, admissions: tuple[Admission, ...], drafts: int | None) -> StepPlan:
        slots = np.array([request.slot for request in rows.requests], dtype=np.int64)
        width = max(len(request.blocks) for request in rows.requests)
        tables = self._tables[slots, :width]
        return StepPlan(
            slots=slots,
            begin=np.array(rows.begin, dtype=np.int64),
            rows=np.array(rows.rows, dtype=np.int64),
            samples=np.array(rows.samples),
            tables=tables,
            pages=self.blocks.pages(tables),
            admissions=admissions,
            most_drafts=drafts,
        )


def _latest_survival(request: Request, width: int) -> Survival:
    """Chances by which the drafts of a step may be counted: those before the drafts it verifies.

    The number of drafts must not depend on the drafts themselves, or their tokens would be judged
    with a bias. With a step in flight the latest known chances are old enough; otherwise the ones
    before them are taken. A request without any counts as certain.
    """
    known = list(request.survivals)
    if not request.inflight:
        known = known[:-1]
    if not known:
        return np.ones(width, dtype=np.float32)
    return known[-1][:width]


@dataclass
class _Rows:
    """Rows of the step being planned, one entry per request."""

    requests: list[Request] = field(default_factory=list)
    begin: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)

    def add(self, request: Request, begin: int, rows: int, samples: bool) -> None:
        self.requests.append(request)
        self.begin.append(begin)
        self.rows.append(rows)
        self.samples.append(samples)

"""Runs step plans one after the other: looks up tokens, runs the network, samples, drafts.

What is common to all devices is here: whose rows a step holds, and how tokens are chosen on the
host. :mod:`deepinfer_neuron.runner.host_executor` runs ragged steps on the host,
:mod:`deepinfer_neuron.runner.static_executor` passes of static shape on a device.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_neuron.checkpoint.config import ModelConfig
from deepinfer_neuron.runner.drafter import DraftSource
from deepinfer_neuron.runner.pack import ChunkPlan
from deepinfer_neuron.runner.plan import CONTINUE, StepPlan
from deepinfer_neuron.runner.sequence import SequenceData
from deepinfer_neuron.sampling.drafts import Draft, legal_drafts, split_budget, survival
from deepinfer_neuron.sampling.sampler import Sampler, TokenResult

_SCORED_ROWS = 1 << 22
"""Logits held at once while prompt tokens are scored."""


@dataclass(frozen=True)
class Progress:
    """What a step did for one sequence."""

    tokens: tuple[TokenResult, ...]
    """New tokens in order; empty if it does not sample, or had reached its length before."""
    cached: int
    """Tokens whose keys the caches hold now."""
    verified: int = 0
    """Drafts that the step verified."""
    accepted: int = 0
    """New tokens before the last one: each was a draft. The last one may be a draft too, if the
    sequence ends with it."""
    confidences: tuple[float, ...] = ()
    """Of the verified drafts."""
    next_confidences: tuple[float, ...] = ()
    """Of the drafts that the next step may verify."""


@dataclass(frozen=True)
class StepResult:
    """Outcome of a step."""

    progress: tuple[Progress, ...]
    """One per sequence of the plan, in its order."""
    rows: int
    """Rows that ran."""
    seconds: float
    """Time from the start of the step to its last draft."""
    forward_seconds: float
    """Time of the backbone, embedding to final norm, and of what goes before it."""
    sample_seconds: float
    """Time of the head, prompt scores and verification."""
    draft_seconds: float
    """Time of the draft blocks and heads."""


@dataclass
class Member:
    """A sequence of the step being run."""

    entry: int
    """Its place in the plan."""
    slot: int
    data: SequenceData
    begin: int
    end: int
    samples: bool
    drafts: tuple[Draft, ...]
    """Verified by this step, on its last rows."""
    first_output: int = 0
    """Its first row among those with hidden states."""
    num_outputs: int = 0
    tokens: list[TokenResult] = field(default_factory=list)

    @property
    def first_sample(self) -> int:
        """Output row that its first new token follows."""
        return self.first_output + self.num_outputs - 1 - len(self.drafts)

    def progress(self) -> Progress:
        if not self.samples:
            return Progress((), self.end)
        return Progress(
            tokens=tuple(self.tokens),
            cached=len(self.data) - 1,
            verified=len(self.drafts),
            accepted=max(0, len(self.tokens) - 1),
            confidences=tuple(draft.confidence for draft in self.drafts),
            next_confidences=tuple(draft.confidence for draft in self.data.drafts),
        )


@dataclass(frozen=True)
class PhaseSeconds:
    """Where the time of a step went besides the backbone; see :class:`StepResult`."""

    sample: float
    draft: float


@dataclass(frozen=True)
class DeviceWork:
    """Counts of a device that runs compiled regions."""

    graphs: int
    late_graphs: int
    launches: int
    passes: int
    uploads: int
    downloads: int


class StepWorker(Protocol):
    """What an executor asks of the worker it runs."""

    @property
    def config(self) -> ModelConfig:
        """The model."""

    def compress(self, token_ids: Sequence[int]) -> NDArray[np.int32]:
        """Compressed ids of tokens, for the Engram hashes."""

    def engram_rows(self, histories: Sequence[tuple[NDArray[np.int32], int]]) -> NDArray[np.int64]:
        """Table rows of the new positions of several sequences."""

    def restore_window(self, slot: int, length: int, pages: Sequence[int]) -> None:
        """Fill a sequence's window rings from the pages of the blocks before ``length``."""

    def hidden(self, plans: Sequence[ChunkPlan]) -> object:
        """Run the backbone over some rows, and wait for it."""

    def allocate(self, num_blocks: int, num_sequences: int, num_pages: int = 0) -> None:
        """Fresh caches."""


class Executor(ABC):
    """Owns the sequences' data while they sit in slots; steps must be run in the planned order.

    Args:
        worker: network and caches.
        sampler: chooses tokens on the host.
        num_slots: slots, the dummy slot 0 included.
    """

    def __init__(self, worker: StepWorker, sampler: Sampler, num_slots: int) -> None:
        self.worker = worker
        self.sampler = sampler
        self.source: DraftSource | None = None
        """Replaces the drafts of the model."""
        self._data: list[SequenceData | None] = [None] * num_slots

    def run(self, plan: StepPlan) -> StepResult:
        """Run a step to its last draft.

        New tokens are appended to the sequences' data, so the next plan can use them.
        """
        started = time.monotonic()
        for admission in plan.admissions:
            self._data[admission.slot] = admission.data
            if admission.cached:
                self.worker.restore_window(admission.slot, admission.cached, admission.pages)
        members = self._members(plan)
        spent = self._advance(plan, members)
        seconds = time.monotonic() - started
        done = {member.entry: member.progress() for member in members}
        return StepResult(
            progress=tuple(
                done.get(entry, Progress((), 0)) for entry in range(len(plan.slots))
            ),
            rows=sum(member.end - member.begin for member in members),
            seconds=seconds,
            forward_seconds=seconds - spent.sample - spent.draft,
            sample_seconds=spent.sample,
            draft_seconds=spent.draft,
        )  # fmt: skip

    def device_work(self) -> DeviceWork | None:
        """What the device was asked to do; ``None`` where nothing is compiled."""
        return None

    @abstractmethod
    def _advance(self, plan: StepPlan, members: list[Member]) -> PhaseSeconds:
        """Run the members' rows, give them tokens and drafts."""

    def _sequence(self, slot: int) -> SequenceData:
        data = self._data[slot]
        if data is None:
            raise RuntimeError(f"slot {slot} holds no sequence")
        return data

    def _members(self, plan: StepPlan) -> list[Member]:
        """Sequences with their rows; one that has reached its length since the plan has none."""
        members = []
        for entry, slot in enumerate(plan.slots.tolist()):
            data, rows = self._sequence(slot), int(plan.rows[entry])
            samples, begin = bool(plan.samples[entry]), int(plan.begin[entry])
            if begin == CONTINUE:
                if len(data) >= data.max_length:
                    continue
                begin = len(data) - 1
            count = max(0, begin + rows - len(data)) if samples else 0
            drafts = data.drafts[:count]
            end = len(data) + len(drafts) if samples else begin + rows
            members.append(Member(entry, slot, data, begin, end, samples, drafts))
        if plan.most_drafts is not None:
            going_on = [member for member in members if plan.begin[member.entry] == CONTINUE]
            chances = [survival([d.confidence for d in m.drafts]) for m in going_on]
            counts = split_budget(chances, plan.most_drafts)
            for member, count in zip(going_on, counts, strict=True):
                member.drafts = member.drafts[:count]
                member.end = len(member.data) + count
        return members

    def _chunks(self, plan: StepPlan, members: Sequence[Member]) -> list[ChunkPlan]:
        if not members:
            return []
        rows = self._engram_rows(members)
        chunks: list[ChunkPlan] = []
        outputs = 0
        for member, engram_rows in zip(members, rows, strict=True):
            begin, end, data = member.begin, member.end, member.data
            wanted = 1 + len(member.drafts) if member.samples else 0
            member.num_outputs = end - begin if data.scores_prompt else wanted
            member.first_output = outputs
            outputs += member.num_outputs
            chunks.append(
                ChunkPlan(
                    token_ids=data.tokens(begin, end),
                    start_position=begin,
                    state_slot=member.slot,
                    block_table=plan.tables[member.entry],
                    page_table=plan.pages[member.entry],
                    engram_rows=engram_rows,
                    num_outputs=member.num_outputs,
                )
            )
        return chunks

    def _engram_rows(self, members: Sequence[Member]) -> list[np.ndarray]:
        """Table rows of every chunk, hashed together."""
        rows = self.worker.engram_rows([(m.data.compressed(m.end), m.begin) for m in members])
        edges = np.cumsum([member.end - member.begin for member in members])[:-1]
        return np.split(rows, edges, axis=1)

    def _choose(self, members: Sequence[Member], logits: Tensor, first: Sequence[int]) -> None:
        """Choose tokens place by place: a sequence goes on while its draft is the token.

        Every place is treated as in a step without drafts, after the tokens before it have been
        told to the sequence's state, so nothing ever has to be taken back.

        Args:
            members: sequences that sample.
            logits: fp32 rows; a member's are consecutive, its drafts' behind its last token's.
            first: row of each member's last token.
        """
        alive, place = list(zip(members, first, strict=True)), 0
        while alive:
            rows = [row + place for _, row in alive]
            part = logits if len(rows) == logits.shape[0] else logits[rows]
            going_on = self._choose_place([member for member, _ in alive], part, place)
            alive = [item for item, more in zip(alive, going_on, strict=True) if more]
            place += 1

    def _choose_place(self, members: Sequence[Member], logits: Tensor, place: int) -> list[bool]:
        """One token for every sequence; tells which of them have their draft accepted."""
        drafts = [m.drafts[place] if place < len(m.drafts) else None for m in members]
        states = [member.data.state for member in members]
        lengths = [len(member.data) for member in members]
        results = self.sampler.sample(logits, states, lengths, drafts)
        compressed = self.worker.compress([result.token_id for result in results])
        going_on = []
        rows = zip(members, results, compressed.tolist(), drafts, strict=True)
        for member, result, code, draft in rows:
            member.data.append(result.token_id, code)
            member.tokens.append(result)
            accepted = draft is not None and draft.token_id == result.token_id
            ended = result.failed is not None or member.data.state.ends_with(result.token_id)
            going_on.append(accepted and not ended)
        return going_on

    def _wanting(self, members: Sequence[Member]) -> list[Member]:
        """Members that go on after this step and have room for drafts; old drafts are dropped."""
        wanting = []
        for member in members:
            if not member.tokens:
                continue
            member.data.drafts = ()
            last, state = member.tokens[-1], member.data.state
            ended = last.failed is not None or state.ends_with(last.token_id)
            if not ended and member.data.room_for_drafts:
                wanting.append(member)
        return wanting

    def _give(self, data: SequenceData, drafts: Sequence[Draft]) -> None:
        """Keep drafts for the next step, as far as there is room and the grammar allows them."""
        drafts = drafts[: data.room_for_drafts]
        if self.source is not None:
            drafts = list(self.source(data, drafts))[: data.room_for_drafts]
        drafts = drafts[: legal_drafts(data.state, drafts)]
        data.propose(drafts, self.worker.compress([draft.token_id for draft in drafts]))

    def _score_rows(
        self, data: SequenceData, begin: int, end: int, logits: Callable[[int, int], Tensor]
    ) -> None:
        """Scores of the prompt tokens that follow rows ``[begin, end)``, in bounded pieces.

        Args:
            data: of the sequence.
            begin: position of the first row.
            end: position behind the last.
            logits: fp32 logits of a range of rows, counted from ``begin``.
        """
        step = max(1, _SCORED_ROWS // self.worker.config.vocab_size)
        known = len(data.prompt_results)
        end = min(end, data.num_prompt_tokens - 1)
        if not data.scores_prompt or end <= known:
            return
        for start in range(known, end, step):
            stop = min(end, start + step)
            targets = data.tokens(start + 1, stop + 1).tolist()
            part = logits(start - begin, stop - begin)
            data.prompt_results += self.sampler.score_prompt(part, targets, data.params)

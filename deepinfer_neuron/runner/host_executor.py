"""Steps on the host: rows side by side as they come, logits and drafts at once."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from deepinfer_neuron.runner.drafter import Drafter
from deepinfer_neuron.runner.executor import Executor, Member, PhaseSeconds
from deepinfer_neuron.runner.plan import StepPlan
from deepinfer_neuron.runner.worker import Worker
from deepinfer_neuron.sampling.sampler import Sampler


class HostExecutor(Executor):
    """Runs steps with the ragged network.

    Args:
        worker: network and caches.
        sampler: chooses tokens.
        num_slots: slots, the dummy slot 0 included.
        drafter: proposes drafts; ``None`` for none.
    """

    def __init__(
        self, worker: Worker, sampler: Sampler, num_slots: int, drafter: Drafter | None = None
    ) -> None:
        super().__init__(worker, sampler, num_slots)
        self._ragged = worker
        self.drafter = drafter

    def _advance(self, plan: StepPlan, members: list[Member]) -> PhaseSeconds:
        """Backbone, prompt scores, tokens, drafts."""
        chunks = self._chunks(plan, members)
        hidden = self._ragged.hidden(chunks) if members else torch.empty(0)
        forwarded = time.monotonic()
        for member in members:
            self._score_prompt(member, hidden)
        self._sample([member for member in members if member.samples], hidden)
        sampled = time.monotonic()
        self._draft(members)
        ended = time.monotonic()
        return PhaseSeconds(sampled - forwarded, ended - sampled)

    def _score_prompt(self, member: Member, hidden: Tensor) -> None:
        first = member.first_output
        self._score_rows(
            member.data,
            member.begin,
            member.end,
            lambda start, stop: self._ragged.logits(hidden[first + start : first + stop]),
        )

    def _sample(self, members: Sequence[Member], hidden: Tensor) -> None:
        if not members:
            return
        spans = [range(m.first_sample, m.first_sample + 1 + len(m.drafts)) for m in members]
        logits = self._ragged.logits(hidden[[row for span in spans for row in span]])
        first = np.cumsum([0, *(len(span) for span in spans[:-1])])
        self._choose(members, logits, first.tolist())

    def _draft(self, members: Sequence[Member]) -> None:
        """Drafts for the sequences that go on after this step."""
        wanting = self._wanting(members)
        if self.drafter is None or not wanting:
            return
        proposed = self.drafter.propose([(member.slot, member.data) for member in wanting])
        for member, drafts in zip(wanting, proposed, strict=True):
            self._give(member.data, drafts)

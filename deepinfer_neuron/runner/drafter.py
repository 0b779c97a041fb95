"""Proposes the drafts that the next step of a sequence verifies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from deepinfer_neuron.ops.verify import ROW_POSITION_STEP
from deepinfer_neuron.runner.pack_drafts import DraftPlan
from deepinfer_neuron.runner.sequence import SequenceData
from deepinfer_neuron.runner.worker import Worker
from deepinfer_neuron.sampling.drafts import Draft
from deepinfer_neuron.sampling.sampler import Sampler

LOWEST_TEMPERATURE = 1e-5


class DraftSource(Protocol):
    """Replaces the drafts of the model: recorded runs in benchmarks, worst cases in tests."""

    def __call__(self, data: SequenceData, drafts: Sequence[Draft]) -> Sequence[Draft]:
        """What to propose instead of the model's drafts, at most as many."""


class Drafter:
    """Runs the draft blocks and heads after a step.

    Args:
        worker: network and caches, with its draft blocks loaded.
        sampler: draws drafts of requests that are not greedy.
        temperatures: ``nextn`` divisors of the confidence logits.
    """

    def __init__(
        self,
        worker: Worker,
        sampler: Sampler,
        temperatures: Sequence[float],
    ) -> None:
        self._worker = worker
        self._sampler = sampler
        bounded = [max(value, LOWEST_TEMPERATURE) for value in temperatures]
        self._temperatures = torch.tensor(bounded, dtype=torch.float32)

    def propose(self, members: Sequence[tuple[int, SequenceData]]) -> list[list[Draft]]:
        """Drafts for every sequence.

        Args:
            members: slot and data of sequences whose last token the backbone has not seen and
                that have room for a draft.
        """
        plans = [
            DraftPlan(int(data.tokens(len(data) - 1, len(data))[0]), len(data) - 1, slot)
            for slot, data in members
        ]
        hidden = self._worker.draft_hidden(plans)
        data = [item for _, item in members]
        golden = torch.tensor([plan.golden for plan in plans])
        greedy = all(item.params.is_greedy for item in data)
        return self._greedy(hidden, golden) if greedy else self._chain(hidden, golden, data)

    @torch.inference_mode()
    def _greedy(self, hidden: Tensor, golden: Tensor) -> list[list[Draft]]:
        """Most probable drafts, without a look at any of them on the way."""
        heads, head = self._worker.draft_heads, self._worker.network.head
        tokens, trust = heads.greedy(hidden, golden, self._temperatures, head)
        return [
            [Draft(token, chance) for token, chance in zip(row, chances, strict=True)]
            for row, chances in zip(tokens.tolist(), _finite(trust), strict=True)
        ]

    @torch.inference_mode()
    def _chain(
        self, hidden: Tensor, golden: Tensor, data: Sequence[SequenceData]
    ) -> list[list[Draft]]:
        """Drafts of a step in which some sequence draws."""
        heads, block = self._worker.draft_heads, len(self._temperatures)
        logits = heads.start(hidden, self._worker.network.head).unflatten(0, (-1, block))
        places = hidden.unflatten(0, (-1, block))
        states, previous = [item.state for item in data], golden
        drafts: list[list[Draft]] = [[] for _ in data]
        for place in range(block):
            biased, trust = heads.advance(
                logits[:, place], places[:, place], previous, self._temperatures[place]
            )
            # A position drafted again at another place gets other random words: otherwise the
            # confidences of the old block would tell something about the draws of the new one.
            positions = [len(item) + place * (1 + ROW_POSITION_STEP) for item in data]
            previous, laws = self._sampler.propose(biased, states, positions)
            rows = zip(drafts, previous.tolist(), _finite(trust), laws, strict=True)
            for row, token, chance, law in rows:
                row.append(Draft(token, chance, law))
        return drafts


def _finite(trust: Tensor) -> list[Any]:
    """Confidences as numbers; one that is NaN counts as none."""
    return list(trust.nan_to_num(nan=0.0).tolist())

"""Runs step plans one after the other: looks up tokens, runs the network, samples."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer_neuron.runner.pack import ChunkPlan
from deepinfer_neuron.runner.plan import StepPlan
from deepinfer_neuron.runner.sequence import SequenceData
from deepinfer_neuron.runner.worker import Worker
from deepinfer_neuron.sampling.sampler import Sampler, TokenResult

_SCORED_ROWS = 1 << 22
"""Logits held at once while prompt tokens are scored."""


@dataclass(frozen=True)
class StepResult:
    """Outcome of a step."""

    tokens: tuple[TokenResult, ...]
    """One per sequence that samples, in plan order."""
    seconds: float
    """Time from the start of the step to its last token."""


class Executor:
    """Owns the sequences' data while they sit in slots; steps must be run in the planned order.

    Args:
        worker: network and caches.
        sampler: chooses tokens.
        num_slots: slots, the dummy slot 0 included.
    """

    def __init__(self, worker: Worker, sampler: Sampler, num_slots: int) -> None:
        self.worker = worker
        self.sampler = sampler
        self._data: list[SequenceData | None] = [None] * num_slots

    def run(self, plan: StepPlan) -> StepResult:
        """Run a step to its last token.

        New tokens are appended to the sequences' data, so the next plan can use them.
        """
        started = time.monotonic()
        for admission in plan.admissions:
            self._data[admission.slot] = admission.data
            if admission.cached:
                self.worker.restore_window(admission.slot, admission.cached, admission.pages)
        data = [self._sequence(slot) for slot in plan.slots.tolist()]
        chunks = self._chunks(plan, data)
        hidden = self.worker.hidden(chunks)
        last = np.cumsum([chunk.num_outputs for chunk in chunks]) - 1
        self._score_prompts(plan, data, chunks, hidden, last)
        sampled = np.flatnonzero(plan.samples)
        tokens = self._sample([data[i] for i in sampled], hidden[torch.from_numpy(last[sampled])])
        return StepResult(tuple(tokens), time.monotonic() - started)

    def _sequence(self, slot: int) -> SequenceData:
        data = self._data[slot]
        if data is None:
            raise RuntimeError(f"slot {slot} holds no sequence")
        return data

    def _chunks(self, plan: StepPlan, data: Sequence[SequenceData]) -> list[ChunkPlan]:
        rows = self._engram_rows(plan, data)
        chunks = []
        bounds = zip(plan.begin.tolist(), plan.end.tolist(), strict=True)
        for i, (begin, end) in enumerate(bounds):
            outputs = end - begin if data[i].scores_prompt else int(plan.samples[i])
            chunks.append(
                ChunkPlan(
                    token_ids=data[i].tokens(begin, end),
                    start_position=begin,
                    state_slot=int(plan.slots[i]),
                    block_table=plan.tables[i],
                    page_table=plan.pages[i],
                    engram_rows=rows[i],
                    num_outputs=outputs,
                )
            )
        return chunks

    def _engram_rows(self, plan: StepPlan, data: Sequence[SequenceData]) -> list[np.ndarray]:
        """Table rows of every chunk, hashed together."""
        bounds = list(zip(plan.begin.tolist(), plan.end.tolist(), strict=True))
        rows = self.worker.engram_rows(
            [(item.compressed(end), begin) for item, (begin, end) in zip(data, bounds, strict=True)]
        )
        edges = np.cumsum([end - begin for begin, end in bounds])[:-1]
        return np.split(rows, edges, axis=1)

    def _sample(self, data: Sequence[SequenceData], hidden: torch.Tensor) -> list[TokenResult]:
        if not data:
            return []
        logits = self.worker.logits(hidden)
        states = [item.state for item in data]
        results = self.sampler.sample(logits, states, [len(item) for item in data])
        compressed = self.worker.compress([result.token_id for result in results])
        for item, result, code in zip(data, results, compressed.tolist(), strict=True):
            item.append(result.token_id, code)
        return results

    def _score_prompts(
        self,
        plan: StepPlan,
        data: Sequence[SequenceData],
        chunks: Sequence[ChunkPlan],
        hidden: torch.Tensor,
        last: np.ndarray,
    ) -> None:
        """Scores of the prompt tokens that follow the rows of this step, in bounded pieces."""
        step = max(1, _SCORED_ROWS // self.worker.config.vocab_size)
        for i, item in enumerate(data):
            begin = int(plan.begin[i])
            known = len(item.prompt_results)
            end = min(int(plan.end[i]), item.num_prompt_tokens - 1)
            if not item.scores_prompt or end <= known:
                continue
            offset = int(last[i]) + 1 - chunks[i].num_outputs - begin
            for start in range(known, end, step):
                stop = min(end, start + step)
                logits = self.worker.logits(hidden[offset + start : offset + stop])
                targets = item.tokens(start + 1, stop + 1).tolist()
                item.prompt_results += self.sampler.score_prompt(logits, targets, item.params)

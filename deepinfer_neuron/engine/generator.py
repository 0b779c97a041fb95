"""A simple loop: prefill each prompt in chunks, then decode the whole batch together."""

from __future__ import annotations

import time
from collections import abc
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from deepinfer_neuron.engine.sequence import Sequence
from deepinfer_neuron.runner.pack import ChunkPlan
from deepinfer_neuron.runner.worker import Worker, blocks_for
from deepinfer_neuron.sampling.sampler import greedy_token, sampled_token


@dataclass(frozen=True)
class Generator:
    """Runs batches of sequences to their end.

    Attributes:
        worker: network and caches.
        eos_token_id: token that ends a sequence.
        max_model_len: most tokens of a sequence, prompt included.
        max_num_seqs: sequences decoded together.
        max_num_batched_tokens: prompt tokens of one prefill step.
    """

    worker: Worker
    eos_token_id: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int

    def run(
        self, sequences: abc.Sequence[Sequence], on_token: abc.Callable[[Sequence], None]
    ) -> None:
        """Generate until every sequence has a finish reason.

        Args:
            sequences: any number; they run in groups of ``max_num_seqs``, in order.
            on_token: called after each new token.
        """
        for start in range(0, len(sequences), self.max_num_seqs):
            self._run_group(sequences[start : start + self.max_num_seqs], on_token)

    def _run_group(
        self, group: abc.Sequence[Sequence], on_token: abc.Callable[[Sequence], None]
    ) -> None:
        self._assign_caches(group)
        for sequence in group:
            self._prefill(sequence)
            on_token(sequence)
        while running := [sequence for sequence in group if sequence.finish_reason is None]:
            logits = self.worker.run([self._plan(s, s.length, logits=True) for s in running])
            for sequence, row in zip(running, logits, strict=True):
                sequence.cached = sequence.length
                self._append(sequence, row)
                on_token(sequence)

    def _assign_caches(self, group: abc.Sequence[Sequence]) -> None:
        """Give every sequence a slot and all the blocks it can come to need."""
        following = 1
        for slot, sequence in enumerate(group, start=1):
            most = min(
                self.max_model_len, len(sequence.prompt_token_ids) + sequence.params.max_tokens
            )
            count = blocks_for(most)
            sequence.state_slot = slot
            sequence.block_table = list(range(following, following + count))
            following += count
        self.worker.allocate(following - 1, len(group))

    def _prefill(self, sequence: Sequence) -> None:
        prompt = len(sequence.prompt_token_ids)
        sequence.compressed = self.worker.compress(sequence.prompt_token_ids)
        while sequence.cached < prompt:
            stop = min(prompt, sequence.cached + self.max_num_batched_tokens)
            logits = self.worker.run([self._plan(sequence, stop, logits=stop == prompt)])
            sequence.cached = stop
        self._append(sequence, logits[0])

    def _plan(self, sequence: Sequence, stop: int, *, logits: bool) -> ChunkPlan:
        start = sequence.cached
        return ChunkPlan(
            token_ids=sequence.tokens(start, stop),
            start_position=start,
            state_slot=sequence.state_slot,
            block_table=sequence.block_table,
            engram_rows=self.worker.engram_rows(sequence.compressed, start, stop),
            wants_logits=logits,
        )

    def _append(self, sequence: Sequence, logits: Tensor) -> None:
        """Choose the next token of a sequence and see whether it ends."""
        params, index = sequence.params, len(sequence.token_ids)
        if params.temperature == 0:
            token = greedy_token(logits)
        else:
            token = sampled_token(logits, params.temperature, sequence.seed, index)
        sequence.token_ids.append(token)
        sequence.compressed = np.append(sequence.compressed, self.worker.compress([token]))
        sequence.finish_time = time.monotonic()
        if index == 0:
            sequence.first_token_time = sequence.finish_time
        if token == self.eos_token_id and not params.ignore_eos:
            sequence.finish_reason = "stop"
        elif index + 1 == params.max_tokens or sequence.length >= self.max_model_len:
            sequence.finish_reason = "length"

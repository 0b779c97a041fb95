"""Sequences of random tokens, and the steps that run them.

Tokens are drawn in advance instead of sampled, so every configuration does the same work.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.timing import Budget
from deepinfer_neuron.runner.pack import ChunkPlan
from deepinfer_neuron.runner.worker import Worker, blocks_for

STEP_TOKENS = 512
"""Most prompt tokens of one step."""

RECORDED_STEPS = 3
"""Decode steps in which the experts are counted; they are not timed."""

_SEED = 20


@dataclass(frozen=True)
class Sizes:
    """How much work to measure.

    Attributes:
        prompt: tokens of the timed prompt.
        batches: numbers of sequences that decode together.
        shortest: least tokens of a prompt in front of timed decode steps.
        longest: most tokens of such a prompt.
        prefill: repetitions of the prompt.
        decode: timed steps per batch.
    """

    prompt: int
    batches: tuple[int, ...]
    shortest: int
    longest: int
    prefill: Budget
    decode: Budget

    @property
    def decoded(self) -> int:
        """Tokens behind each prompt: the warm-up step, the timed ones, the recorded ones."""
        return 1 + self.decode.times + RECORDED_STEPS


@dataclass(frozen=True)
class Member:
    """One sequence: all tokens it will ever be fed, and its place in the caches."""

    tokens: list[int]
    compressed: NDArray[np.int32]
    prompt: int
    """Prompt tokens; the others are decoded one by one."""
    state_slot: int
    block_table: list[int]


@dataclass(frozen=True)
class Workload:
    """Sequences with prompts of different lengths, longest first."""

    members: tuple[Member, ...]

    @classmethod
    def draw(
        cls, worker: Worker, count: int, shortest: int, longest: int, decoded: int
    ) -> Workload:
        """Sequences whose prompt lengths are spread evenly from ``longest`` to ``shortest``.

        Args:
            worker: knows the vocabulary and the Engram hashes.
            count: number of sequences.
            shortest: least prompt tokens.
            longest: most prompt tokens; a single sequence gets these.
            decoded: tokens behind the prompt of each.
        """
        rng = random.Random(_SEED)
        members: list[Member] = []
        first_block = 1
        for slot, length in enumerate(np.linspace(longest, shortest, count).round(), start=1):
            prompt = int(length)
            tokens = [rng.randrange(worker.config.vocab_size) for _ in range(prompt + decoded)]
            blocks = blocks_for(len(tokens))
            table = list(range(first_block, first_block + blocks))
            members.append(Member(tokens, worker.compress(tokens), prompt, slot, table))
            first_block += blocks
        return cls(tuple(members))

    @property
    def blocks(self) -> int:
        """Cache blocks of all sequences."""
        return sum(len(member.block_table) for member in self.members)

    def spread(self, count: int) -> tuple[Member, ...]:
        """``count`` of the sequences, spread evenly from the longest on."""
        last = len(self.members) - 1
        return tuple(self.members[int(i)] for i in np.linspace(0, last, count).round())


def run_tokens(
    worker: Worker, members: Sequence[Member], ranges: Sequence[range], *, logits: bool = True
) -> Tensor:
    """One step that feeds a range of each sequence's tokens: fp32 logits ``[B, V]`` or ``[0, V]``.

    Args:
        worker: holds all earlier tokens of the sequences in its caches.
        members: different sequences.
        ranges: positions to feed, not empty, one range per sequence.
        logits: whether the logits behind each range are wanted.
    """
    return worker.run(
        [
            ChunkPlan(
                token_ids=member.tokens[fed.start : fed.stop],
                start_position=fed.start,
                state_slot=member.state_slot,
                block_table=member.block_table,
                engram_rows=worker.engram_rows([(member.compressed[: fed.stop], fed.start)]),
                num_outputs=int(logits),
            )
            for member, fed in zip(members, ranges, strict=True)
        ]
    )


def prefill(worker: Worker, member: Member) -> None:
    """Feed the prompt of a sequence; logits behind its last token only."""
    for start in range(0, member.prompt, STEP_TOKENS):
        stop = min(member.prompt, start + STEP_TOKENS)
        run_tokens(worker, [member], [range(start, stop)], logits=stop == member.prompt)


def decode(worker: Worker, members: Sequence[Member], step: int) -> Tensor:
    """Feed token ``step`` behind the prompt of every sequence."""
    places = (member.prompt + step for member in members)
    return run_tokens(worker, members, [range(place, place + 1) for place in places])


def engram_rows(worker: Worker, members: Sequence[Member], step: int) -> int:
    """Distinct Engram table rows of a decode step, summed over the tables."""
    wanted = worker.engram_rows(
        [(m.compressed[: m.prompt + step + 1], m.prompt + step) for m in members]
    )
    return sum(len(np.unique(table)) for table in wanted)

"""Drafts from elsewhere: recorded continuations, spoiled ones, and worst cases."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deepinfer_neuron.runner.sequence import SequenceData
from deepinfer_neuron.sampling.drafts import Draft


@dataclass
class Recorded:
    """Drafts from recorded continuations, each spoiled with some probability.

    ``quality`` is the chance that a draft is the recorded token; a spoiled one is any token, the
    last of the vocabulary, or the end of sequence. Blocks are cut short at random.
    """

    continuations: Mapping[tuple[int, ...], Sequence[int]]
    """By prompt."""
    quality: float
    vocab_size: int
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    cuts: float = 0.1
    """Chance that a block is cut short."""
    proposed: int = 0

    def __call__(self, data: SequenceData, drafts: Sequence[Draft]) -> list[Draft]:
        prompt = tuple(data.tokens(0, data.num_prompt_tokens).tolist())
        done = len(data) - data.num_prompt_tokens
        known = self.continuations[prompt][done : done + len(drafts)]
        if self.rng.random() < self.cuts:
            known = known[: self.rng.randint(0, len(known))]
        self.proposed += len(known)
        return [Draft(self._token(token), self.rng.random()) for token in known]

    def _token(self, right: int) -> int:
        if self.rng.random() < self.quality:
            return right
        return self.rng.choice([self.rng.randrange(self.vocab_size), self.vocab_size - 1, 2])

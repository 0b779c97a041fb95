"""One request on its way: its tokens so far, and its place in the caches."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deepinfer_neuron.engine.outputs import FinishReason, RequestMetrics
from deepinfer_neuron.sampling.params import SamplingParams


@dataclass
class Sequence:
    """State of one request.

    Times are seconds on a monotonic clock.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    """Seed of this request's draws, in [0, 2^64)."""
    arrival_time: float
    token_ids: list[int] = field(default_factory=list)
    """Generated tokens."""
    compressed: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    """Compressed ids of all known tokens, for the Engram hashes."""
    cached: int = 0
    """Tokens whose keys the caches hold."""
    state_slot: int = 0
    block_table: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    first_token_time: float = 0.0
    finish_time: float = 0.0

    @property
    def length(self) -> int:
        """Prompt and generated tokens."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Known tokens of positions ``[start, stop)``."""
        prompt = len(self.prompt_token_ids)
        if stop <= prompt:
            return self.prompt_token_ids[start:stop]
        generated = self.token_ids[max(0, start - prompt) : stop - prompt]
        return self.prompt_token_ids[start:] + generated

    def metrics(self) -> RequestMetrics:
        """Times of the finished request."""
        return RequestMetrics(
            self.arrival_time, self.first_token_time, self.finish_time, len(self.token_ids)
        )

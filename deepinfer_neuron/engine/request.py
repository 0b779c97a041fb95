"""A request as the scheduler sees it: counts, blocks and state, no tensors."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deepinfer_neuron.cache.blocks import Digest
from deepinfer_neuron.cache.pools import BLOCK_TOKENS
from deepinfer_neuron.engine.outputs import DecodeCounts, FinishReason
from deepinfer_neuron.runner.sequence import SequenceData
from deepinfer_neuron.sampling.params import SamplingParams

Survival = NDArray[np.float32]


class State(enum.Enum):
    """Where a request stands."""

    COMPILING = "compiling"
    """Waits for its grammar."""
    WAITING = "waiting"
    """Holds no memory: new, or preempted."""
    PREFILL = "prefill"
    """Holds memory; some known tokens are not in the caches yet."""
    RUNNING = "running"
    """Every step gives it a token."""
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One completion of one prompt.

    Times are seconds on a monotonic clock.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    data: SequenceData
    arrival_time: float
    max_length: int
    """Most tokens, prompt included, that this request may reach."""
    state: State = State.WAITING
    slot: int = 0
    blocks: list[int] = field(default_factory=list)
    digests: list[Digest] = field(default_factory=list)
    """Digests of the known full blocks, as far as they were needed."""
    computed: int = 0
    """Tokens whose keys the caches hold once every planned step has run; while it is running
    that depends on the drafts accepted, so this then says nothing."""
    cached: int = 0
    """Tokens whose keys the caches hold now."""
    inflight: deque[int] = field(default_factory=deque)
    """Most tokens that each planned step adds, oldest first; each adds at least one."""
    drafts: int = 0
    """Drafts that its next step may verify, as far as is known."""
    survivals: deque[Survival] = field(default_factory=lambda: deque(maxlen=2))
    """Estimated chances of its latest drafts and of those before, newest last."""
    committed: int = 0
    """Leading blocks that were offered to the prefix cache."""
    hit_tokens: int = 0
    """Prompt tokens found in the prefix cache when it was first admitted."""
    preemptions: int = 0
    token_ids: list[int] = field(default_factory=list)
    """Tokens generated so far."""
    finish_reason: FinishReason | None = None
    first_token_time: float | None = None
    finish_time: float | None = None
    decode: DecodeCounts = field(default_factory=DecodeCounts)

    @property
    def known(self) -> int:
        """Tokens known now: prompt and generated."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    @property
    def wants_more(self) -> bool:
        """Whether planned steps may leave it short of its longest possible length."""
        return self.known + len(self.inflight) < self.max_length

    @property
    def blocks_to_resume(self) -> int:
        """Blocks that its known tokens and its drafts take."""
        return -(-(self.known + self.drafts) // BLOCK_TOKENS)

    def most_cached(self, rows: int) -> int:
        """Most tokens the caches hold once the planned steps and one more of ``rows`` rows ran.

        The last token of the longest sequence is never fed.
        """
        return min(self.max_length - 1, self.known + sum(self.inflight) - 1 + rows)

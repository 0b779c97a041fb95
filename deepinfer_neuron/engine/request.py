"""A request as the scheduler sees it: counts, blocks and state, no tensors."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from deepinfer_neuron.cache.blocks import Digest
from deepinfer_neuron.engine.outputs import FinishReason
from deepinfer_neuron.runner.sequence import SequenceData
from deepinfer_neuron.sampling.params import SamplingParams


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
    """Tokens whose keys the caches hold once every planned step has run."""
    cached: int = 0
    """Tokens whose keys the caches hold now."""
    inflight: int = 0
    """Tokens that planned steps will add."""
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

    @property
    def known(self) -> int:
        """Tokens known now: prompt and generated."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    @property
    def planned_length(self) -> int:
        """Tokens known once every planned step has run."""
        return self.known + self.inflight

    @property
    def wants_more(self) -> bool:
        """Whether planned steps leave it short of its longest possible length."""
        return self.planned_length < self.max_length

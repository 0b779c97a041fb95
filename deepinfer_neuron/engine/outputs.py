"""What a request gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class RequestMetrics:
    """Times of a request in seconds on a monotonic clock, except the two durations."""

    arrival_time: float
    first_token_time: float | None
    finish_time: float
    num_output_tokens: int
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    num_preemptions: int = 0

    @property
    def ttft(self) -> float | None:
        """Time to first token: from arrival until it was known; ``None`` without a token."""
        if self.first_token_time is None:
            return None
        return self.first_token_time - self.arrival_time

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first; ``None`` for fewer than two tokens."""
        if self.first_token_time is None or self.num_output_tokens < 2:
            return None
        return (self.finish_time - self.first_token_time) / (self.num_output_tokens - 1)


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability of a token and of the most probable ones at its place.

    From the distribution that ``SamplingParams.logprobs_mode`` names.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """``(token id, logprob)``, most probable first."""
    sum_smaller_probs: float | None = None
    """Probability of drawing this token or a less probable one, where switched on."""


@dataclass(frozen=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    """``None`` while it is running."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; for ``error`` what went wrong."""
    logprobs: list[TokenLogprobs] | None = None
    """One per token, where asked for."""
    cumulative_logprob: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs] | None = None
    """One per prompt token after the first, where asked for."""


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was made, and what it holds now."""

    running: int
    waiting: int
    steps: int
    prefill_tokens: int
    """Prompt rows computed; recomputed ones count again."""
    decode_tokens: int
    finished: dict[str, int] = field(default_factory=dict)
    """Requests by finish reason."""
    preemptions: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    slots_total: int = 0
    slots_used: int = 0
    prefix_hit_rate: float = 0.0
    """Share of the prompt tokens looked up that the prefix cache held."""
    schedule_seconds: float = 0.0
    """Time spent planning steps."""
    step_seconds: float = 0.0
    """Time spent running them."""

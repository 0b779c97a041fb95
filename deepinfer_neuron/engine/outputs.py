"""What a request gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


MOST_DRAFTS = 7
"""Longest block of drafts."""


@dataclass
class DecodeCounts:
    """Steps of a request, or of all, that verified drafts or went on from the last token."""

    steps: int = 0
    """Such steps, counted once per request."""
    verified: list[int] = field(default_factory=lambda: [0] * MOST_DRAFTS)
    """Drafts verified, by place in their block; also those behind a rejected one."""
    reached: list[int] = field(default_factory=lambda: [0] * MOST_DRAFTS)
    """Those of them with every draft before them accepted."""
    accepted: list[int] = field(default_factory=lambda: [0] * MOST_DRAFTS)
    confidence: list[float] = field(default_factory=lambda: [0.0] * MOST_DRAFTS)
    """Sums of the confidences of the drafts reached."""

    def add(self, accepted: int, confidences: Sequence[float], *, cut: bool = False) -> None:
        """Count a step that verified one draft per confidence and accepted the leading ones.

        With ``cut`` the request ended there, so nothing is known of the draft behind them.
        """
        self.steps += 1
        for place, confidence in enumerate(confidences):
            self.verified[place] += 1
            if place < accepted or (place == accepted and not cut):
                self.reached[place] += 1
                self.confidence[place] += confidence
            if place < accepted:
                self.accepted[place] += 1

    def copy(self) -> DecodeCounts:
        """The counts as they stand."""
        return DecodeCounts(
            self.steps, [*self.verified], [*self.reached], [*self.accepted], [*self.confidence]
        )

    @property
    def tokens_per_step(self) -> float:
        """Mean acceptance length: tokens of such a step, the one behind the drafts included."""
        return 1.0 + sum(self.accepted) / self.steps if self.steps else 1.0

    @property
    def acceptance(self) -> list[float]:
        """Share of the drafts reached that were accepted, by place; as far as any was reached."""
        return _shares(self.accepted, self.reached)

    @property
    def mean_confidence(self) -> list[float]:
        """Mean confidence of the drafts reached, by place; calibrated, it equals the share."""
        return _shares(self.confidence, self.reached)


def _shares(parts: Sequence[float], wholes: Sequence[int]) -> list[float]:
    return [part / whole for part, whole in zip(parts, wholes, strict=True) if whole]


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
    decode: DecodeCounts = field(default_factory=DecodeCounts)
    """Its decode steps and drafts."""

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
class DeviceStats:
    """What a device with compiled regions was asked to do since the engine was made."""

    graphs: int
    """Graphs compiled: regions at their shapes."""
    graphs_after_warm_up: int
    """Graphs that were first needed after a complete warm-up; 0 is what a server wants."""
    regions_launched: int
    passes: int
    """Passes of static shape over the backbone, warm-up included."""
    uploads: int
    """Copies to the device, one per pass."""
    downloads: int
    """Copies from the device."""


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
    """Time spent running them, of which:"""
    forward_seconds: float = 0.0
    """backbone, from embedding to final norm;"""
    sample_seconds: float = 0.0
    """head, prompt scores, verification of drafts and draws;"""
    draft_seconds: float = 0.0
    """draft blocks and heads."""
    decode_rows: int = 0
    """Rows of sequences that went on from their last token, drafts included."""
    decode: DecodeCounts = field(default_factory=DecodeCounts)
    """Decode steps and drafts of all requests."""
    device: DeviceStats | None = None
    """Work of a device that runs compiled regions; ``None`` on a host that runs none."""

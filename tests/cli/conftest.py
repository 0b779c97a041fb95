"""A stand-in for the engine, so that the command line is tested on its own."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from deepinfer_neuron.engine.outputs import DecodeCounts


@dataclass(frozen=True)
class FakeMetrics:
    """Times of a request, in seconds."""

    ttft: float | None
    tpot: float | None
    decode: DecodeCounts = field(default_factory=DecodeCounts)


@dataclass(frozen=True)
class FakeCompletion:
    """A generated text."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | None = None


@dataclass(frozen=True)
class FakeOutput:
    """What the engine returns for one prompt."""

    prompt: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[FakeCompletion, ...]
    metrics: FakeMetrics


@dataclass(frozen=True)
class FakeSamplingParams:
    """The sampling fields that the command line sets."""

    temperature: float
    max_tokens: int
    seed: int | None


@dataclass
class FakeEngine:
    """Records the calls, and answers each prompt with its upper-case text or raises ``error``."""

    error: BaseException | None = None
    metrics: FakeMetrics = field(default_factory=lambda: FakeMetrics(ttft=0.25, tpot=0.05))
    suffix: str = ""
    failure: str | None = None
    loads: list[tuple[str, dict[str, object]]] = field(default_factory=list)
    params: list[FakeSamplingParams] = field(default_factory=list)

    def load(self, model: str, **options: object) -> FakeEngine:
        """Stands for the ``LLM`` constructor."""
        self.loads.append((model, options))
        return self

    def complete(self, prompt: str) -> FakeCompletion:
        """A text, or a request that failed on its own."""
        if self.failure is not None:
            logger = logging.getLogger("deepinfer_neuron.engine.core")
            try:
                raise ValueError(self.failure)
            except ValueError:
                logger.exception("a step failed")
            return FakeCompletion("", (), "error", self.failure)
        return FakeCompletion(prompt.upper() + self.suffix, (7, 8, 9), "length")

    def generate(
        self, prompts: Sequence[str], params: FakeSamplingParams, *, use_tqdm: bool
    ) -> list[FakeOutput]:
        """Stands for ``LLM.generate``."""
        if self.error is not None:
            raise self.error
        self.params.append(params)
        return [
            FakeOutput(
                prompt=prompt,
                prompt_token_ids=tuple(range(len(prompt.split()))),
                outputs=(self.complete(prompt),),
                metrics=self.metrics,
            )
            for prompt in prompts
        ]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """The engine that ``generate`` finds instead of the real one."""
    fake = FakeEngine()
    llm = types.ModuleType("deepinfer_neuron.llm")
    llm.LLM = fake.load  # type: ignore[attr-defined]
    params = types.ModuleType("deepinfer_neuron.sampling.params")
    params.SamplingParams = FakeSamplingParams  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepinfer_neuron.llm", llm)
    monkeypatch.setitem(sys.modules, "deepinfer_neuron.sampling.params", params)
    return fake

"""Frequencies of emitted tokens: whatever drafts propose, the target's distribution comes out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from deepinfer_neuron.ops import verify
from deepinfer_neuron.ops.arithmetic import FreeOrder
from deepinfer_neuron.ops.sample import Distribution, random_sampling

PENALTY = 5e-5
CHUNK = 20_000
TARGET = [0.35, 0.25, 0.15, 0.1, 0.08, 0.04, 0.03, 0.0]
LAWS = {
    "good": (TARGET, [0.33, 0.27, 0.15, 0.11, 0.07, 0.04, 0.03, 0.0]),
    "a few ulp off": (TARGET, [p * (1 + 3e-7) for p in TARGET]),
    "bad": (TARGET, [0.001, 0.002, 0.007, 0.05, 0.05, 0.09, 0.3, 0.5]),
    "outside top-k": ([0.5, 0.3, 0.2, 0, 0, 0, 0, 0], [0.1, 0, 0, 0.3, 0.3, 0.2, 0.1, 0]),
    "one token": (TARGET, [0, 0, 0, 1, 0, 0, 0, 0]),
    "forced rejection": (TARGET, None),
}


def emitted(target: list[float], draft: list[float] | None, draws: int) -> Tensor:
    """How often each token is emitted, drafts drawn with other seeds."""
    p = torch.tensor(target)
    of = Distribution(p.log().expand(CHUNK, -1).contiguous(), p.expand(CHUNK, -1).contiguous())
    d = torch.tensor(draft if draft is not None else [0.0] * len(target))
    logprobs = d.log().expand(CHUNK, -1)
    everywhere = torch.ones(CHUNK, dtype=torch.bool)
    counts = torch.zeros(len(target), dtype=torch.int64)
    for numbers in torch.arange(draws).split(CHUNK):
        drafts = torch.full_like(numbers, -1)
        if draft is not None:
            drafts = random_sampling(d.expand(CHUNK, -1), numbers + 1_000_000_007, numbers % 97)
        got = verify.accept_drafts(
            of, logprobs, drafts, everywhere, numbers, numbers % 89, FreeOrder()
        )
        counts += got.candidates.bincount(minlength=len(target))
    return counts


def assert_within(counts: Tensor, target: list[float]) -> None:
    """Between ``p - e / (1 + e)`` and ``(1 + e) p`` up to Bernstein's bound at odds of 1e-9."""
    draws, excess = int(counts.sum()), -math.expm1(-PENALTY)
    for count, p in zip(counts.tolist(), target, strict=True):
        if p == 0.0:
            assert count == 0, "a token outside the target was emitted"
            continue
        log_odds = math.log(2e9)
        slack = math.sqrt(2 * draws * p * (1 - p) * log_odds) + log_odds / 3
        assert draws * (p - excess / (1 + excess)) - slack <= count
        assert count <= draws * p * (1 + excess) + slack


@pytest.mark.parametrize("name", LAWS)
def test_emitted_tokens_follow_the_target(name: str) -> None:
    target, draft = LAWS[name]
    assert_within(emitted(target, draft, 2 * CHUNK), target)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAWS)
def test_a_million_emitted_tokens_follow_the_target(name: str) -> None:
    target, draft = LAWS[name]
    counts = emitted(target, draft, 50 * CHUNK)
    assert_within(counts, target)
    # Chi-square below its quantile at four standard deviations; the penalty is far below that.
    expected = torch.tensor([p for p in target if p]).double() * counts.sum()
    seen = counts[torch.tensor(target) > 0].double()
    freedom = len(expected) - 1
    spread = 2.0 / (9.0 * freedom)
    limit = freedom * (1.0 - spread + 4.0 * math.sqrt(spread)) ** 3
    assert float(((seen - expected) ** 2 / expected).sum()) < limit


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("d", [0.05, 0.5, 0.95])
def test_two_tokens(p: float, d: float) -> None:
    target = [p, 1 - p]
    assert_within(emitted(target, [d, 1 - d], CHUNK), target)

"""Frequencies of many draws with fixed seeds, by Pearson's chi-square test."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from deepinfer_neuron.ops.arithmetic import free_arithmetic
from deepinfer_neuron.ops.philox import seed_bits
from deepinfer_neuron.ops.sample import random_sampling
from deepinfer_neuron.sampling.params import SamplingParams
from deepinfer_neuron.sampling.sampler import Sampler
from tests.sampling import plain

DRAWS = 8000


def softmax(width: int) -> Tensor:
    return torch.softmax(plain.logits(1, width, seed=1)[0], -1)


def zipf(width: int) -> Tensor:
    return 1.0 / torch.arange(1, width + 1)


def geometric(width: int) -> Tensor:
    return 0.8 ** torch.arange(width)


def sparse(width: int) -> Tensor:
    return (torch.arange(width) % 11 == 3) * (1.0 + torch.arange(width) % 5)


DISTRIBUTIONS = {
    "uniform": torch.ones(64),
    "softmax": softmax(100),
    "zipf": zipf(1000),
    "geometric": geometric(70),
    "sparse": sparse(300),
    "sparse and wide": sparse(8200),
}


def assert_fits(counts: Tensor, probabilities: Tensor) -> None:
    """Chi-square below its quantile at four standard deviations (Wilson and Hilferty).

    Cells with an expectation below 8 are joined.
    """
    expected = probabilities.to(torch.float64) / probabilities.sum() * counts.sum()
    assert int(counts[expected == 0].sum()) == 0, "a token of probability zero was drawn"
    rare = expected < 8.0
    cells = [(float(c), float(e)) for c, e in zip(counts[~rare], expected[~rare], strict=True)]
    if float(expected[rare].sum()) >= 8.0:
        cells.append((float(counts[rare].sum()), float(expected[rare].sum())))
    statistic = sum((c - e) ** 2 / e for c, e in cells)
    freedom = len(cells) - 1
    spread = 2.0 / (9.0 * freedom)
    assert statistic < freedom * (1.0 - spread + 4.0 * math.sqrt(spread)) ** 3


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("by", ["position", "seed"])
def test_draws_follow_the_distribution(name: str, by: str) -> None:
    p = DISTRIBUTIONS[name].to(torch.float32)
    p = p / p.sum()
    counts = torch.zeros(p.shape[0], dtype=torch.int64)
    for numbers in torch.arange(DRAWS).split(500):
        seeds = numbers if by == "seed" else torch.full_like(numbers, 7)
        positions = numbers if by == "position" else torch.full_like(numbers, 7)
        tokens = random_sampling(p.expand(len(numbers), -1), seeds, positions)
        counts += tokens.bincount(minlength=p.shape[0])
    assert_fits(counts, p)


def test_the_three_draws_of_a_position_are_independent() -> None:
    """Pairs of two cases fill an 8 x 8 table evenly."""
    p, positions = torch.full((8,), 1.0 / 8), torch.arange(DRAWS)
    seeds = seed_bits([3] * DRAWS)
    fresh, residual = (random_sampling(p.expand(DRAWS, -1), seeds, positions, c) for c in (0, 1))
    assert_fits((fresh * 8 + residual).bincount(minlength=64), torch.ones(64))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.5, top_p=0.9),
        SamplingParams(top_k=7),
        SamplingParams(min_p=0.1),
    ],
)
def test_the_sampler_follows_the_reported_probabilities(params: SamplingParams) -> None:
    """Frequencies against a double-precision computation of the whole pipeline."""
    width, rows = 40, 250
    logits = plain.logits(1, width, seed=4)
    values = logits[0].tolist()
    logprobs = plain.log_softmax(values, params.temperature, params.min_p)
    left = plain.kept(values, logprobs, params.top_p, params.top_k)
    probabilities = torch.zeros(width, dtype=torch.float64)
    probabilities[left] = torch.tensor(logprobs, dtype=torch.float64)[left].exp()
    sampler = Sampler(width, free_arithmetic())
    counts = torch.zeros(width, dtype=torch.int64)
    states = [plain.state(params, width, seed=row) for row in range(rows)]
    for position in range(20):
        batch = logits.repeat(rows, 1)
        results = sampler.sample(batch, states, [position] * rows)
        counts += torch.tensor([r.token_id for r in results]).bincount(minlength=width)
    assert_fits(counts, probabilities)

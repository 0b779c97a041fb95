"""Choosing a token: greedy ties, and draws that depend on nothing but their arguments."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_neuron.sampling.sampler import greedy_token, sampled_token
from tests.ops.number_formats import normal

LOGITS = torch.tensor([1.0, -0.5, 2.0, 0.0, -math.inf, 1.5])
"""Six tokens; the fifth is impossible."""


def draws(logits: Tensor, temperature: float, count: int, index: int = 0) -> np.ndarray:
    """Tokens of ``count`` seeds, counted."""
    tokens = [sampled_token(logits, temperature, seed, index) for seed in range(count)]
    return np.bincount(tokens, minlength=len(logits))


def chi_square(counted: np.ndarray, probabilities: np.ndarray) -> float:
    """Pearson's statistic over the tokens that can occur."""
    expected = counted.sum() * probabilities
    possible = expected > 0
    return float(((counted - expected)[possible] ** 2 / expected[possible]).sum())


class TestGreedy:
    """The largest logit, the lowest id among equals."""

    def test_the_largest(self) -> None:
        assert greedy_token(LOGITS) == 2

    @pytest.mark.parametrize("size", [5, 100, 129_280])
    @pytest.mark.parametrize("places", [(0, 4), (3, 4), (1, 2, 3)])
    def test_ties(self, size: int, places: tuple[int, ...]) -> None:
        logits = normal((size,), 1, torch.float32).clamp(max=1.0) - 1.0
        logits[list(places)] = 3.0
        assert greedy_token(logits) == places[0]

    def test_ties_far_apart(self) -> None:
        logits = torch.zeros(129_280)
        logits[[129_279, 70_001, 12_345]] = 1.0
        assert greedy_token(logits) == 12_345

    def test_all_equal(self) -> None:
        assert greedy_token(torch.full((1000,), -7.0)) == 0

    def test_zeros_of_both_signs_are_equal(self) -> None:
        assert greedy_token(torch.tensor([-1.0, -0.0, 0.0])) == 1

    def test_negative_infinities(self) -> None:
        assert greedy_token(torch.tensor([-math.inf, -1e38, -math.inf])) == 1


class TestSampled:
    """Inversion of the cumulative distribution at one uniform number."""

    def test_same_arguments_same_token(self) -> None:
        first = [sampled_token(LOGITS, 0.8, 3, index) for index in range(50)]
        second = [sampled_token(LOGITS.clone(), 0.8, 3, index) for index in reversed(range(50))]
        assert first == second[::-1]

    def test_memory_layout_does_not_matter(self) -> None:
        table = normal((7, 1000), 2, torch.float32)
        for seed in range(20):
            whole = sampled_token(table[3], 1.0, seed, 5)
            assert sampled_token(table.t().contiguous()[:, 3], 1.0, seed, 5) == whole

    def test_seed_and_index_both_matter(self) -> None:
        logits = torch.zeros(1 << 16)
        by_seed = {sampled_token(logits, 1.0, seed, 0) for seed in range(200)}
        by_index = {sampled_token(logits, 1.0, 0, index) for index in range(200)}
        assert len(by_seed) > 190
        assert len(by_index) > 190

    @pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
    def test_extreme_seeds(self, seed: int) -> None:
        assert sampled_token(LOGITS, 1.0, seed, 2**31 - 1) in range(6)

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
    def test_frequencies_over_seeds(self, temperature: float) -> None:
        """Chi-square with 4 degrees of freedom: above 18.5 once in a thousand."""
        weights = np.exp(LOGITS.double().numpy() / temperature)
        counted = draws(LOGITS, temperature, 4000)
        assert chi_square(counted, weights / weights.sum()) < 18.5

    def test_frequencies_over_indices(self) -> None:
        weights = np.exp(LOGITS.double().numpy())
        tokens = [sampled_token(LOGITS, 1.0, 77, index) for index in range(4000)]
        assert chi_square(np.bincount(tokens, minlength=6), weights / weights.sum()) < 18.5

    def test_neighbouring_draws_are_independent(self) -> None:
        """Pairs of tokens of consecutive indices, 8 degrees of freedom: 26.1 once in a thousand."""
        logits = torch.zeros(3)
        tokens = [sampled_token(logits, 1.0, 5, index) for index in range(4001)]
        pairs = [3 * a + b for a, b in itertools.pairwise(tokens)]
        assert chi_square(np.bincount(pairs, minlength=9), np.full(9, 1 / 9)) < 26.1

    @pytest.mark.parametrize("temperature", [0.1, 1.0, 1e300])
    def test_impossible_tokens_are_never_drawn(self, temperature: float) -> None:
        """In the middle, first and last."""
        low = -math.inf
        assert draws(LOGITS, temperature, 1000)[4] == 0
        counted = draws(torch.tensor([low, 0.0, low, 0.0, low]), temperature, 1000)
        assert counted[[0, 2, 4]].tolist() == [0, 0, 0]
        assert draws(torch.tensor([low, low, 3.0, low]), temperature, 20)[2] == 20

    @pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-300, 1e-30, 1e-5, 1e-3])
    def test_tiny_temperatures_take_the_largest_logit(self, temperature: float) -> None:
        assert draws(LOGITS, temperature, 50)[2] == 50
        assert draws(LOGITS * 1e4, temperature, 50)[2] == 50

    def test_tiny_temperatures_share_among_equals(self) -> None:
        counted = draws(torch.tensor([1.0, 5.0, 5.0, 2.0]), 1e-310, 400)
        assert counted[[0, 3]].tolist() == [0, 0]
        assert counted[[1, 2]].min() > 150

    @pytest.mark.parametrize("temperature", [1e10, 1e300, 10**300])
    def test_huge_temperatures_are_uniform(self, temperature: float) -> None:
        logits = torch.tensor([50.0, -50.0, 0.0, 1.0])
        assert chi_square(draws(logits, temperature, 2000), np.full(4, 0.25)) < 16.3

    @pytest.mark.parametrize("shift", [-1e4, 1e4])
    def test_a_constant_does_not_matter(self, shift: float) -> None:
        """Large logits neither overflow nor vanish."""
        logits = torch.tensor([0.0, 1.0, 2.0])
        plain = [sampled_token(logits, 1.0, seed, 0) for seed in range(200)]
        assert [sampled_token(logits + shift, 1.0, seed, 0) for seed in range(200)] == plain

    def test_a_single_token(self) -> None:
        assert draws(torch.tensor([-3.0]), 1.0, 20).tolist() == [20]

    def test_lower_temperature_sharpens(self) -> None:
        logits = torch.tensor([0.0, 1.0])
        shares = [draws(logits, t, 1000)[1] for t in (10.0, 1.0, 0.1)]
        assert shares == sorted(shares)
        assert shares[0] < 600 < shares[1] < 800 < shares[2]

"""The whole step: greedy, draws, forced tokens, bad rows, and independence of the rows."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops.arithmetic import Arithmetic, fixed_arithmetic, free_arithmetic
from deepinfer_neuron.ops.philox import seed_bits
from deepinfer_neuron.ops.sample import Transform, distribution, random_sampling
from deepinfer_neuron.sampling.logprobs import TokenResult
from deepinfer_neuron.sampling.params import SamplingParams
from deepinfer_neuron.sampling.sampler import Sampler
from deepinfer_neuron.sampling.state import SamplingState
from tests.sampling import plain

ARITHMETICS = [free_arithmetic(), fixed_arithmetic()]


def one(
    logits: Tensor, params: SamplingParams, seed: int = 0, arithmetic: Arithmetic | None = None
) -> TokenResult:
    width = logits.shape[-1]
    sampler = Sampler(width, arithmetic or fixed_arithmetic())
    return sampler.sample(logits.clone(), [plain.state(params, width, seed)], [2])[0]


class TestGreedy:
    @pytest.mark.parametrize("arithmetic", ARITHMETICS)
    def test_the_lowest_id_among_the_largest_logits(self, arithmetic: Arithmetic) -> None:
        logits = torch.tensor([[1.0, 7.0, 7.0, -0.0], [0.0, -0.0, 0.0, -1.0]])
        sampler = Sampler(4, arithmetic)
        states = [plain.state(SamplingParams(temperature=0), 4) for _ in range(2)]
        results = sampler.sample(logits, states, [2, 2])
        assert results == [TokenResult(1), TokenResult(0)]

    def test_no_seed_matters_even_for_almost_equal_logits(self) -> None:
        logits = torch.tensor([[5.0, 5.0 + 2.0**-21, 5.0]])
        params = SamplingParams(temperature=0)
        assert {one(logits, params, seed).token_id for seed in range(50)} == {1}

    def test_its_probability_is_that_at_the_lowest_temperature(self) -> None:
        logits = torch.tensor([[5.0, 5.0 + 2.0**-19, 5.0, 1.0]])
        result = one(logits, SamplingParams(temperature=0, logprobs=3))
        expected = plain.log_softmax(logits[0].tolist(), 1e-5)
        assert result.token_id == 1
        assert result.logprob == pytest.approx(expected[1], abs=1e-5)
        assert [token for token, _ in result.top] == [1, 0, 2]
        assert [value for _, value in result.top] == pytest.approx(
            [expected[1], expected[0], expected[2]], abs=1e-5
        )


class TestDraws:
    def test_no_rows(self) -> None:
        assert (
            Sampler(30, fixed_arithmetic(), force_topk=3).sample(torch.zeros(0, 30), [], []) == []
        )

    @pytest.mark.parametrize("width", [7, 500, 9000])
    @pytest.mark.parametrize("seed", [0, 42, 2**63 + 1])
    def test_the_token_is_the_plain_draw_from_the_distribution(self, width: int, seed: int) -> None:
        logits = plain.logits(1, width, seed=width)
        params = SamplingParams(temperature=0.8, top_p=0.97, top_k=400, min_p=1e-4)
        transform = Transform([0.8], [1e-4], [0.97], [400])
        of = distribution(logits, transform, fixed_arithmetic().order)
        expected = plain.draw(of.probabilities[0].tolist(), seed, position=11)
        assert plain.sample(logits, params, seed, position=11).token_id == expected

    def test_the_draw_is_the_public_one_applied_to_the_probabilities(self) -> None:
        logits = plain.logits(6, 300, seed=2)
        order = fixed_arithmetic().order
        of = distribution(logits, Transform([1.3] * 6, [0.0] * 6, [1.0] * 6, [-1] * 6), order)
        exponentials = order.exp(of.logprobs)
        expected = random_sampling(exponentials, seed_bits(range(6)), torch.arange(6) + 4)
        states = [plain.state(SamplingParams(temperature=1.3), 300, seed) for seed in range(6)]
        sampler = Sampler(300, fixed_arithmetic())
        results = sampler.sample(logits, states, [4, 5, 6, 7, 8, 9])
        assert [r.token_id for r in results] == expected.tolist()

    def test_seed_and_position_alone_decide(self) -> None:
        logits = plain.logits(1, 1000, seed=3)
        params = SamplingParams(temperature=2.0)
        tokens = [plain.sample(logits, params, seed, 9).token_id for seed in (5, 5, 6)]
        assert tokens[0] == tokens[1]
        assert tokens[0] != tokens[2]
        assert plain.sample(logits, params, 5, 10).token_id != tokens[0]

    def test_the_coldest_draw_is_nearly_greedy(self) -> None:
        logits = plain.logits(1, 1000, seed=4)
        params = SamplingParams(temperature=1e-5)
        assert {one(logits, params, seed).token_id for seed in range(5)} == {int(logits.argmax())}


class TestForcedTokens:
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_they_replace_the_choice_until_the_list_ends(self, temperature: float) -> None:
        params = SamplingParams(temperature=temperature, golden_token_ids=[4, -1, 6], logprobs=0)
        free = SamplingParams(temperature=temperature)
        state = plain.state(params, 30)
        sampler = Sampler(30, fixed_arithmetic())
        logits = plain.logits(5, 30, seed=5)
        tokens = []
        for position in range(5):
            [result] = sampler.sample(logits[position : position + 1].clone(), [state], [position])
            tokens.append(result.token_id)
            logprobs = plain.log_softmax(logits[position].tolist(), max(temperature, 1e-5))
            expected = max(logprobs[result.token_id], -9999.0)
            assert result.logprob == pytest.approx(expected, rel=1e-6, abs=1e-5)
        chosen = [plain.sample(logits[p], free, 0, p).token_id for p in range(5)]
        assert tokens == [4, chosen[1], 6, chosen[3], chosen[4]]

    def test_a_token_that_the_filter_removed_scores_lowest(self) -> None:
        logits = plain.logits(1, 30, seed=6)
        worst = int(logits.argmin())
        params = SamplingParams(top_k=3, golden_token_ids=[worst], logprobs=1)
        result = plain.sample(logits, params, sum_smaller_probs=True)
        assert result.token_id == worst
        assert result.logprob == -9999.0
        assert result.sum_smaller_probs == 0.0

    def test_they_overrule_the_masks(self) -> None:
        params = SamplingParams(min_tokens=3, max_tokens=5, golden_token_ids=[plain.EOS])
        assert one(plain.logits(1, 30, seed=7), params).token_id == plain.EOS


class TestBadRows:
    @pytest.mark.parametrize("arithmetic", ARITHMETICS)
    @pytest.mark.parametrize("force_topk", [0, 8])
    @pytest.mark.parametrize(
        "params",
        [
            SamplingParams(temperature=0),
            SamplingParams(temperature=0, logprobs=3),
            SamplingParams(top_p=0.9, logprobs=3),
            SamplingParams(logprobs=3, logprobs_mode="raw"),
            SamplingParams(golden_token_ids=[3]),
        ],
    )
    def test_only_the_bad_row_fails(
        self, arithmetic: Arithmetic, force_topk: int, params: SamplingParams
    ) -> None:
        good = plain.logits(1, 64, seed=8)
        rows = good.repeat(6, 1)
        rows[1, 5] = math.nan
        rows[2, 5] = -torch.tensor(math.nan)
        rows[3, 6] = math.inf
        rows[4] = -math.inf
        rows[5, :40] = -math.inf
        sampler = Sampler(64, arithmetic, force_topk=force_topk)
        states = [plain.state(params, 64) for _ in range(6)]
        results = sampler.sample(rows.clone(), states, [2] * 6)
        assert [r.failed is None for r in results] == [True, False, False, False, False, True]
        for row in (1, 2, 3):
            assert "invalid logits" in str(results[row].failed)
        assert "no token is possible" in str(results[4].failed)
        assert results[1] == TokenResult(0, failed=results[1].failed)
        [alone] = sampler.sample(good.clone(), [plain.state(params, 64)], [2])
        assert results[0] == alone
        assert [s.num_output_tokens for s in states] == [1, 0, 0, 0, 0, 1]


KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, logprobs=4),
    SamplingParams(),
    SamplingParams(temperature=0.6, logprobs=0),
    SamplingParams(temperature=1.4, top_p=0.8, logprobs=7),
    SamplingParams(top_k=5, logprobs=7),
    SamplingParams(top_k=50, top_p=0.5),
    SamplingParams(min_p=0.05, logprobs=2),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2, logprobs=1),
    SamplingParams(logit_bias={3: 2.0}, presence_penalty=-0.4),
    SamplingParams(min_tokens=2, stop_token_ids=[4], logprobs=3, logprobs_mode="raw"),
    SamplingParams(golden_token_ids=[8, -1], logprobs=1),
]


def batch_of(width: int, rows: int) -> tuple[Tensor, list[SamplingParams], list[int], list[int]]:
    """Logits, parameters, seeds and positions of some rows, some with ties and masks."""
    logits = plain.logits(rows, width, seed=rows)
    logits[::3] = torch.round(logits[::3] * 2) / 2
    logits[1::4, : width // 2] = -math.inf
    source = random.Random(rows)
    seeds = [source.getrandbits(64) for _ in range(rows)]
    positions = [source.randrange(1000) for _ in range(rows)]
    return logits, [KINDS[row % len(KINDS)] for row in range(rows)], seeds, positions


class TestRowIndependence:
    """With fixed-order arithmetic a row's result is the same in every batch, bit for bit."""

    @pytest.mark.parametrize("options", [{}, {"sum_smaller_probs": True}, {"force_topk": 64}])
    @pytest.mark.parametrize("width", [200, 3001])
    def test_alone_in_a_batch_and_shuffled(self, width: int, options: dict[str, int]) -> None:
        logits, params, seeds, positions = batch_of(width, 65)
        sampler = Sampler(width, fixed_arithmetic(), (9,), **options)  # type: ignore[arg-type]

        def run(rows: list[int]) -> list[TokenResult]:
            states = [
                SamplingState(params[row], seeds[row], [3, row % width], plain.EOS, width)
                for row in rows
            ]
            results: list[TokenResult] = []
            for step in range(2):
                batch = logits[rows].roll(step, -1)
                results += sampler.sample(batch, states, [positions[row] + step for row in rows])
            return results

        together = run(list(range(65)))
        assert all(result.failed is None for result in together)
        for row in range(0, 65, 4):
            assert run([row]) == [together[row], together[65 + row]]
        order = random.Random(1).sample(range(65), 65)
        shuffled = run(order)
        assert shuffled == [together[row] for row in order] + [together[65 + r] for r in order]
        part = order[:17]
        assert run(part) == [together[row] for row in part] + [together[65 + r] for r in part]

    def test_the_released_vocabulary(self) -> None:
        width = 129280
        logits, params, seeds, positions = batch_of(width, 5)
        params = [KINDS[2], KINDS[4], KINDS[5], KINDS[1], KINDS[8]]
        sampler = Sampler(width, fixed_arithmetic())

        def run(rows: list[int]) -> list[TokenResult]:
            states = [plain.state(params[row], width, seeds[row]) for row in rows]
            return sampler.sample(logits[rows], states, [positions[row] for row in rows])

        together = run([0, 1, 2, 3, 4])
        assert run([4, 2, 0]) == [together[4], together[2], together[0]]
        assert run([1]) + run([3]) == [together[1], together[3]]


class TestForceTopk:
    def test_greedy_is_not_affected(self) -> None:
        logits = torch.tensor([[0.0, 2.0, 5.0, 5.0, 1.0]])
        assert plain.sample(logits, SamplingParams(temperature=0), force_topk=2).token_id == 2

    def test_the_draw_runs_over_the_ranks(self) -> None:
        """Log-probabilities and the draw see only the kept logits, ids are mapped back."""
        logits = torch.round(plain.logits(1, 500, seed=9) * 2) / 2
        order = plain.ranks(logits[0].tolist())[:100]
        of = distribution(
            logits[:, order], Transform([1.0], [0.0], [1.0], [-1]), fixed_arithmetic().order
        )
        for seed in range(10):
            result = plain.sample(logits, SamplingParams(logprobs=3), seed, 6, force_topk=100)
            column = plain.draw(of.probabilities[0].tolist(), seed, 6)
            assert column is not None
            assert result.token_id == order[column]
            assert result.logprob == float(of.logprobs[0, column])
            assert [token for token, _ in result.top] == order[:3]

    def test_a_forced_token_outside_the_kept_logits(self) -> None:
        logits = plain.logits(1, 500, seed=10)
        worst = int(logits.argmin())
        params = SamplingParams(golden_token_ids=[worst], logprobs=0)
        result = plain.sample(logits, params, force_topk=64, sum_smaller_probs=True)
        assert (result.token_id, result.logprob) == (worst, -9999.0)
        assert result.sum_smaller_probs == 0.0

    @pytest.mark.parametrize("count", [-1, 501])
    def test_the_count_fits_the_vocabulary(self, count: int) -> None:
        with pytest.raises(ConfigError, match=f"force_topk is {count}; give 0"):
            Sampler(500, fixed_arithmetic(), force_topk=count)

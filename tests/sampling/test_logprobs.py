"""Reported log-probabilities of generated tokens and of prompts."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer_neuron.ops.arithmetic import fixed_arithmetic
from deepinfer_neuron.sampling.params import SamplingParams
from deepinfer_neuron.sampling.sampler import Sampler
from tests.sampling import plain

WIDTH = 60


class TestGeneratedTokens:
    def test_nothing_is_reported_unless_asked_for(self) -> None:
        result = plain.sample(plain.logits(1, WIDTH, 1), SamplingParams())
        assert (result.logprob, result.top, result.sum_smaller_probs) == (None, (), None)

    def test_zero_alternatives_give_the_own_log_probability(self) -> None:
        logits = plain.logits(1, WIDTH, seed=1)
        result = plain.sample(logits, SamplingParams(temperature=0.5, logprobs=0))
        expected = plain.log_softmax(logits[0].tolist(), 0.5)[result.token_id]
        assert result.logprob == pytest.approx(expected, abs=1e-5)
        assert result.top == ()

    def test_alternatives_are_ranked_and_belong_to_the_drawn_distribution(self) -> None:
        logits = plain.logits(1, WIDTH, seed=2)
        values = logits[0].tolist()
        result = plain.sample(logits, SamplingParams(temperature=1.2, top_k=4, logprobs=6))
        left = plain.kept(values, plain.log_softmax(values, 1.2), 1.0, 4)
        logprobs = plain.log_softmax(
            [values[j] if j in left else -math.inf for j in range(WIDTH)], 1.2
        )
        assert [token for token, _ in result.top] == plain.ranks(values)[:6]
        assert [value for _, value in result.top[:4]] == pytest.approx(
            [logprobs[token] for token in left], abs=1e-5
        )
        assert [value for _, value in result.top[4:]] == [-9999.0, -9999.0]
        assert result.logprob == dict(result.top)[result.token_id]

    def test_equal_logits_are_ranked_by_id(self) -> None:
        result = plain.sample(torch.zeros(1, WIDTH), SamplingParams(logprobs=5))
        assert [token for token, _ in result.top] == [0, 1, 2, 3, 4]

    def test_more_alternatives_than_tokens(self) -> None:
        assert len(plain.sample(torch.zeros(1, 10), SamplingParams(logprobs=1000)).top) == 10

    @pytest.mark.parametrize("temperature", [0.0, 0.4])
    def test_raw_ones_ignore_everything_the_request_does(self, temperature: float) -> None:
        logits = plain.logits(1, WIDTH, seed=3)
        params = SamplingParams(
            temperature=temperature,
            top_p=0.5,
            min_tokens=1,
            logit_bias={5: 50.0},
            repetition_penalty=3.0,
            logprobs=3,
            logprobs_mode="raw",
        )
        result = plain.sample(logits, params)
        expected = plain.log_softmax(logits[0].tolist(), 1.0)
        assert result.token_id == 5
        assert result.logprob == pytest.approx(expected[5], abs=1e-5)
        assert [token for token, _ in result.top] == plain.ranks(logits[0].tolist())[:3]
        assert [value for _, value in result.top] == pytest.approx(
            [expected[token] for token, _ in result.top], abs=1e-5
        )

    def test_minus_infinity_is_floored(self) -> None:
        logits = torch.tensor([[0.0, -math.inf, -2.0e4]])
        result = plain.sample(logits, SamplingParams(logprobs=3))
        assert result.top == ((0, 0.0), (2, -9999.0), (1, -9999.0))

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_the_sum_of_smaller_probabilities(self, temperature: float) -> None:
        logits = plain.logits(1, WIDTH, seed=4)
        result = plain.sample(
            logits, SamplingParams(temperature=temperature), sum_smaller_probs=True
        )
        logprobs = plain.log_softmax(logits[0].tolist(), max(temperature, 1e-5))
        own = logprobs[result.token_id]
        expected = math.fsum(math.exp(x) for x in logprobs if x <= own)
        assert result.sum_smaller_probs == pytest.approx(expected, abs=1e-5)
        assert result.logprob is None


class TestPrompts:
    def test_temperature_and_filters_act(self) -> None:
        logits = plain.logits(4, WIDTH, seed=5)
        params = SamplingParams(temperature=0.7, top_k=3, prompt_logprobs=2)
        targets = [int(logits[0].argmax()), int(logits[1].argmin()), 3, 4]
        results = Sampler(WIDTH, fixed_arithmetic()).score_prompt(logits, targets, params)
        assert [r.token_id for r in results] == targets
        for row, result in enumerate(results):
            values = logits[row].tolist()
            left = plain.kept(values, plain.log_softmax(values, 0.7), 1.0, 3)
            masked = [values[j] if j in left else -math.inf for j in range(WIDTH)]
            expected = [max(x, -9999.0) for x in plain.log_softmax(masked, 0.7)]
            assert result.logprob == pytest.approx(expected[targets[row]], abs=1e-5)
            assert [token for token, _ in result.top] == left[:2]
        assert results[1].logprob == -9999.0

    def test_masks_penalties_and_the_blacklist_do_not(self) -> None:
        logits = plain.logits(1, WIDTH, seed=6)
        params = SamplingParams(
            prompt_logprobs=0, min_tokens=2, repetition_penalty=5.0, logit_bias={plain.EOS: -90.0}
        )
        sampler = Sampler(WIDTH, fixed_arithmetic(), blacklist=(plain.EOS,))
        [result] = sampler.score_prompt(logits, [plain.EOS], params)
        expected = plain.log_softmax(logits[0].tolist(), 1.0)[plain.EOS]
        assert result.logprob == pytest.approx(expected, abs=1e-5)

    def test_raw_ones_ignore_temperature_and_filters(self) -> None:
        logits = plain.logits(1, WIDTH, seed=7)
        params = SamplingParams(temperature=0, top_k=1, prompt_logprobs=1, logprobs_mode="raw")
        [result] = Sampler(WIDTH, fixed_arithmetic()).score_prompt(logits, [9], params)
        assert result.logprob == pytest.approx(
            plain.log_softmax(logits[0].tolist(), 1.0)[9], abs=1e-5
        )

    @pytest.mark.parametrize("force_topk", [0, 16])
    @pytest.mark.parametrize("mode", ["processed", "raw"])
    def test_image_places_score_lowest(self, force_topk: int, mode: str) -> None:
        params = SamplingParams.from_mapping({"prompt_logprobs": 2, "logprobs_mode": mode})
        sampler = Sampler(WIDTH, fixed_arithmetic(), force_topk=force_topk)
        results = sampler.score_prompt(plain.logits(2, WIDTH, 8), [WIDTH + 3, -1], params)
        assert [r.logprob for r in results] == [-9999.0, -9999.0]
        assert all(len(r.top) == 2 for r in results)

    def test_force_topk_renormalises(self) -> None:
        logits = plain.logits(1, WIDTH, seed=9)
        order = plain.ranks(logits[0].tolist())
        sampler = Sampler(WIDTH, fixed_arithmetic(), force_topk=8)
        params = SamplingParams(prompt_logprobs=0)
        inside = sampler.score_prompt(logits, [order[7]], params)[0].logprob
        expected = plain.log_softmax([float(logits[0, j]) for j in order[:8]], 1.0)[7]
        assert inside == pytest.approx(expected, abs=1e-5)
        assert sampler.score_prompt(logits, [order[8]], params)[0].logprob == -9999.0

    def test_the_logits_are_not_changed(self) -> None:
        logits = plain.logits(3, WIDTH, seed=10)
        before = logits.clone()
        params = SamplingParams(top_p=0.5, prompt_logprobs=2)
        Sampler(WIDTH, fixed_arithmetic()).score_prompt(logits, [1, 2, 3], params)
        assert torch.equal(logits, before)

    def test_a_bad_row_fails_alone(self) -> None:
        logits = plain.logits(3, WIDTH, seed=11)
        logits[1, 4] = math.nan
        params = SamplingParams(top_k=5, prompt_logprobs=1)
        results = Sampler(WIDTH, fixed_arithmetic()).score_prompt(logits, [1, 2, 3], params)
        assert [r.failed is None for r in results] == [True, False, True]
        assert results[1].token_id == 2

    @pytest.mark.parametrize("width", [WIDTH, 70000])
    @pytest.mark.parametrize("rows", [1, 3, 19])
    def test_pieces_change_nothing(self, rows: int, width: int) -> None:
        """A prompt in pieces gives the results of the whole prompt, bit for bit."""
        logits = plain.logits(20, width, seed=12)
        params = SamplingParams(temperature=0.9, top_p=0.9, prompt_logprobs=3)
        sampler = Sampler(width, fixed_arithmetic())
        targets = list(range(20))
        pieces = [
            result
            for start in range(0, 20, rows)
            for result in sampler.score_prompt(
                logits[start : start + rows], targets[start : start + rows], params
            )
        ]
        assert pieces == sampler.score_prompt(logits, targets, params)

    def test_no_rows(self) -> None:
        params = SamplingParams(prompt_logprobs=0)
        assert Sampler(10, fixed_arithmetic()).score_prompt(torch.zeros(0, 10), [], params) == []

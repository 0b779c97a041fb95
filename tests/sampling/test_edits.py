"""Masks, biases and penalties, alone and through the sampler."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer_neuron.errors import ConfigError, RequestError
from deepinfer_neuron.ops.arithmetic import fixed_arithmetic
from deepinfer_neuron.sampling.masks import apply_bitmask, edit_logits
from deepinfer_neuron.sampling.params import SamplingParams
from deepinfer_neuron.sampling.penalties import TokenCounts, penalise
from deepinfer_neuron.sampling.sampler import Sampler
from deepinfer_neuron.sampling.state import SamplingState
from tests.sampling import plain

WIDTH = 50
NONE = torch.zeros(0, dtype=torch.int64)
TOKEN = st.integers(0, 11)


class TestPenalties:
    @settings(deadline=None, derandomize=True, max_examples=80)
    @given(
        st.lists(TOKEN, max_size=12),
        st.lists(TOKEN, max_size=200),
        st.floats(0.5, 2.0),
        st.floats(-2.0, 2.0),
        st.floats(-2.0, 2.0),
        st.integers(0, 1000),
    )
    def test_equals_the_plain_rule(
        self,
        prompt: list[int],
        output: list[int],
        repetition: float,
        frequency: float,
        presence: float,
        seed: int,
    ) -> None:
        params = SamplingParams(
            repetition_penalty=repetition,
            frequency_penalty=frequency,
            presence_penalty=presence,
        )
        state = SamplingState(params, 0, prompt, plain.EOS, 12)
        for token in output:
            state.accept(token)
        logits = plain.logits(1, 12, seed)
        expected = plain.penalised(logits[0].tolist(), prompt, output, params)
        edit_logits(logits, [state], NONE)
        assert logits[0].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)

    def test_the_prompt_counts_for_repetition_only(self) -> None:
        both = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5)
        state = SamplingState(both, 0, [3, 4, 4], plain.EOS, 6)
        state.accept(4)
        state.accept(4)
        logits = torch.tensor([[1.0, 1.0, 1.0, 1.0, -1.0, 1.0]])
        edit_logits(logits, [state], NONE)
        assert logits.tolist() == [[1.0, 1.0, 1.0, 0.5, -2.0 - 1.0 - 1.0, 1.0]]

    def test_image_places_of_the_prompt_are_passed_over(self) -> None:
        state = SamplingState(SamplingParams(repetition_penalty=2.0), 0, [-1, 2, 99], 1, 6)
        assert state.counts is not None
        assert state.counts.ids.tolist() == [2]

    def test_counts_grow(self) -> None:
        counts = TokenCounts([])
        for token in range(1000):
            counts.add(token % 500)
        assert counts.ids.tolist() == list(range(500))
        assert counts.counts.tolist() == [2.0] * 500

    def test_rows_with_different_penalties(self) -> None:
        logits = torch.ones(3, 4)
        first, second = TokenCounts([0]), TokenCounts([])
        second.add(1)
        penalise(logits, [2, 0], [first, second], [2.0, 1.0], [0.0, 0.25], [0.0, 0.5])
        assert logits.tolist() == [[1.0, 0.25, 1.0, 1.0], [1.0] * 4, [0.5, 1.0, 1.0, 1.0]]

    def test_a_request_without_penalties_keeps_no_counts(self) -> None:
        assert plain.state(SamplingParams(), WIDTH).counts is None

    def test_a_generated_token_is_penalised_in_the_next_step(self) -> None:
        sampler = Sampler(4, fixed_arithmetic())
        state = plain.state(SamplingParams(temperature=0, presence_penalty=1.0), 4)
        logits = torch.tensor([[0.0, 0.0, 2.0, 1.5]])
        tokens = [sampler.sample(logits.clone(), [state], [p])[0].token_id for p in range(4)]
        assert tokens == [2, 3, 2, 2]


class TestMasks:
    def test_the_blacklist(self) -> None:
        logits = plain.logits(1, WIDTH, seed=1)
        order = plain.ranks(logits[0].tolist())
        sampler = Sampler(WIDTH, fixed_arithmetic(), blacklist=tuple(order[:3]))
        state = plain.state(SamplingParams(temperature=0), WIDTH)
        assert sampler.sample(logits, [state], [2])[0].token_id == order[3]

    @pytest.mark.parametrize("token", [-1, WIDTH])
    def test_a_blacklisted_token_exists(self, token: int) -> None:
        with pytest.raises(ConfigError, match=f"names token {token}; give ids from 0 to 49"):
            Sampler(WIDTH, fixed_arithmetic(), blacklist=(0, token))

    def test_bias_is_added_and_can_decide(self) -> None:
        logits = plain.logits(1, WIDTH, seed=2)
        assert (
            plain.sample(logits, SamplingParams(temperature=0, logit_bias={7: 100})).token_id == 7
        )
        best = int(logits.argmax())
        ban = SamplingParams(temperature=0, logit_bias={best: -100.0})
        assert plain.sample(logits, ban).token_id == plain.ranks(logits[0].tolist())[1]

    def test_bias_comes_before_the_penalties(self) -> None:
        params = SamplingParams(logit_bias={2: 5.0}, repetition_penalty=2.0)
        state = SamplingState(params, 0, [2], plain.EOS, 4)
        logits = torch.tensor([[0.0, 0.0, -1.0, 0.0]])
        edit_logits(logits, [state], NONE)
        assert logits.tolist() == [[0.0, 0.0, 2.0, 0.0]]

    def test_min_tokens_excludes_every_way_to_stop(self) -> None:
        params = SamplingParams(min_tokens=2, stop_token_ids=[5, 6])
        state = plain.state(params, WIDTH)
        for expected in [(plain.EOS, 5, 6), (plain.EOS, 5, 6), ()]:
            assert state.excluded_tokens() == expected
            state.accept(9)

    @pytest.mark.parametrize(("setting", "excluded"), [(0, ()), (1, (plain.EOS,)), (2, ())])
    def test_no_end_of_sequence_as_the_first_token(
        self, setting: int, excluded: tuple[int, ...]
    ) -> None:
        state = plain.state(SamplingParams(first_n_token_no_eos=setting), WIDTH)
        assert state.excluded_tokens() == excluded
        state.accept(3)
        assert state.excluded_tokens() == ()

    def test_an_excluded_end_of_sequence_is_not_emitted(self) -> None:
        logits = plain.logits(1, WIDTH, seed=3)
        logits[0, plain.EOS] = 50.0
        for params in [
            SamplingParams(temperature=0, first_n_token_no_eos=1),
            SamplingParams(temperature=1.0, min_tokens=1),
        ]:
            assert plain.sample(logits, params).token_id != plain.EOS
        assert plain.sample(logits, SamplingParams(temperature=0)).token_id == plain.EOS

    def test_nothing_to_do_leaves_the_logits_alone(self) -> None:
        logits = plain.logits(3, WIDTH, seed=4)
        before = logits.clone()
        edit_logits(logits, [plain.state(SamplingParams(), WIDTH) for _ in range(3)], NONE)
        assert torch.equal(logits, before)

    def test_tokens_outside_the_vocabulary_are_refused(self) -> None:
        with pytest.raises(RequestError, match=r"stop_token_ids names token 50"):
            plain.state(SamplingParams(stop_token_ids=[50]), WIDTH)


class Alphabet:
    """A grammar that allows the tokens of a fixed set."""

    def __init__(self, allowed: set[int], trouble: str = "") -> None:
        self.allowed = allowed
        self.trouble = trouble
        self.accepted: list[int] = []

    def constrained(self) -> bool:
        return True

    def accept(self, token: int) -> bool:
        if self.trouble == "accept":
            raise RuntimeError("broken automaton")
        self.accepted.append(token)
        return token in self.allowed and self.trouble != "refuse"

    def fill_bitmask(self, bitmask: Tensor) -> None:
        if self.trouble == "fill":
            raise RuntimeError("broken automaton")
        words = [0] * len(bitmask)
        for token in self.allowed:
            words[token // 32] |= 1 << (token % 32)
        bitmask[:] = torch.tensor([w - 2**32 if w >= 2**31 else w for w in words])


class Free(Alphabet):
    """A grammar that does not apply yet."""

    def constrained(self) -> bool:
        return False

    def fill_bitmask(self, bitmask: Tensor) -> None:
        raise AssertionError("the mask of an unconstrained row is not needed")


def with_grammar(matcher: Alphabet, params: SamplingParams, width: int = WIDTH) -> SamplingState:
    return SamplingState(params, 3, [2], plain.EOS, width, matcher)


class TestGrammars:
    @pytest.mark.parametrize("width", [31, 32, 33, 50, 64])
    def test_bits_at_the_borders_of_words(self, width: int) -> None:
        allowed = {t for t in (0, 30, 31, 32, 63) if t < width}
        words = torch.zeros(2, -(-width // 32), dtype=torch.int32)
        Alphabet(allowed).fill_bitmask(words[1])
        logits = torch.zeros(2, width)
        apply_bitmask(logits, words, [1])
        assert logits[0].tolist() == [0.0] * width
        assert {j for j in range(width) if logits[1, j] == 0.0} == allowed
        assert set(logits[1].tolist()) <= {0.0, -math.inf}

    def test_columns_behind_the_mask_stay(self) -> None:
        logits = torch.zeros(1, 40)
        apply_bitmask(logits, torch.zeros(1, 1, dtype=torch.int32), [0])
        assert logits[0].tolist() == [-math.inf] * 32 + [0.0] * 8

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_only_allowed_tokens_are_chosen(self, temperature: float) -> None:
        matcher = Alphabet({31, 32, 49})
        state = with_grammar(matcher, SamplingParams(temperature=temperature))
        sampler = Sampler(WIDTH, fixed_arithmetic())
        for position in range(20):
            [result] = sampler.sample(plain.logits(1, WIDTH, position), [state], [position])
            assert result.failed is None
            assert result.token_id in matcher.allowed
        assert len(matcher.accepted) == state.num_output_tokens == 20

    def test_a_grammar_that_does_not_apply_yet_still_sees_the_tokens(self) -> None:
        matcher = Free(set(range(WIDTH)))
        logits = plain.logits(1, WIDTH, seed=5)
        state = with_grammar(matcher, SamplingParams(temperature=0))
        Sampler(WIDTH, fixed_arithmetic()).sample(logits.clone(), [state], [1])
        assert matcher.accepted == logits.argmax(-1).tolist()

    @pytest.mark.parametrize(
        ("build", "reason"),
        [
            (lambda: Alphabet({3}, "fill"), "the grammar failed: broken automaton"),
            (lambda: Alphabet({3}, "accept"), "the grammar failed: broken automaton"),
            (lambda: Alphabet({3}, "refuse"), "the grammar refused token 3"),
            (lambda: Alphabet(set()), "no token is possible"),
        ],
    )
    def test_a_failure_stays_in_its_row(self, build: Callable[[], Alphabet], reason: str) -> None:
        params = SamplingParams(logprobs=2)
        states = [
            plain.state(params, WIDTH, seed=1),
            with_grammar(build(), params),
            plain.state(params, WIDTH, seed=2),
        ]
        sampler = Sampler(WIDTH, fixed_arithmetic())
        logits = plain.logits(3, WIDTH, seed=6)
        results = sampler.sample(logits.clone(), states, [1, 1, 1])
        assert results[1].failed is not None
        assert reason in results[1].failed
        assert (results[1].token_id, states[1].num_output_tokens) == (0, 0)
        for row, seed in ((0, 1), (2, 2)):
            assert results[row] == plain.sample(logits[row], params, seed, position=1)
        assert sampler.sample(logits.clone(), states, [2, 2, 2])[1].failed == results[1].failed

"""Proposals in the sampler: verified with the request's own filters, masks and penalties."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from deepinfer_neuron.ops.arithmetic import fixed_arithmetic
from deepinfer_neuron.sampling.drafts import Draft, legal_drafts, split_budget, survival
from deepinfer_neuron.sampling.params import SamplingParams
from deepinfer_neuron.sampling.sampler import Sampler
from deepinfer_neuron.sampling.state import SamplingState

WIDTH = 8


def states(count: int, **wishes: object) -> list[SamplingState]:
    params = SamplingParams(**wishes)  # type: ignore[arg-type]
    return [SamplingState(params, 1000 + row, [], WIDTH - 1, WIDTH) for row in range(count)]


def sampler(force_topk: int = 0) -> Sampler:
    return Sampler(WIDTH, fixed_arithmetic(), force_topk=force_topk)


class TestDraws:
    """Proposals drawn by ``propose`` and verified by ``sample``, 12,000 rows each."""

    ROWS = 12_000
    CHI_SQUARE_999 = 24.322
    """Seven degrees of freedom, from a printed table."""

    @pytest.mark.parametrize(
        ("wishes", "force_topk"),
        [
            ({"temperature": 0.7}, 0),
            ({"temperature": 1.3, "top_k": 3}, 0),
            ({"temperature": 1.0, "top_p": 0.8}, 0),
            ({"temperature": 1.0, "logit_bias": {2: 1.5}}, 0),
            ({"temperature": 1.0}, 4),
        ],
    )
    @pytest.mark.parametrize("noise", [0.5, 3.0])
    def test_the_law_is_that_without_drafts(
        self, wishes: dict[str, object], force_topk: int, noise: float
    ) -> None:
        torch.manual_seed(5)
        target = torch.randn(WIDTH)
        proposal = target + noise * torch.randn(WIDTH)
        rows = states(self.ROWS, **wishes)
        positions = [3] * self.ROWS
        chooser = sampler(force_topk)
        tokens, laws = chooser.propose(proposal.repeat(self.ROWS, 1), rows, positions)
        drafts = [Draft(t, 1.0, law) for t, law in zip(tokens.tolist(), laws, strict=True)]
        results = chooser.sample(target.repeat(self.ROWS, 1), rows, positions, drafts)
        counts = np.bincount([result.token_id for result in results], minlength=WIDTH)
        edited = target.clone()
        for token, amount in dict(wishes.get("logit_bias", {})).items():  # type: ignore[call-overload]
            edited[token] += amount
        expected = self.law(edited, wishes, force_topk) * self.ROWS
        assert not counts[expected == 0].any()
        kept = expected > 0
        value = (((counts - expected) ** 2)[kept] / expected[kept]).sum()
        assert value < self.CHI_SQUARE_999

    @staticmethod
    def law(logits: torch.Tensor, wishes: dict[str, object], force_topk: int) -> np.ndarray:
        """Temperature, then ``top_k``, then ``top_p``, in fp64."""
        x = logits.double().numpy() / float(wishes["temperature"])  # type: ignore[arg-type]
        order = np.argsort(-x, kind="stable")
        p = np.exp(x - x.max())
        p[order[force_topk or WIDTH :]] = 0.0
        p /= p.sum()
        p[order[int(wishes.get("top_k", WIDTH)) :]] = 0.0  # type: ignore[call-overload]
        before = np.cumsum(p[order]) - p[order]
        p[order[before > float(wishes.get("top_p", 1.0))]] = 0.0  # type: ignore[arg-type]
        return p / p.sum()

    def test_a_certain_proposal_may_be_any_token(self) -> None:
        """Without a law (a recorded draft) it counts as proposed with certainty."""
        torch.manual_seed(6)
        target = torch.randn(WIDTH)
        rows = states(self.ROWS, temperature=1.0)
        results = sampler().sample(
            target.repeat(self.ROWS, 1), rows, [0] * self.ROWS, [Draft(4)] * self.ROWS
        )
        counts = np.bincount([result.token_id for result in results], minlength=WIDTH)
        expected = target.double().softmax(-1).numpy() * self.ROWS
        assert (((counts - expected) ** 2) / expected).sum() < self.CHI_SQUARE_999

    def test_greedy_forced_and_scored_rows_ignore_the_proposal(self) -> None:
        torch.manual_seed(7)
        logits = torch.randn(3, WIDTH)
        wishes = [
            SamplingParams(temperature=0.0, logprobs=2),
            SamplingParams(temperature=0.0, repetition_penalty=1.4, logprobs=1),
            SamplingParams(temperature=1.0, golden_token_ids=(6,), logprobs=1),
        ]

        def run(drafts: Sequence[Draft | None]) -> list[object]:
            rows = [SamplingState(p, 9, [1, 2], WIDTH - 1, WIDTH) for p in wishes]
            return list(sampler().sample(logits.clone(), rows, [4, 4, 4], drafts))

        assert run([Draft(1), None, Draft(2)]) == run([])


class Follower:
    """A grammar that wants the tokens 1, 2, 3 in order and then anything."""

    def __init__(self, breaks_at: int = -1) -> None:
        self.taken: list[int] = []
        self.breaks_at = breaks_at
        self.allowed = set(range(32))
        self.asked: list[int] = []

    def constrained(self) -> bool:
        return True

    def accept(self, token: int) -> bool:
        self.asked.append(token)
        if len(self.taken) == self.breaks_at:
            raise RuntimeError("too costly")
        if len(self.taken) < 3 and token != len(self.taken) + 1:
            return False
        self.taken.append(token)
        return True

    def rollback(self, count: int) -> None:
        del self.taken[len(self.taken) - count :]

    def fill_bitmask(self, bitmask: torch.Tensor) -> None:
        bitmask[0] = sum(1 << token for token in self.allowed if token < 31)


class TestGrammar:
    def state(self, temperature: float, breaks_at: int = -1) -> tuple[SamplingState, Follower]:
        follower = Follower(breaks_at)
        params = SamplingParams(temperature=temperature)
        return SamplingState(params, 1, [], WIDTH - 1, WIDTH, follower), follower

    def test_nothing_behind_a_refused_draft_is_verified(self) -> None:
        state, follower = self.state(0.0)
        assert legal_drafts(state, [Draft(1), Draft(2), Draft(5), Draft(1)]) == 2
        assert follower.taken == []

    def test_a_row_that_draws_keeps_the_refused_one(self) -> None:
        state, follower = self.state(1.0)
        assert legal_drafts(state, [Draft(1), Draft(5), Draft(1)]) == 2
        assert follower.taken == []

    def test_all_legal(self) -> None:
        state, follower = self.state(0.0)
        assert legal_drafts(state, [Draft(1), Draft(2), Draft(3), Draft(7)]) == 4
        assert follower.taken == []

    def test_a_grammar_that_breaks_ends_its_sequence(self) -> None:
        state, _ = self.state(0.0, breaks_at=1)
        assert legal_drafts(state, [Draft(1), Draft(2)]) == 0
        assert state.failure == "the grammar failed: too costly"

    def test_the_mask_is_asked_before_the_grammar(self) -> None:
        """A token that the mask excludes never reaches ``accept``."""
        state, follower = self.state(0.0)
        follower.allowed = {1, 2}
        assert legal_drafts(state, [Draft(1), Draft(2), Draft(3)]) == 2
        assert follower.asked == [1, 2]

    def test_no_grammar(self) -> None:
        (state,) = states(1, temperature=0.0)
        assert legal_drafts(state, [Draft(1), Draft(2)]) == 2


class TestSplit:
    def test_worked_example(self) -> None:
        """Six drafts over two sequences; chances .9 .72 .36 .144 .043 and .6 .3 .27 .243 .219."""
        first = survival([0.9, 0.8, 0.5, 0.4, 0.3])
        second = survival([0.6, 0.5, 0.9, 0.9, 0.9])
        assert np.allclose(first, [0.9, 0.72, 0.36, 0.144, 0.0432])
        assert split_budget([first, second], 6) == [3, 3]

    def test_ties_go_to_the_earlier_sequence(self) -> None:
        ones = survival([1.0, 1.0])
        assert split_budget([ones, ones, ones], 3) == [2, 1, 0]

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(seed=st.integers(0, 1 << 32), total=st.integers(-1, 40))
    def test_the_best_are_taken_and_lead_their_sequence(self, seed: int, total: int) -> None:
        rng = random.Random(seed)
        levels = [0.0, 0.25, 0.5, 1.0]
        chances = [
            survival([rng.choice(levels) for _ in range(rng.randint(0, 7))])
            for _ in range(rng.randint(1, 6))
        ]
        counts = split_budget(chances, total)
        available = sum(len(row) for row in chances)
        assert sum(counts) == max(0, min(total, available))
        taken = [float(row[:n].min()) for row, n in zip(chances, counts, strict=True) if n]
        left = [float(row[n]) for row, n in zip(chances, counts, strict=True) if n < len(row)]
        assert min(taken, default=math.inf) >= max(left, default=-math.inf)


def test_proposals_repeat_and_differ_from_target_draws() -> None:
    """The same words for the same seed and place; others than the target's."""
    torch.manual_seed(8)
    logits = torch.zeros(200, WIDTH)
    rows = states(200, temperature=1.0)
    once, _ = sampler().propose(logits, rows, list(range(200)))
    again, _ = sampler().propose(logits, rows, list(range(200)))
    drawn = sampler().sample(logits.clone(), rows, list(range(200)))
    assert torch.equal(once, again)
    agreed = sum(a == b.token_id for a, b in zip(once.tolist(), drawn, strict=True))
    assert agreed < 60

"""Verified drafts follow the target's law, whatever was proposed.

Expected laws come from plain fp64 formulas; the generator's words are independent per row.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from deepinfer_neuron.ops.arithmetic import FixedOrder, FreeOrder
from deepinfer_neuron.ops.philox import draw_words
from deepinfer_neuron.ops.rejection import PENALTY, verify_drafts
from deepinfer_neuron.ops.sample import Distribution, fixed_point_draw, fixed_point_weights

SAMPLES = 1 << 20
"""Rows per law, more than a million."""

CHI_SQUARE_999 = {2: 13.816, 3: 16.266, 4: 18.467, 5: 20.515}
"""Quantiles from a printed table, by degrees of freedom."""

FEWER = 1 << 16

TARGET = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04, 0.0])
LAWS = {
    "the target itself": TARGET,
    "nearly the target": torch.tensor([0.39, 0.31, 0.2, 0.05, 0.04, 0.01]),
    "bad": torch.tensor([0.01, 0.02, 0.07, 0.3, 0.6, 0.0]),
    "mostly outside what the target keeps": torch.tensor([0.1, 0.0, 0.0, 0.0, 0.0, 0.9]),
    "certain": torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0]),
}


def law(probabilities: Tensor, rows: int) -> Distribution:
    table = probabilities.expand(rows, -1).clone()
    return Distribution(table.log(), table)


def draw(probabilities: Tensor, seeds: Tensor) -> Tensor:
    weights = fixed_point_weights(probabilities.expand(len(seeds), -1))
    return fixed_point_draw(weights, draw_words(seeds, torch.zeros_like(seeds)))


def check_law(tokens: Tensor, target: Tensor) -> None:
    """Chi-square at 0.1 %, and no token the target excludes; the penalty moves 5e-5 at most."""
    counts = torch.bincount(tokens, minlength=len(target)).double()
    assert not counts[target == 0].any()
    kept = target > 0
    expected = target[kept].double() / target.double().sum() * len(tokens)
    value = float(((counts[kept] - expected) ** 2 / expected).sum())
    # The penalty's bias is far below the noise: at most 5e-5 of each probability.
    slack = float(((PENALTY * expected) ** 2 / expected).sum())
    assert value < CHI_SQUARE_999[int(kept.sum()) - 1] + 2 * math.sqrt(slack * value) + slack


@pytest.mark.parametrize("name", list(LAWS))
def test_tokens_follow_the_target(name: str) -> None:
    seeds = torch.arange(SAMPLES) + 12345
    drafts = draw(LAWS[name], seeds + (1 << 40))
    tokens = verify_drafts(
        law(TARGET, SAMPLES), law(LAWS[name], SAMPLES).logprobs, drafts, seeds,
        torch.full_like(seeds, 7), FreeOrder(),
    )  # fmt: skip
    check_law(tokens, TARGET)


def test_refused_drafts_leave_the_target_whole() -> None:
    """-1 with a law of nothing: the residual is the target."""
    seeds = torch.arange(SAMPLES)
    nothing = torch.full((SAMPLES, len(TARGET)), -math.inf)
    tokens = verify_drafts(
        law(TARGET, SAMPLES), nothing, torch.full_like(seeds, -1), seeds, seeds * 0, FreeOrder()
    )
    check_law(tokens, TARGET)


def test_acceptance_is_one_minus_the_distance_of_the_laws() -> None:
    seeds = torch.arange(FEWER)
    for proposal in LAWS.values():
        drafts = draw(proposal, seeds + (1 << 40))
        tokens = verify_drafts(
            law(TARGET, FEWER), law(proposal, FEWER).logprobs, drafts, seeds, seeds * 0,
            FreeOrder(),
        )  # fmt: skip
        overlap = float(torch.minimum(TARGET, proposal).sum())
        # A replacement may be the draft again, by at most the penalty's share.
        assert abs(float((tokens == drafts).double().mean()) - overlap) < 3e-3


def test_a_fault_of_one_percent_is_seen() -> None:
    """Always keeping the draft of a law 1 % away fails the same check."""
    tokens = draw(LAWS["nearly the target"], torch.arange(SAMPLES))
    with pytest.raises(AssertionError):
        check_law(tokens, TARGET)


def test_equal_laws_always_accept() -> None:
    seeds = torch.arange(10_000)
    drafts = draw(TARGET, seeds)
    of = law(TARGET, 10_000)
    tokens = verify_drafts(of, of.logprobs, drafts, seeds, seeds, FixedOrder())
    assert torch.equal(tokens, drafts)


def test_nothing_left_over_gives_the_most_probable_token_lowest_id() -> None:
    target = torch.tensor([0.1, 0.45, 0.45])
    of = law(target, 64)
    larger = of.logprobs + 1.0
    tokens = verify_drafts(
        of, larger, torch.full((64,), -1), torch.arange(64), torch.arange(64), FreeOrder()
    )
    assert tokens.tolist() == [1] * 64


def test_the_known_word_decides_at_its_threshold() -> None:
    """Seed 42, position 10: the word is 0xa642fd96, so ratios above 0.64946... accept."""
    seeds, positions = torch.tensor([42]), torch.tensor([10])
    for ratio, accepted in ((0.6494, False), (0.6495, True)):
        target = torch.tensor([[ratio, 1 - ratio]])
        of = Distribution(target.log(), target)
        certain = torch.tensor([[0.0, -math.inf]])
        token = verify_drafts(of, certain, torch.tensor([0]), seeds, positions, FreeOrder())
        assert (token.item() == 0) is accepted


def test_rows_do_not_depend_on_each_other() -> None:
    torch.manual_seed(3)
    logits, other = torch.randn(40, 300), torch.randn(40, 300)
    of = Distribution(logits.log_softmax(-1), logits.softmax(-1))
    laws = other.log_softmax(-1)
    drafts, seeds = torch.randint(-1, 300, (40,)), torch.randint(0, 1 << 40, (40,))
    positions = torch.arange(40)
    whole = verify_drafts(of, laws, drafts, seeds, positions, FixedOrder())
    for row in range(40):
        one = slice(row, row + 1)
        alone = verify_drafts(
            Distribution(of.logprobs[one], of.probabilities[one]), laws[one], drafts[one],
            seeds[one], positions[one], FixedOrder(),
        )  # fmt: skip
        assert alone.item() == whole[row].item()

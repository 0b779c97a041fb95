"""Temperature, min-p, top-k and top-p, and ranking.

The acceptance conditions are the ones that DeepInfer's own filter has to meet; the exact tests
compare with fractions.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer_neuron.ops.arithmetic import FixedOrder, FreeOrder, Order
from deepinfer_neuron.ops.sample import (
    Distribution,
    Transform,
    argmax,
    distribution,
    keep,
    leading,
    log_softmax,
    sum_smaller_probs,
)
from tests.sampling import plain

ORDERS = [FreeOrder(), FixedOrder()]
INFINITY = math.inf


def processed(
    logits: Tensor,
    temperature: float = 1.0,
    min_p: float = 0.0,
    top_p: float = 1.0,
    top_k: int = -1,
    order: Order | None = None,
) -> Distribution:
    rows = logits.shape[0]
    transform = Transform([temperature] * rows, [min_p] * rows, [top_p] * rows, [top_k] * rows)
    return distribution(logits, transform, order or FixedOrder())


def kept_ids(of: Distribution, row: int = 0) -> list[int]:
    return (of.logprobs[row] > -INFINITY).nonzero()[:, 0].tolist()


# Values that tie often, both zeros among them.
LOGIT = st.one_of(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5]), st.floats(-30, 30, width=32))


class TestRanking:
    @settings(deadline=None, derandomize=True, max_examples=80)
    @given(st.lists(st.one_of(LOGIT, st.just(-INFINITY)), min_size=1, max_size=300), st.data())
    def test_value_descending_then_id_ascending(
        self, values: list[float], data: st.DataObject
    ) -> None:
        count = data.draw(st.integers(1, len(values)))
        expected = plain.ranks(values)[:count]
        assert leading(torch.tensor([values]), count).tolist() == [expected]

    @pytest.mark.parametrize("count", [1, 5, 31, 32, 200, 1000, 5000])
    def test_wide_rows_with_many_ties(self, count: int) -> None:
        values = torch.round(plain.logits(3, 5000, seed=1) * 4) / 4
        expected = [plain.ranks(row)[:count] for row in values.tolist()]
        assert leading(values, count).tolist() == expected

    def test_argmax_takes_the_lowest_id(self) -> None:
        rows = torch.tensor([[1.0, 3.0, 3.0], [-0.0, 0.0, -1.0], [-INFINITY, -2.0, -2.0]])
        assert argmax(rows).tolist() == [1, 0, 1]


class TestLogSoftmax:
    @pytest.mark.parametrize("order", ORDERS)
    @pytest.mark.parametrize("temperature", [1e-5, 0.01, 0.7, 1.0, 1.5, 1e6])
    def test_equals_double_precision(self, order: Order, temperature: float) -> None:
        logits = plain.logits(2, 500, seed=2)
        logits[1, 7] = -INFINITY
        result = log_softmax(logits, [temperature] * 2, order)
        for row in range(2):
            expected = plain.log_softmax(logits[row].tolist(), temperature)
            # The scaled logits are rounded to fp32, at 1e-5 they reach -1e6.
            assert result[row].tolist() == pytest.approx(expected, rel=2e-7, abs=2e-6)

    def test_the_maximum_is_subtracted_before_the_scaling(self) -> None:
        """20 and its lower neighbour differ by 2^-19, by 0.19 at the temperature 1e-5.

        Multiplied first, both become numbers near 2 million that fp32 spaces by 0.125.
        """
        below = float(np.nextafter(np.float32(20.0), np.float32(0.0)))
        logits = torch.tensor([[20.0, below]])
        [[upper, lower]] = log_softmax(logits, [1e-5], FixedOrder()).tolist()
        assert upper - lower == pytest.approx(2.0**-19 * 1e5, abs=1e-6)
        scaled = logits * 1e5
        assert abs(float(scaled[0, 0] - scaled[0, 1]) - 2.0**-19 * 1e5) > 0.05

    def test_min_p_is_relative_to_the_largest_probability(self) -> None:
        logits = torch.log(torch.tensor([[0.4, 0.39, 0.2, 0.01]]))
        result = log_softmax(logits, [1.0], FixedOrder(), [0.4]).exp()
        assert result[0].tolist() == pytest.approx([0.4 / 0.99, 0.39 / 0.99, 0.2 / 0.99, 0.0])
        assert kept_ids(processed(logits, min_p=1.0)) == [0]
        assert kept_ids(processed(torch.zeros(1, 3), min_p=1.0)) == [0, 1, 2]

    def test_min_p_of_one_row_leaves_the_others_alone(self) -> None:
        logits = plain.logits(2, 64, seed=3)
        both = log_softmax(logits, [0.8, 0.8], FixedOrder(), [0.0, 0.3])
        assert torch.equal(both[0], log_softmax(logits[:1], [0.8], FixedOrder())[0])
        assert torch.equal(both[1], log_softmax(logits[1:], [0.8], FixedOrder(), [0.3])[0])
        expected = plain.log_softmax(logits[1].tolist(), 0.8, 0.3)
        assert both[1].tolist() == pytest.approx(expected, abs=1e-5)


class TestTopPAndTopK:
    @settings(deadline=None, derandomize=True, max_examples=150)
    @given(
        st.lists(LOGIT, min_size=1, max_size=120),
        st.one_of(st.floats(0.01, 1.0), st.sampled_from([2.0**-52, 0.25, 0.5, 0.75, 1.0])),
        st.integers(-1, 130).filter(lambda k: k != 0),
        st.sampled_from([0.05, 0.8, 1.0, 2.0]),
    )
    def test_the_kept_set_equals_exact_sums(
        self, values: list[float], top_p: float, top_k: int, temperature: float
    ) -> None:
        logits = torch.tensor([values])
        logprobs = log_softmax(logits, [temperature], FixedOrder())[0]
        ids, renormalised = keep(logits[0], logprobs, top_p, top_k, FixedOrder())
        expected = plain.kept(values, logprobs.tolist(), top_p, top_k)
        assert ids.tolist() == expected
        mass = math.fsum(math.exp(x) for x in logprobs[expected].tolist())
        shifted = [x - math.log(mass) for x in logprobs[expected].tolist()]
        assert renormalised.tolist() == pytest.approx(shifted, abs=1e-5)

    @pytest.mark.parametrize("order", ORDERS)
    @pytest.mark.parametrize("temperature", [1e-5, 0.01, 0.3, 1.0, 1.5])
    @pytest.mark.parametrize("top_p", [0.1, 0.5, 0.95, 0.999])
    @pytest.mark.parametrize("top_k", [-1, 3, 700])
    def test_acceptance(self, order: Order, temperature: float, top_p: float, top_k: int) -> None:
        logits = plain.logits(2, 3000, seed=5)
        of = processed(logits, temperature, top_p=top_p, top_k=top_k, order=order)
        full = log_softmax(logits, [temperature] * 2, order).to(torch.float64).exp()
        for row in range(2):
            kept = of.logprobs[row] > -INFINITY
            mass = float(full[row][kept].sum())
            assert kept.any()
            total = float(of.logprobs[row][kept].to(torch.float64).exp().sum())
            assert abs(total - 1.0) < 1e-5
            assert logits[row][kept].min() >= logits[row][~kept].max()
            assert mass - float(full[row][kept].min()) <= top_p + 1e-4
            assert mass > top_p - 1e-4 or int(kept.sum()) == top_k

    @pytest.mark.parametrize(
        ("top_p", "top_k", "length"),
        [(0.75, -1, 769), (0.75 + 0.5 / 1024, -1, 769), (1.0, 768, 768), (0.75, 700, 700)],
    )
    def test_equal_logits_are_cut_in_id_order(self, top_p: float, top_k: int, length: int) -> None:
        ids = kept_ids(processed(torch.full((1, 1024), 3.0), top_p=top_p, top_k=top_k))
        # At 0.75 the sum before rank 768 is the bound up to the rounding of a probability.
        assert ids == list(range(len(ids)))
        assert abs(len(ids) - length) <= (1 if top_p == 0.75 and top_k == -1 else 0)

    def test_both_zeros_are_equal(self) -> None:
        logits = torch.tensor([[-0.0, 0.0, -0.0, 0.0, -1.0]])
        assert kept_ids(processed(logits, top_k=3)) == [0, 1, 2]
        assert kept_ids(processed(logits, top_p=0.4)) == [0, 1]

    def test_a_tiny_top_p_keeps_one_token(self) -> None:
        logits = plain.logits(1, 200, seed=6)
        assert kept_ids(processed(logits, top_p=2.0**-52)) == argmax(logits).tolist()

    @pytest.mark.parametrize("top_k", [-1, 64, 65, 2**31 - 1])
    def test_limits_that_are_off_change_nothing(self, top_k: int) -> None:
        logits = plain.logits(3, 64, seed=7)
        expected = log_softmax(logits, [1.0] * 3, FixedOrder())
        assert torch.equal(processed(logits, top_k=top_k).logprobs, expected)

    def test_rows_with_few_finite_logits(self) -> None:
        logits = torch.full((1, 500), -INFINITY)
        logits[0, 100:116] = torch.arange(16.0)
        finite = list(range(100, 116))
        assert kept_ids(processed(logits, top_k=20)) == finite
        assert kept_ids(processed(logits, top_p=1.0 - 2.0**-24)) == finite
        logprobs = log_softmax(logits, [1.0], FixedOrder())[0]
        ids, _ = keep(logits[0], logprobs, 1.0 - 2.0**-24, -1, FixedOrder())
        assert ids.tolist() == finite[::-1]
        assert kept_ids(processed(logits, top_k=2)) == [114, 115]

    def test_min_p_acts_before_top_p(self) -> None:
        logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
        assert kept_ids(processed(logits, top_p=0.75)) == [0, 1, 2]
        # Among the two that min-p leaves, the first has 0.57 and crosses 0.5.
        assert kept_ids(processed(logits, min_p=0.7, top_p=0.5)) == [0]
        assert kept_ids(processed(logits, min_p=0.7, top_k=3)) == [0, 1]

    def test_a_flat_row_needs_more_ranks_than_the_first_try(self) -> None:
        logits = plain.logits(1, 4000, seed=8, scale=0.1)
        logprobs = log_softmax(logits, [1.0], FixedOrder())[0]
        ids, _ = keep(logits[0], logprobs, 0.9, -1, FixedOrder())
        assert ids.tolist() == plain.kept(logits[0].tolist(), logprobs.tolist(), 0.9, -1)
        assert len(ids) > 3000

    def test_mixed_rows(self) -> None:
        logits = plain.logits(3, 300, seed=9)
        transform = Transform([1.0, 0.5, 2.0], [0.0] * 3, [1.0, 0.6, 1.0], [-1, -1, 4])
        together = distribution(logits, transform, FixedOrder())
        for row, (temperature, top_p, top_k) in enumerate(
            [(1.0, 1.0, -1), (0.5, 0.6, -1), (2.0, 1.0, 4)]
        ):
            alone = processed(logits[row : row + 1], temperature, 0.0, top_p, top_k)
            assert torch.equal(together.logprobs[row], alone.logprobs[0])
            assert torch.equal(together.probabilities[row], alone.probabilities[0])
            exact = together.logprobs[row].to(torch.float64).exp()
            assert torch.allclose(together.probabilities[row].to(torch.float64), exact, rtol=1e-6)


class TestSumSmallerProbs:
    def test_ties_count_up_to_the_own_id(self) -> None:
        p = torch.tensor([0.1, 0.2, 0.2, 0.3, 0.2]).expand(5, 5)
        of = Distribution(p.log(), p)
        sums = sum_smaller_probs(of, torch.arange(5), FixedOrder())
        assert sums.tolist() == pytest.approx([0.1, 0.3, 0.5, 1.0, 0.7])

    def test_the_top_token_has_everything_and_a_missing_token_nothing(self) -> None:
        logits = plain.logits(2, 1000, seed=10)
        of = processed(logits)
        top = argmax(logits)
        assert sum_smaller_probs(of, top, FixedOrder()).tolist() == pytest.approx([1.0, 1.0])
        missing = torch.tensor([-1, int(top[1])])
        assert sum_smaller_probs(of, missing, FixedOrder()).tolist() == [0.0, pytest.approx(1.0)]

    def test_a_removed_token_has_nothing(self) -> None:
        logits = plain.logits(1, 50, seed=11)
        lowest = logits.argmin(-1)
        assert sum_smaller_probs(processed(logits, top_k=5), lowest, FixedOrder()).tolist() == [0.0]

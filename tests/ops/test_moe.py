"""Routing, the experts' activation, and the sum of their outputs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_neuron.ops.arithmetic import (
    Arithmetic,
    FixedOrder,
    fixed_arithmetic,
    free_arithmetic,
)
from deepinfer_neuron.ops.moe import combine, route, swiglu
from deepinfer_neuron.ops.quant import q8
from tests.ops.number_formats import bf16, normal, same_bits, wide

FIXED, FREE = fixed_arithmetic(), free_arithmetic()
UNROUNDED = Arithmetic(FixedOrder(), rounding=False)
BOTH = pytest.mark.parametrize("arithmetic", [FIXED, FREE])
NO_BIAS = torch.zeros(1)


def route_logits(
    logits: Tensor, bias: Tensor = NO_BIAS, top_k: int = 6, arithmetic: Arithmetic = FIXED
) -> tuple[Tensor, Tensor]:
    """Route rows whose logits are given: row ``i`` picks column ``i`` of the gate's weight."""
    y = torch.eye(len(logits), dtype=torch.bfloat16)
    return route(y, logits.t().contiguous(), bias, top_k, 1.5, arithmetic)


def scores(logits: Tensor) -> np.ndarray:
    """``sqrt(log(1 + e^x))`` in fp64."""
    return np.sqrt(np.log1p(np.exp(wide(logits))))


def squares(rows: int, columns: int, seed: int) -> NDArray[np.float32]:
    """Descending scores above ``sqrt(20)`` of 12 bits: their squares are exact logits.

    Softplus leaves such logits as they are, so the scores are known to the last bit; their sizes
    differ enough that sums depend on the order.
    """
    generator = np.random.default_rng(seed)
    mantissa = generator.integers(2048, 4096, (rows, columns)).astype(np.float32)
    scores = mantissa * np.exp2(generator.integers(-8, 12, (rows, columns))).astype(np.float32)
    return -np.sort(-scores, axis=1)


class TestRoute:
    """Which experts, and how much of each."""

    @BOTH
    def test_value(self, arithmetic: Arithmetic) -> None:
        y, weight = normal((40, 64), 1), normal((24, 64), 2) / 4
        bias = normal((24,), 3, torch.float32)
        chosen, share = route(y, weight, bias, 6, 1.5, arithmetic)
        score = scores(torch.from_numpy(wide(y) @ wide(weight).T))
        assert chosen.dtype == torch.int64
        assert share.dtype == torch.float32
        for row in range(40):
            ranked = sorted(range(24), key=lambda e: -(score[row, e] + bias[e].item()))[:6]
            assert chosen[row].tolist() == ranked
            want = score[row, ranked] / score[row, ranked].sum() * 1.5
            np.testing.assert_allclose(wide(share)[row], want, rtol=1e-5)

    @BOTH
    def test_ties_go_to_the_smaller_index_in_order(self, arithmetic: Arithmetic) -> None:
        logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 0.0, 2.0, 1.0], [1.0] * 8])
        chosen, _ = route_logits(logits, top_k=5, arithmetic=arithmetic)
        assert chosen.tolist() == [[1, 3, 6, 0, 2], [0, 1, 2, 3, 4]]

    def test_many_ties(self) -> None:
        """A wide row of few distinct values, where unstable sorts would mix indices."""
        logits = torch.randint(0, 3, (20, 384), generator=torch.Generator().manual_seed(4)).float()
        chosen, _ = route_logits(logits)
        for row in range(20):
            ranked = sorted(range(384), key=lambda e: (-logits[row, e].item(), e))
            assert chosen[row].tolist() == ranked[:6]

    @BOTH
    def test_the_bias_selects_but_does_not_weigh(self, arithmetic: Arithmetic) -> None:
        logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
        bias = torch.tensor([-10.0, 0.0, 0.0, 10.0])
        chosen, share = route_logits(logits, bias, 2, arithmetic)
        assert chosen.tolist() == [[3, 1]]
        want = scores(logits)[0, [3, 1]]
        np.testing.assert_allclose(wide(share)[0], want / want.sum() * 1.5, rtol=1e-6)

    @BOTH
    @pytest.mark.parametrize("top_k", [1, 2, 3, 6, 8])
    def test_weights_sum_to_the_scaling(self, top_k: int, arithmetic: Arithmetic) -> None:
        logits = normal((50, 12), 5, torch.float32) * 5
        _, share = route_logits(logits, top_k=top_k, arithmetic=arithmetic)
        np.testing.assert_allclose(wide(share).sum(axis=1), 1.5, rtol=1e-6)

    @pytest.mark.parametrize("top_k", [3, 6])
    def test_the_order_of_the_sum(self, top_k: int) -> None:
        """``((s0+s4)+s2) + ((s1+s5)+s3)`` for six and ``(s0+s2)+s1`` for three."""
        s = squares(300, top_k, 6).T
        total = (s[0] + s[2]) + s[1]
        if top_k == 6:
            total = ((s[0] + s[4]) + s[2]) + ((s[1] + s[5]) + s[3])
        chosen, share = route_logits(torch.from_numpy((s * s).T), top_k=top_k)
        assert chosen[0].tolist() == list(range(top_k))
        assert np.array_equal(share.numpy(), (s / total * np.float32(1.5)).T)
        in_order = sum(s[1:], s[0])
        assert (in_order != total).any()

    def test_division_comes_before_the_scaling(self) -> None:
        s = squares(300, 2, 7)
        total = s.sum(axis=1, keepdims=True)
        _, share = route_logits(torch.from_numpy(s * s), top_k=2)
        assert np.array_equal(share.numpy(), s / total * np.float32(1.5))
        assert not np.array_equal(share.numpy(), s * np.float32(1.5) / total)

    @BOTH
    def test_extreme_logits(self, arithmetic: Arithmetic) -> None:
        """20 and 20.0001 meet both branches of softplus; -80 still has a tiny score."""
        logits = torch.tensor([[20.0, 20.0001, -80.0, -1000.0]])
        chosen, share = route_logits(logits, top_k=4, arithmetic=arithmetic)
        assert chosen.tolist() == [[1, 0, 2, 3]]
        score = np.array([math.sqrt(20.0001), math.sqrt(20.0), math.exp(-40.0), 0.0])
        np.testing.assert_allclose(wide(share)[0], score / score.sum() * 1.5, rtol=1e-6)

    def test_scores_of_zero_give_weights_of_zero(self) -> None:
        """The epsilon of 1e-20 prevents 0 / 0."""
        _, share = route_logits(torch.full((1, 8), -1000.0))
        assert share.tolist() == [[0.0] * 6]

    def test_logits_are_not_rounded_to_bf16(self) -> None:
        """Two logits that bf16 cannot tell apart are ranked."""
        weight = torch.ones(2, 64, dtype=torch.bfloat16)
        y = torch.ones(1, 64, dtype=torch.bfloat16)
        weight[1, 0] = 1.0 + 2.0**-7
        chosen, _ = route(y, weight, NO_BIAS, 1, 1.5, FIXED)
        assert chosen.tolist() == [[1]]

    def test_rows_do_not_matter_to_each_other(self) -> None:
        y, weight = normal((23, 64), 8), normal((24, 64), 9)
        bias = normal((24,), 10, torch.float32)
        whole = route(y, weight, bias, 6, 1.5, FIXED)
        parts = [route(part, weight, bias, 6, 1.5, FIXED) for part in y.split(4)]
        for index in (0, 1):
            assert same_bits(torch.cat([part[index] for part in parts]), whole[index])


class TestSwiglu:
    """The clamped activation and its quantization."""

    ONE = torch.ones(1, 1)

    @staticmethod
    def exact(gate: Tensor, up: Tensor, share: Tensor) -> np.ndarray:
        g, u = np.minimum(wide(gate), 10), np.clip(wide(up), -10, 10)
        return g / (1 + np.exp(-g)) * u * wide(share)

    @pytest.mark.parametrize("order", [FIXED.order, FREE.order])
    def test_value(self, order: FixedOrder) -> None:
        gate, up = normal((30, 64), 1) * 8, normal((30, 64), 2) * 8
        share = torch.rand(30, 1, generator=torch.Generator().manual_seed(3))
        got = swiglu(gate, up, share, 10.0, Arithmetic(order, rounding=False))
        np.testing.assert_allclose(wide(got), self.exact(gate, up, share), rtol=2e-6, atol=1e-30)

    @BOTH
    def test_quantized_from_fp32(self, arithmetic: Arithmetic) -> None:
        """No bf16 rounding in between: some codes would differ."""
        gate, up = normal((200, 64), 4), normal((200, 64), 5)
        share = torch.rand(200, 1, generator=torch.Generator().manual_seed(6))
        got = swiglu(gate, up, share, 10.0, arithmetic)
        exact = torch.from_numpy(self.exact(gate, up, share).astype(np.float32))
        assert got.dtype == torch.bfloat16
        assert (got == q8(exact, FIXED)).double().mean() > 0.9999
        assert (got != q8(exact.to(torch.bfloat16), FIXED)).any()

    def test_clamps(self) -> None:
        """The gate is cut above only; the other half on both sides."""
        gate = torch.tensor([[50.0, 10.0, -50.0, 1.0, 1.0]], dtype=torch.bfloat16)
        up = torch.tensor([[1.0, 1.0, 50.0, 50.0, -50.0]], dtype=torch.bfloat16)
        got = swiglu(gate, up, self.ONE, 10.0, UNROUNDED)[0].tolist()
        ten, one = 10 / (1 + math.exp(-10)), 1 / (1 + math.exp(-1))
        want = [ten, ten, -500 * math.exp(-50), 10 * one, -10 * one]
        assert got == pytest.approx(want, rel=1e-6)

    @BOTH
    def test_a_very_negative_gate_gives_zero(self, arithmetic: Arithmetic) -> None:
        gate = torch.full((1, 32), -1e30, dtype=torch.bfloat16)
        assert not swiglu(gate, gate, self.ONE, 10.0, arithmetic).any()

    def test_the_share_enters_before_the_quantization(self) -> None:
        """Quantizing first and multiplying behind is not the same."""
        gate, up = normal((50, 64), 7), normal((50, 64), 8)
        share = torch.rand(50, 1, generator=torch.Generator().manual_seed(9))
        got = swiglu(gate, up, share, 10.0, FIXED)
        late = (swiglu(gate, up, self.ONE, 10.0, FIXED).float() * share).to(torch.bfloat16)
        assert (got != late).double().mean() > 0.3

    def test_the_order_of_the_products(self) -> None:
        """``(silu * up) * share`` in fp32; another order changes last bits."""
        gate, up = normal((50, 64), 10), normal((50, 64), 11)
        share = torch.rand(50, 1, generator=torch.Generator().manual_seed(12))
        silu = swiglu(gate, torch.ones_like(up), self.ONE, 10.0, UNROUNDED)
        got = swiglu(gate, up, share, 10.0, UNROUNDED)
        assert same_bits(got, silu * up.float().clamp(-10, 10) * share)
        assert not torch.equal(got, silu * (up.float() * share))

    def test_rows_do_not_matter_to_each_other(self) -> None:
        gate, up = normal((21, 64), 13), normal((21, 64), 14)
        share = torch.rand(21, 1, generator=torch.Generator().manual_seed(15))
        parts = zip(gate.split(4), up.split(4), share.split(4), strict=True)
        whole = swiglu(gate, up, share, 10.0, FIXED)
        assert same_bits(torch.cat([swiglu(*part, 10.0, FIXED) for part in parts]), whole)

    @BOTH
    def test_an_expert_without_tokens(self, arithmetic: Arithmetic) -> None:
        empty = normal((0, 64), 16)
        assert swiglu(empty, empty, torch.ones(0, 1), 10.0, arithmetic).shape == (0, 64)


class TestCombine:
    """Shared output first, then the slots in order."""

    def test_one_rounding(self) -> None:
        shared, routed = normal((40, 64), 1), normal((40, 6, 64), 2)
        got = combine(shared, routed, FIXED)
        want = wide(shared) + wide(routed).sum(axis=1)
        assert got.dtype == torch.bfloat16
        assert (wide(got) == bf16(want)).mean() > 0.999
        stepwise = shared
        for slot in range(6):
            stepwise = stepwise + routed[:, slot]
        assert (got != stepwise).double().mean() > 0.2

    def test_order(self) -> None:
        """fp32 sums that cancel: 2^30 - 2^30 + 1 is 1, 1 + 2^30 - 2^30 is 0."""
        shared = torch.tensor([[2.0**30], [1.0]], dtype=torch.bfloat16)
        routed = torch.tensor([[[-(2.0**30)], [1.0]], [[2.0**30], [-(2.0**30)]]])
        got = combine(shared, routed.to(torch.bfloat16), FIXED)
        assert got.tolist() == [[1.0], [0.0]]

    def test_absent_slots(self) -> None:
        shared = normal((3, 32), 3)
        assert torch.equal(combine(shared, torch.zeros(3, 6, 32).to(torch.bfloat16), FIXED), shared)
        assert torch.equal(combine(shared, shared[:, None, :][:, :0], FIXED), shared)

    def test_without_rounding(self) -> None:
        shared, routed = normal((4, 8), 4, torch.float32), normal((4, 2, 8), 5, torch.float32)
        assert same_bits(combine(shared, routed, UNROUNDED), (shared + routed[:, 0]) + routed[:, 1])

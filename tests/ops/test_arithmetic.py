"""Reductions: fixed order row by row, its exactness, and free order's closeness to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from operator import mul

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer_neuron.checkpoint.formats import decode_e2m1, decode_e4m3
from deepinfer_neuron.ops.arithmetic import (
    Arithmetic,
    FixedOrder,
    FreeOrder,
    fixed_arithmetic,
    free_arithmetic,
    pairwise_sum,
)
from tests.ops.number_formats import bf16, finite_e4m3_codes, normal, random_bytes, same_bits, wide

FIXED, FREE = FixedOrder(), FreeOrder()
HALF_ULP = 2.0**-24
"""Largest relative error of one fp32 rounding."""

PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": FIXED.matmul,
    "linear": FIXED.linear,
    "matmul_wide": FIXED.matmul_wide,
}


@pytest.fixture(params=sorted(PRODUCTS))
def product(request: pytest.FixtureRequest) -> Callable[[Tensor, Tensor], Tensor]:
    """Each of the fixed-order products of rows ``[M, K]`` with a matrix ``[N, K]``."""
    return PRODUCTS[request.param]


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads; restored afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def joined(numbers: list[Tensor]) -> Tensor:
    """Neighbours first, a lone last number moves up: the order of every fixed sum."""
    while len(numbers) > 1:
        pairs = [a + b for a, b in zip(numbers[0::2], numbers[1::2], strict=False)]
        numbers = pairs + numbers[len(numbers) - len(numbers) % 2 :]
    return numbers[0]


def magnitudes(x: Tensor, w: Tensor) -> np.ndarray:
    """``sum |x| |w|`` per output, the yardstick of rounding errors."""
    return np.abs(wide(x)) @ np.abs(wide(w)).T


class TestPairwiseSum:
    """``(x0 + x1) + (x2 + x3)``."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 33, 100])
    def test_order(self, count: int, dtype: torch.dtype) -> None:
        x = normal((count, 5), count, dtype)
        assert same_bits(pairwise_sum(x), joined(list(x)))

    def test_the_order_matters(self) -> None:
        """Otherwise the test above would show nothing."""
        x = normal((7, 500), 1, torch.float32)
        left_to_right = sum(x[1:], x[0])
        assert not torch.equal(pairwise_sum(x), left_to_right)
        three = torch.tensor([1.0, 2.0**-24, 2.0**-24, 0.0])
        assert pairwise_sum(three).item() == 1.0
        assert pairwise_sum(three[[1, 2, 0, 3]]).item() == 1.0 + 2.0**-23

    @given(st.integers(1, 40), st.integers(0, 40))
    @settings(deadline=None, derandomize=True)
    def test_zeros_behind_change_nothing(self, count: int, zeros: int) -> None:
        x = normal((count, 3), count, torch.float32)
        padded = torch.cat((x, torch.zeros(zeros, 3)))
        assert same_bits(pairwise_sum(padded), pairwise_sum(x))

    @pytest.mark.parametrize("count", [1, 2, 3, 4])
    def test_negative_zeros_give_zero(self, count: int) -> None:
        """As a list padded with zeros would."""
        assert same_bits(pairwise_sum(torch.full((count, 2), -0.0)), torch.zeros(2))

    def test_nothing_gives_zero(self) -> None:
        assert same_bits(pairwise_sum(torch.empty(0, 3)), torch.zeros(3))


class TestRowIndependence:
    """A row's result has the same bits whatever surrounds it."""

    X, W = normal((37, 200), 2), normal((50, 200), 3)

    def operands(self, product: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        wide_operands = product == FIXED.matmul_wide
        x, w = self.X, self.W
        return (x.float() * 1.1, w.float() / 3) if wide_operands else (x, w)

    @pytest.mark.parametrize("size", [1, 2, 3, 8, 16, 36])
    def test_any_batch_size(self, product: Callable[[Tensor, Tensor], Tensor], size: int) -> None:
        x, w = self.operands(product)
        parts = [product(part, w) for part in x.split(size)]
        assert same_bits(torch.cat(parts), product(x, w))

    def test_any_neighbours(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        x, w = self.operands(product)
        order = torch.randperm(37, generator=torch.Generator().manual_seed(4))
        assert same_bits(product(x[order], w), product(x, w)[order])
        huge = torch.cat((x[:1], torch.full_like(x[:3], 1e30)))
        assert same_bits(product(huge, w)[0], product(x, w)[0])

    @pytest.mark.parametrize("size", [1, 7, 49])
    def test_any_part_of_the_matrix(
        self, product: Callable[[Tensor, Tensor], Tensor], size: int
    ) -> None:
        x, w = self.operands(product)
        parts = [product(x, part) for part in w.split(size)]
        assert same_bits(torch.cat(parts, dim=1), product(x, w))

    @pytest.mark.parametrize("zeros", [1, 24, 56, 312])
    def test_zeros_behind_the_contracted_axis(
        self, product: Callable[[Tensor, Tensor], Tensor], zeros: int
    ) -> None:
        x, w = self.operands(product)
        padded = product(F.pad(x, (0, zeros)), F.pad(w, (0, zeros)))
        assert same_bits(padded, product(x, w))

    @pytest.mark.parametrize("count", [2, 3])
    def test_any_number_of_threads(
        self,
        product: Callable[[Tensor, Tensor], Tensor],
        threads: Callable[[int], None],
        count: int,
    ) -> None:
        x, w = self.operands(product)
        threads(1)
        alone = product(x, w)
        threads(count)
        assert same_bits(product(x, w), alone)

    def test_memory_layout(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        x, w = self.operands(product)
        assert same_bits(product(x.t().contiguous().t(), w), product(x, w))
        assert same_bits(product(x[::3], w[::2]), product(x, w)[::3, ::2])

    def test_more_than_the_workspace_holds(self) -> None:
        """Large products are cut into rows; the bits stay."""
        x, w = normal((2900, 32), 5), normal((2900, 32), 6)
        assert same_bits(FIXED.matmul(x, w)[[0, 1500, 2899]], FIXED.matmul(x[[0, 1500, 2899]], w))
        wide_x, wide_w = normal((90, 8192), 7, torch.float32), normal((24, 8192), 8, torch.float32)
        whole = FIXED.matmul_wide(wide_x, wide_w)
        assert same_bits(whole[[0, 88]], FIXED.matmul_wide(wide_x[[0, 88]], wide_w))

    def test_batched_matrices(self) -> None:
        x, w = normal((6, 5, 70), 9), normal((6, 9, 70), 10)
        one_by_one = [FIXED.matmul(a, b) for a, b in zip(x, w, strict=True)]
        assert same_bits(FIXED.matmul(x, w), torch.stack(one_by_one))
        assert same_bits(FIXED.matmul(x, w[0]), FIXED.matmul(x, w[:1].expand(6, -1, -1)))

    def test_more_batches_than_the_workspace_holds(self) -> None:
        x, w = normal((10, 1000, 32), 11), normal((10, 1000, 32), 12)
        assert same_bits(FIXED.matmul(x, w)[[3, 9]], FIXED.matmul(x[[3, 9]], w[[3, 9]]))

    @pytest.mark.parametrize("size", [1, 3, 16])
    def test_sum(self, size: int) -> None:
        x = normal((16, 3, 77), 13, torch.float32)
        assert same_bits(torch.cat([FIXED.sum(part) for part in x.split(size)]), FIXED.sum(x))
        assert same_bits(FIXED.sum(F.pad(x, (0, 19))), FIXED.sum(x))
        assert same_bits(FIXED.sum(x.mT.contiguous().mT), FIXED.sum(x))

    @pytest.mark.parametrize("size", [1, 3, 16])
    def test_weighted_sum(self, size: int) -> None:
        weights = normal((16, 4, 21), 14, torch.float32).abs()
        values = normal((16, 21, 32), 15).to(torch.float32)
        whole = FIXED.weighted_sum(weights, values)
        pairs = zip(weights.split(size), values.split(size), strict=True)
        assert same_bits(torch.cat([FIXED.weighted_sum(w, v) for w, v in pairs]), whole)
        longer = FIXED.weighted_sum(F.pad(weights, (0, 9)), F.pad(values, (0, 0, 0, 9)))
        assert same_bits(longer, whole)

    def test_weighted_sums_beyond_the_workspace(self) -> None:
        weights = normal((70, 16, 256), 16, torch.float32)
        values = normal((70, 256, 64), 17, torch.float32)
        whole = FIXED.weighted_sum(weights, values)
        assert same_bits(whole[[0, 69]], FIXED.weighted_sum(weights[[0, 69]], values[[0, 69]]))


class TestExactness:
    """What fixed order computes, against exact fractions."""

    @staticmethod
    def exact(x: Tensor, w: Tensor) -> list[list[Fraction]]:
        left, right = ([[Fraction(number) for number in row] for row in t.tolist()] for t in (x, w))
        return [[sum(map(mul, p, q), Fraction()) for q in right] for p in left]

    @pytest.mark.parametrize("contracted", [1, 31, 32, 33, 100])
    def test_products_of_codes_are_rounded_once(self, contracted: int) -> None:
        """e4m3 times e4m3 and e4m3 times e2m1, decoded: one fp32 rounding of the exact sum."""
        x = decode_e4m3(finite_e4m3_codes((4, contracted), 18))
        fp8 = decode_e4m3(finite_e4m3_codes((3, contracted), 20))
        fp4 = decode_e2m1(random_bytes((3, (contracted + 1) // 2), 22))[:, :contracted]
        w = torch.cat((fp8, fp4))
        # These sums fit in 53 bits, so that float() loses nothing.
        want = [[float(total) for total in row] for row in self.exact(x, w)]
        assert all(
            Fraction(value) == total
            for row, totals in zip(want, self.exact(x, w), strict=True)
            for value, total in zip(row, totals, strict=True)
        )
        rounded = torch.tensor(want, dtype=torch.float64).to(torch.float32)
        assert torch.equal(FIXED.matmul(x.to(torch.bfloat16), w.to(torch.bfloat16)), rounded)
        assert torch.equal(FIXED.matmul(x, w), rounded)

    def test_blocks_of_32_are_joined_pairwise(self) -> None:
        """Blocks of 2^60, 1 and -2^60 in fp64: the middle one is lost, as the order says."""
        x = torch.ones(1, 96, dtype=torch.bfloat16)
        w = torch.zeros(1, 96, dtype=torch.bfloat16)
        w[0, 3], w[0, 40], w[0, 70] = 2.0**60, 1.0, -(2.0**60)
        assert FIXED.matmul(x, w).item() == 0.0
        w[0, 3], w[0, 40], w[0, 70] = 2.0**60, -(2.0**60), 1.0
        assert FIXED.matmul(x, w).item() == 1.0

    def test_bf16_products(self) -> None:
        """One rounding of the sum: blocks are exact and their fp64 sum nearly so."""
        x, w = normal((5, 130), 24), normal((6, 130), 25)
        exact = torch.tensor([[float(t) for t in row] for row in self.exact(x, w)])
        assert same_bits(FIXED.matmul(x, w), exact)

    def test_linear_rounds_to_the_input_type(self) -> None:
        x, w = normal((5, 70), 26), normal((6, 70), 27)
        product = FIXED.matmul(x, w)
        got = FIXED.linear(x, w)
        assert got.dtype == torch.bfloat16
        assert np.array_equal(wide(got), bf16(product.numpy()))
        assert same_bits(FIXED.linear(x.float(), w), product)

    def test_matmul_wide(self) -> None:
        """Pairwise joins: the error grows with the depth of the tree, not with the length."""
        x, w = normal((7, 3000), 28, torch.float32), normal((5, 3000), 29, torch.float32)
        error = np.abs(wide(FIXED.matmul_wide(x, w)) - wide(x) @ wide(w).T)
        assert (error <= 14 * HALF_ULP * magnitudes(x, w)).all()

    def test_sum(self) -> None:
        """Neighbours first, so the error grows with the depth of the tree: 10 for 1000 numbers."""
        x = normal((6, 1000), 30, torch.float32)
        assert same_bits(FIXED.sum(x), joined(list(x.t())))
        error = np.abs(wide(FIXED.sum(x)) - wide(x).sum(axis=1))
        assert (error <= 10 * HALF_ULP * np.abs(wide(x)).sum(axis=1)).all()

    def test_weighted_sum(self) -> None:
        weights, values = normal((3, 4, 50), 31, torch.float32), normal((3, 50, 8), 32)
        values = values.to(torch.float32)
        error = np.abs(wide(FIXED.weighted_sum(weights, values)) - wide(weights) @ wide(values))
        bound = 8 * HALF_ULP * (np.abs(wide(weights)) @ np.abs(wide(values)))
        assert (error <= bound).all()

    def test_empty(self) -> None:
        x, w = torch.empty(0, 40, dtype=torch.bfloat16), normal((3, 40), 33)
        assert FIXED.matmul(x, w).shape == (0, 3)
        assert FIXED.linear(x, w).shape == (0, 3)
        assert FIXED.matmul_wide(x.float(), w.float()).shape == (0, 3)
        nothing = torch.empty(2, 0, dtype=torch.bfloat16)
        assert same_bits(FIXED.matmul(nothing, nothing), torch.zeros(2, 2))
        assert same_bits(FIXED.sum(torch.empty(2, 0)), torch.zeros(2))


class TestFreeOrder:
    """Torch's kernels stay within the rounding errors of their summation."""

    @pytest.mark.parametrize("rows", [1, 5, 64])
    def test_matmul(self, rows: int) -> None:
        x, w = normal((rows, 320), 34), normal((48, 320), 35)
        error = np.abs(wide(FREE.matmul(x, w)) - wide(FIXED.matmul(x, w)))
        assert (error <= 40 * HALF_ULP * magnitudes(x, w)).all()
        error = np.abs(wide(FREE.matmul_wide(x.float(), w.float())) - wide(FIXED.matmul(x, w)))
        assert (error <= 40 * HALF_ULP * magnitudes(x, w)).all()

    @pytest.mark.parametrize("rows", [1, 5, 64])
    def test_linear_rounds_once(self, rows: int) -> None:
        """fp32 accumulation and one bf16 rounding; accumulating in bf16 would fail by far."""
        x, w = normal((rows, 2048), 36), normal((48, 2048), 37)
        exact = wide(x) @ wide(w).T
        half_step = np.exp2(np.floor(np.log2(np.abs(exact))) - 8)
        slack = 100 * HALF_ULP * magnitudes(x, w)
        got = FREE.linear(x, w)
        assert got.dtype == torch.bfloat16
        assert (np.abs(wide(got) - exact) <= half_step + slack).all()

    def test_linear_widens_a_bf16_weight_for_fp32_inputs(self) -> None:
        x, w = normal((3, 64), 38, torch.float32), normal((4, 64), 39)
        got = FREE.linear(x, w)
        assert got.dtype == torch.float32
        np.testing.assert_allclose(wide(got), wide(x) @ wide(w).T, rtol=0, atol=1e-5)

    def test_sums(self) -> None:
        x = normal((5, 3, 300), 40, torch.float32)
        torch.testing.assert_close(FREE.sum(x), FIXED.sum(x), rtol=0, atol=2e-5)
        pair = normal((2, 3, 40), 41, torch.float32), normal((2, 40, 8), 42, torch.float32)
        free, fixed = FREE.weighted_sum(*pair), FIXED.weighted_sum(*pair)
        torch.testing.assert_close(free, fixed, rtol=0, atol=2e-5)


class TestArithmetic:
    """The two choices together."""

    def test_rounding(self) -> None:
        x = normal((50,), 43, torch.float32)
        for arithmetic in (free_arithmetic(), fixed_arithmetic()):
            assert arithmetic.rounding
            assert arithmetic.dtype == torch.bfloat16
            assert np.array_equal(wide(arithmetic.round(x)), bf16(x.numpy()))

    def test_rounding_ties_go_to_even(self) -> None:
        x = torch.tensor([1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, -1.0 - 2.0**-8])
        assert fixed_arithmetic().round(x).tolist() == [1.0, 1.0 + 2.0**-6, -1.0]

    def test_without_rounding(self) -> None:
        x = normal((50,), 44, torch.float32)
        arithmetic = Arithmetic(FreeOrder(), rounding=False)
        assert arithmetic.dtype == torch.float32
        assert same_bits(arithmetic.round(x), x)

    def test_orders(self) -> None:
        assert isinstance(free_arithmetic().order, FreeOrder)
        assert isinstance(fixed_arithmetic().order, FixedOrder)

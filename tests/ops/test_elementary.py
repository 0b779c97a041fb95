"""Exponentials and logarithms of the fixed order, against exact decimals."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_neuron.ops.arithmetic import FixedOrder, FreeOrder
from tests.ops.number_formats import normal, same_bits, wide

FIXED, FREE = FixedOrder(), FreeOrder()
DIGITS = 100
FP32_HALF_ULP = 0.5 + 1e-6
"""Error of a rounding to fp32 in fp32 steps, with slack for the fp64 value before it."""

FUNCTIONS = ("exp", "sigmoid", "softplus")


def exact_exp(x: float) -> Decimal:
    """``e^x`` to 100 digits."""
    with localcontext() as context:
        context.prec = DIGITS
        return Decimal(x).exp()


def exact(name: str, x: float) -> Decimal:
    """The function's true value."""
    with localcontext() as context:
        context.prec = DIGITS
        if name == "exp":
            return exact_exp(x)
        if name == "sigmoid":
            return 1 / (1 + exact_exp(-x))
        return (1 + exact_exp(x)).ln()


def fp32_steps(got: float, want: Decimal) -> float:
    """Distance in units of the spacing of fp32 numbers around ``want``."""
    exponent = max(math.frexp(float(want))[1] - 24, -149)
    with localcontext() as context:
        context.prec = DIGITS
        return abs(float((Decimal(got) - want) / Decimal(2) ** exponent))


def grid() -> Tensor:
    """fp32 numbers of every size between -90 and 90, zero included."""
    spread = normal((300,), 1, torch.float32) * torch.exp2(torch.linspace(-30, 5, 300))
    return torch.cat((spread.clamp(-90, 90), torch.linspace(-87, 88, 101), torch.zeros(1)))


class TestFixedOrder:
    """The fp32 functions: one rounding of a good fp64 value."""

    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_accuracy(self, name: str) -> None:
        function: Callable[[Tensor], Tensor] = getattr(FIXED, name)
        x = grid()
        got = function(x)
        assert got.dtype == torch.float32
        for value, result in zip(x.tolist(), got.tolist(), strict=True):
            if name == "softplus" and value > 20:
                assert result == value
            else:
                assert fp32_steps(result, exact(name, value)) <= FP32_HALF_ULP, value

    @pytest.mark.parametrize(
        ("name", "want"),
        [
            ("exp", [math.inf, 0.0, 0.0, 1.0, math.inf]),
            ("sigmoid", [1.0, 0.0, 0.0, 0.5, 1.0]),
            ("softplus", [math.inf, 0.0, 0.0, float(np.float32(math.log(2))), 1000.0]),
        ],
    )
    def test_extremes(self, name: str, want: list[float]) -> None:
        x = torch.tensor([math.inf, -math.inf, -1000.0, 0.0, 1000.0])
        for order in (FIXED, FREE):
            assert getattr(order, name)(x).tolist() == pytest.approx(want, rel=1e-6)
            assert math.isnan(getattr(order, name)(torch.tensor([math.nan])).item())

    def test_softplus_is_the_identity_above_20(self) -> None:
        """At 20 the formula still holds (its fp32 value is 20 too), one step above it is ``x``."""
        above = float(np.nextafter(np.float32(20), np.float32(21)))
        assert FIXED.softplus(torch.tensor([20.0, above, 20.0001])).tolist() == [
            20.0,
            above,
            float(np.float32(20.0001)),
        ]
        assert FIXED.softplus(torch.tensor([-100.0])).item() == float(np.float32(math.exp(-100)))

    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_an_element_does_not_depend_on_its_place(self, name: str) -> None:
        """Vectorized library code may treat the tail of an array differently."""
        function: Callable[[Tensor], Tensor] = getattr(FIXED, name)
        x = normal((1003,), 3, torch.float32) * 5
        whole = function(x)
        assert same_bits(function(x.flip(0)), whole.flip(0))
        assert same_bits(function(x[5:]), whole[5:])
        assert same_bits(torch.cat([function(part) for part in x.split(1)]), whole)

    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_free_order_is_close(self, name: str) -> None:
        x = grid()
        fixed, free = wide(getattr(FIXED, name)(x)), wide(getattr(FREE, name)(x))
        np.testing.assert_allclose(free, fixed, rtol=4e-7, atol=1e-38)

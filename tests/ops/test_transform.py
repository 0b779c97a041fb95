"""Rotations of channel ranges and the Hadamard transform."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer_neuron.ops.arithmetic import free_arithmetic
from deepinfer_neuron.ops.rope import rope, rope_table
from deepinfer_neuron.ops.transform import hadamard, rotate
from tests.ops.number_formats import normal, same_bits

TURNS = rope_table(7, 16, 10000.0, None)


@pytest.mark.parametrize("shape", [(7, 48), (7, 3, 48)])
@pytest.mark.parametrize("inverse", [False, True])
def test_the_last_channels_turn_as_in_the_model(shape: tuple[int, ...], inverse: bool) -> None:
    x = normal(shape, 1)
    got = rotate(x, TURNS, start=32, halves=False, inverse=inverse)
    assert same_bits(got, rope(x, TURNS, free_arithmetic(), inverse=inverse))


@pytest.mark.parametrize("start", [0, 5, 32])
def test_halves_are_neighbours_elsewhere(start: int) -> None:
    """Interleaving the halves, turning neighbours and parting them again is the same."""
    x = normal((7, 48), 2)
    order = torch.arange(16).view(2, 8).t().flatten()
    moved = x.clone()
    moved[:, start : start + 16] = x[:, start : start + 16][:, order]
    turned = rotate(moved, TURNS, start=start, halves=False, inverse=False)
    turned[:, start : start + 16] = turned[:, start : start + 16][:, order.argsort()]
    assert same_bits(rotate(x, TURNS, start=start, halves=True, inverse=False), turned)


@pytest.mark.parametrize("dim", [1, 2, 8, 64])
def test_hadamard_is_its_matrix(dim: int) -> None:
    """Small integers make every sum exact."""
    x = (torch.randint(-8, 9, (5, 3, dim), generator=torch.Generator().manual_seed(1))).bfloat16()
    sign = [[(-1.0) ** (i & j).bit_count() for j in range(dim)] for i in range(dim)]
    expected = (x.double() @ torch.tensor(sign, dtype=torch.float64)) / 16
    assert same_bits(hadamard(x, 1 / 16), expected.to(torch.bfloat16))


def test_hadamard_of_nothing() -> None:
    assert hadamard(torch.empty(0, 4, 8, dtype=torch.bfloat16), 1.0).shape == (0, 4, 8)


def test_hadamard_twice() -> None:
    x = torch.eye(16, dtype=torch.bfloat16)
    assert torch.equal(hadamard(hadamard(x, 0.25), 0.25), x)
    assert math.isclose(hadamard(x, 0.25).float().pow(2).sum(), 16)

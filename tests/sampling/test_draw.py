"""The two-level fixed-point draw. Vectors are DeepInfer's Ascend results; the rest is compared with
one walk along exact integer weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer_neuron.ops.philox import seed_bits
from deepinfer_neuron.ops.sample import fixed_point_weights, random_sampling
from tests.sampling import plain


def drawn(probabilities: Tensor, seed: int, position: int, case: int = 0) -> int:
    [token] = random_sampling(
        probabilities[None], seed_bits([seed]), torch.tensor([position]), case
    ).tolist()
    return int(token)


def sawtooth(width: int, unit: int) -> Tensor:
    """Weights 1 to 7 over and over, in units that fp32 holds exactly."""
    return ((torch.arange(width) % 7 + 1) / unit).to(torch.float32)


@pytest.mark.parametrize(
    ("seed", "position", "fresh", "residual"),
    [
        (0, 0, 107679, 109721),
        (0, 1, 63899, 30848),
        (42, 10, 128452, 122133),
        (2**63 + 1, 7, 72406, 36557),
        (1000000049, 10, 51406, 122534),
        (123456789012345, 1000003, 73777, 77543),
    ],
)
def test_the_released_vocabulary(seed: int, position: int, fresh: int, residual: int) -> None:
    p = sawtooth(129280, 2**20)
    assert int(fixed_point_weights(p).sum()) == 1059049472
    assert drawn(p, seed, position, 0) == fresh
    assert drawn(p, seed, position, 1) == residual


@pytest.mark.parametrize(("seed", "position", "token"), [(0, 0, 54), (42, 10, 66), (7, 3, 83)])
def test_a_hundred_columns(seed: int, position: int, token: int) -> None:
    assert drawn(sawtooth(100, 1024), seed, position) == token


@pytest.mark.parametrize("seed", [0, 1, 42, 2**64 - 1])
def test_a_certain_token(seed: int) -> None:
    p = torch.zeros(1024)
    p[3] = 1.0
    assert drawn(p, seed, 5) == 3


def test_weights_truncate_and_saturate() -> None:
    tiny = 2.0**-31
    below = float(torch.nextafter(torch.tensor(tiny), torch.tensor(0.0)))
    p = torch.tensor([0.0, below, tiny, 1.75 * tiny, 2 * tiny, 0.5, 1.0 - 2.0**-24, 1.0])
    expected = [0, 0, 1, 1, 2, 2**30, 2**31 - 128, 2**31 - 1]
    assert fixed_point_weights(p).tolist() == expected


def test_a_row_without_weight_draws_nothing_and_disturbs_no_other() -> None:
    p = torch.stack((torch.full((100,), 2.0**-32), sawtooth(100, 1024)))
    tokens = random_sampling(p, seed_bits([42, 42]), torch.tensor([10, 10]))
    assert tokens.tolist() == [-1, 66]


def test_probabilities_are_not_changed() -> None:
    p = sawtooth(100, 1024)
    before = p.clone()
    drawn(p, 1, 1)
    assert torch.equal(p, before)


@pytest.mark.parametrize("width", [1, 2, 63, 64, 65, 100, 2048, 2049, 4097, 8191, 8192, 12289])
def test_widths_around_the_slot_counts(width: int) -> None:
    p = torch.softmax(plain.logits(1, width, seed=width)[0], -1)
    values = p.tolist()
    for position in range(3):
        assert drawn(p, 99, position) == plain.draw(values, 99, position)


@settings(deadline=None, derandomize=True, max_examples=80)
@given(
    st.lists(st.floats(0.0, 1.0, width=32), min_size=1, max_size=200),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**31 - 1),
    st.integers(0, 2),
)
def test_any_weights(values: list[float], seed: int, position: int, case: int) -> None:
    # A sum of at most one, as the draw asks for: divide by a power of two.
    p = torch.tensor(values) / 256.0
    expected = plain.draw(p.tolist(), seed, position, case)
    assert drawn(p, seed, position, case) == (-1 if expected is None else expected)


@settings(deadline=None, derandomize=True, max_examples=20)
@given(st.permutations(range(9)), st.integers(0, 1000))
def test_rows_do_not_know_of_each_other(permutation: list[int], seed: int) -> None:
    p = torch.softmax(plain.logits(9, 300, seed), -1)
    seeds, positions = seed_bits(range(9)), torch.arange(9) * 7
    together = random_sampling(p, seeds, positions)
    shuffled = random_sampling(p[permutation], seeds[permutation], positions[permutation])
    assert shuffled.tolist() == together[permutation].tolist()
    alone = [
        random_sampling(p[i : i + 1], seeds[i : i + 1], positions[i : i + 1]) for i in range(9)
    ]
    assert torch.cat(alone).tolist() == together.tolist()

"""Look-ups in short lists against Python's own."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from deepinfer_neuron.ops.shortlist import aligned_values, column_of, value_at, value_of


def ints(values: object, *shape: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).reshape(shape)


@pytest.mark.parametrize(("rows", "width"), [(0, 5), (1, 5), (8, 5), (4, 0), (6, 100)])
def test_against_lists(rows: int, width: int) -> None:
    source = random.Random(rows + width)
    lists = [source.sample(range(-1, 150), width) for _ in range(rows)]
    keys = ints(lists, rows, width)
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(1))
    wanted = [[source.randrange(-3, 155) for _ in range(7)] for _ in range(rows)]
    got = aligned_values(keys, values, ints(wanted, rows, 7))
    for r in range(rows):
        table = dict(zip(lists[r], values[r].tolist(), strict=True))
        assert got[r].tolist() == [table.get(token, -math.inf) for token in wanted[r]]
    single = ints([line[0] for line in wanted], rows)
    columns = [lists[r].index(t) if (t := wanted[r][0]) in lists[r] else -1 for r in range(rows)]
    assert column_of(keys, single).tolist() == columns
    assert torch.equal(value_of(keys, values, single), got[:, 0])
    assert torch.equal(value_at(values, ints(columns, rows)), got[:, 0])


def test_repeated_keys() -> None:
    keys, values = ints([5, 3, 5, 3], 1, 4), torch.tensor([[1.0, -2.0, 4.0, -3.0]])
    assert value_of(keys, values, ints([5], 1)).tolist() == [4.0]
    assert value_of(keys, values, ints([3], 1)).tolist() == [-2.0]
    assert column_of(keys, ints([3], 1)).tolist() == [1]


def test_integers_outside_the_list_give_minus_one() -> None:
    values = ints([10, 20], 1, 2).expand(4, 2)
    assert value_at(values, ints([-1, 0, 1, 2], 4)).tolist() == [-1, 10, 20, -1]
    assert value_at(values[:, :0], ints([-1, 0, 1, 2], 4)).tolist() == [-1] * 4

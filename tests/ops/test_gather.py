"""Row gathers: pure copies, zeros outside the table."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepinfer_neuron.ops.gather import gather_rows
from tests.ops.number_formats import normal, random_bytes, same_bits


def test_rows_inside_and_outside() -> None:
    """-1, the first row behind the table, and far ids give zeros."""
    table = normal((7, 4), 1)
    index = torch.tensor([0, 6, -1, 7, 11, -5, 3, 2**40, -(2**40)])
    got = gather_rows(table, index)
    assert same_bits(got[[0, 1, 6]], table[[0, 6, 3]])
    assert not got[[2, 3, 4, 5, 7, 8]].any()


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 2), (0,), (0, 5), (4, 0)])
def test_index_shapes(shape: tuple[int, ...]) -> None:
    table = normal((9, 6), 2)
    index = random_bytes(shape, 3, 0, 9).to(torch.int64)
    got = gather_rows(table, index)
    assert got.shape == (*shape, 6)
    assert torch.equal(got, table[index])


def test_an_empty_table() -> None:
    got = gather_rows(torch.empty(0, 3), torch.tensor([[0, -1], [5, 2]]))
    assert same_bits(got, torch.zeros(2, 2, 3))


def test_all_16_bit_patterns_survive() -> None:
    """NaN payloads, infinities, subnormals and negative zeros are copied as they are."""
    patterns = torch.from_numpy(np.arange(65536, dtype=np.uint16).view(np.int16)).view(256, 256)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(4))
    got = gather_rows(patterns.view(torch.bfloat16), order)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got.view(torch.int16), patterns[order])


def test_nothing_leaks_into_an_absent_row() -> None:
    """Row 0 stands in for absent rows; even NaN in it leaves no trace."""
    table = torch.full((2, 3), torch.nan)
    assert same_bits(gather_rows(table, torch.tensor([-1])), torch.zeros(1, 3))


def test_bytes() -> None:
    table = random_bytes((10, 5), 5)
    got = gather_rows(table, torch.tensor([9, -1, 4]))
    assert got.dtype == torch.uint8
    assert torch.equal(got[[0, 2]], table[[9, 4]])
    assert not got[1].any()


def test_a_strided_table() -> None:
    table = normal((20, 12), 6)[::2, 1::3]
    index = torch.tensor([3, 9, -1])
    assert same_bits(gather_rows(table, index), gather_rows(table.contiguous(), index))

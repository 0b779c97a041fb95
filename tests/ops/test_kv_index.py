"""Index rows on worked examples; loops over single entries are in ``tests/compat``."""

from __future__ import annotations

import torch

from deepinfer_neuron.ops.kv_index import (
    page_rows,
    paged_range_index,
    range_index,
    shifted_index,
    two_range_index,
)


def i32(rows: object) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def test_range() -> None:
    assert range_index(i32([[7, 2], [0, 9], [5, 0]]), 3).tolist() == [
        [7, 8, -1],
        [0, 1, 2],
        [-1, -1, -1],
    ]


def test_ring() -> None:
    """Offset 8 lies in the second ring of 5, at its row 3."""
    assert range_index(i32([[8, 4]]), 4, ring=5).tolist() == [[8, 9, 5, 6]]


def test_pages() -> None:
    """Tokens 3 to 6 with pages of 4: the last of page 9, then page 2."""
    table = i32([9, 2])
    assert paged_range_index(i32([[3, 4]]), 5, 4, table).tolist() == [[39, 8, 9, 10, -1]]


def test_pages_of_a_sequence() -> None:
    tokens = i32([[[0, 5, 6, 7]], [[1, 2, 3, -1]]])
    rows = page_rows(tokens, 4, i32([[3], [4]]), i32([[9, 2], [1, 0]]))
    assert rows.tolist() == [[[36, 9, 10, -1]], [[5, 6, 7, -1]]]
    assert page_rows(tokens, 4, i32([[0], [0]]), i32([[], []])).tolist() == [[[-1] * 4]] * 2


def test_two_ranges() -> None:
    assert two_range_index(i32([[4, 2, 30, 1], [1, 0, 8, 5]]), 4).tolist() == [
        [4, 5, 30, -1],
        [8, 9, 10, 11],
    ]


def test_shift() -> None:
    assert shifted_index(i32([-1, 0, -2]), 10).tolist() == [-1, 10, 8]


def test_inputs_stay() -> None:
    ranges, tokens, table = i32([[2, 2]]), i32([[[1, 2]]]), i32([[4, 5]])
    range_index(ranges, 4, ring=3)
    paged_range_index(ranges, 4, 2, table[0])
    page_rows(tokens, 2, i32([[1]]), table)
    assert ranges.tolist() == [[2, 2]]
    assert tokens.tolist() == [[[1, 2]]]
    assert table.tolist() == [[4, 5]]

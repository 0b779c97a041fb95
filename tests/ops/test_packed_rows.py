"""Packed rows, carried tokens and token histories on small cases worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer_neuron.ops.packed_rows import (
    carried_rejections,
    carried_tokens,
    cut_history,
    packed_rows,
    token_history,
)


def ints(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("lengths", [[1], [3], [2, 0, 3], [0, 0, 1, 0], [0]])
@pytest.mark.parametrize("spare", [0, 2])
def test_rows(lengths: list[int], spare: int) -> None:
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    rows = packed_rows(ints(lengths), ints(ends), ends[-1] + spare)
    expected = [(i, j) for i, n in enumerate(lengths) for j in range(n)]
    assert rows.used.tolist() == [True] * ends[-1] + [False] * spare
    pairs = list(zip(rows.sequences.tolist(), rows.steps.tolist(), strict=True))
    assert pairs[: ends[-1]] == expected
    assert all(0 <= i < len(lengths) and j == 0 for i, j in pairs[ends[-1] :])


def test_rows_with_gaps_belong_to_nobody() -> None:
    rows = packed_rows(ints([1, 2]), ints([2, 5]), 6)
    assert rows.used.tolist() == [False, True, False, True, True, False]
    assert rows.steps.tolist() == [0, 0, 0, 0, 1, 0]


def test_carried_tokens() -> None:
    fresh, remap = ints([[1, 2, 3], [4, 5, 6], [7, 8, 9]]), ints([-1, 1, 0])
    got = carried_tokens(fresh, ints([20, 30]), ints([[21, 22], [31, 32]]), remap)
    assert got.tolist() == [[1, 2, 3], [30, 31, 32], [20, 21, 22]]
    got = carried_tokens(fresh, ints([20, 30]), ints([[21], [31]]), remap)
    assert got.tolist() == [[1, 2, 3], [30, 31, 0], [20, 21, 0]]
    got = carried_tokens(fresh[:, :1], ints([20, 30]), torch.empty(2, 0, dtype=torch.int32), remap)
    assert got.tolist() == [[1], [30], [20]]
    nothing = torch.empty(0, dtype=torch.int32)
    assert carried_tokens(fresh, nothing, nothing[:, None], ints([-1] * 3)) is fresh


def test_carried_rejections() -> None:
    assert carried_rejections(ints([1, -1, 0]), ints([5, 2]), 5).tolist() == [3, 0, 0]
    assert carried_rejections(ints([1, -1, 0]), ints([5, 2]), 5, fresh=5).tolist() == [3, 5, 0]
    nothing = torch.empty(0, dtype=torch.int32)
    assert carried_rejections(ints([-1, -1]), nothing, 5, fresh=5).tolist() == [5, 5]


def test_histories_skip_what_was_rejected() -> None:
    """The last two entries of the first window were rejected, none of the second."""
    window, current = ints([[1, 2, 3, 98, 99], [4, 5, 6, 7, 8]]), ints([[10, 11], [20, 21]])
    rows = packed_rows(ints([2, 1]), ints([2, 3]), 3)
    got = token_history(window, current, ints([2, 0]), rows, 4)
    assert got.tolist() == [[10, 3, 2, 1], [11, 10, 3, 2], [20, 8, 7, 6]]


def test_histories_end_at_the_sentinel() -> None:
    history = ints([[1, 2, 3], [-1, 2, 3], [1, 2, -1], [1, -1, 3], [-1, -1, 1]])
    expected = [[1, 2, 3], [0, 0, 0], [1, 2, 0], [1, 0, 0], [0, 0, 0]]
    assert cut_history(history, -1, 0).tolist() == expected

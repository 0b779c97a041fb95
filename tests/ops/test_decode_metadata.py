"""Positions, ranges and slots on small cases worked out by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_neuron.ops import decode_metadata as ops
from deepinfer_neuron.ops.packed_rows import packed_rows


def ints(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


ROWS = packed_rows(ints([2, 3]), ints([2, 5]), 6)


def test_positions_are_the_last_of_a_sequence() -> None:
    at = ops.decode_positions(ints([2, 3]), ints([9, 3]), ROWS)
    assert at[:5].tolist() == [7, 8, 0, 1, 2]
    assert at.dtype == torch.int32


def test_windows_wrap_around_their_ring() -> None:
    at, state = ints([0, 3, 4, 9, 10]), ints([2, 2, 2, 2, 0])
    assert ops.window_ranges(at, state, 4, 5).tolist() == [
        [10, 1],
        [10, 4],
        [11, 4],
        [11, 4],
        [2, 4],
    ]
    assert ops.window_slots(at, state, 5).tolist() == [10, 13, 14, 14, 0]


def test_compressed_keys() -> None:
    at = ints([0, 1, 2, 3, 8])
    assert ops.compressed_length(at, 2).tolist() == [0, 1, 1, 2, 4]
    assert ops.compressed_ranges(at, 1, 6).tolist() == [[0, 1], [6, 2], [12, 3], [18, 4], [24, 9]]
    table, offsets = ints([7, 8, 9]), ints([0, 0, 0, 1, 1])
    positions, slots = ops.compressed_stores(at, 2, 2, table, offsets)
    assert positions.tolist() == [0, 0, 0, 2, 0]
    assert slots.tolist() == [-1, 14, -1, 17, -1]
    _, slots = ops.compressed_stores(at, 1, 8, table, offsets)
    assert slots.tolist() == [56, 57, 58, 67, 72]
    nothing = torch.empty(0, dtype=torch.int32)
    assert ops.compressed_stores(at, 1, 8, nothing, offsets)[1].tolist() == [-1] * 5


def test_large_offsets_wrap() -> None:
    ranges = ops.compressed_ranges(ints([0, 0, 0]), 1, 2**30)
    assert ranges[:, 0].tolist() == [0, 2**30, -(2**31)]


def test_row_tables() -> None:
    out = torch.full((6, 3), -5, dtype=torch.int32)
    ops.copy_row_tables(out, ints([1, 2, 3, 4, 5, 6]), ints([0, 2, 6]), ROWS)
    assert out.tolist() == [[1, 2, -5]] * 2 + [[3, 4, 5]] * 3 + [[-5] * 3]
    before = out.clone()
    ops.copy_row_tables(out, torch.empty(0, dtype=torch.int32), ints([0, 0, 0]), ROWS)
    assert torch.equal(out, before)

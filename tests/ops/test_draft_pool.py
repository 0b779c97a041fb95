"""The pool of proposals keeps its dummy slot."""

from __future__ import annotations

import pytest
import torch

from deepinfer_neuron.ops.draft_pool import fill_rows, store_in_slots


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.int64])
def test_store(dtype: torch.dtype) -> None:
    pool = torch.arange(24).to(dtype).view(8, 3)
    values = torch.arange(100, 118).to(dtype).view(3, 2, 3)
    expected = pool.clone()
    expected[6:8], expected[2:4] = values[0], values[2]
    store_in_slots(pool, values, torch.tensor([3, 0, 1], dtype=torch.int32))
    assert torch.equal(pool, expected)


def test_store_of_nothing() -> None:
    pool = torch.arange(4.0)
    store_in_slots(pool, torch.empty(0, 2), torch.empty(0, dtype=torch.int32))
    store_in_slots(pool, torch.empty(2, 0), torch.tensor([1, 0]))
    store_in_slots(pool, torch.tensor([[8.0, 9.0]]), torch.tensor([0]))
    assert pool.tolist() == [0, 1, 2, 3]


def test_the_dummy_slot_keeps_its_bits() -> None:
    pool = torch.tensor([float("-inf"), -0.0, float("nan"), 1.0])
    before = pool.view(torch.int32).clone()
    store_in_slots(pool, torch.ones(2, 2), torch.tensor([0, 0]))
    assert torch.equal(pool.view(torch.int32), before)


@pytest.mark.parametrize(("count", "spare"), [(0, 5), (3, 5), (5, 5), (3, 1), (2, 0)])
def test_fill(count: int, spare: int) -> None:
    out = torch.full((5,), -1)
    fill_rows(out, torch.arange(count), torch.arange(10, 10 + spare))
    expected = [*range(count), *range(10, 10 + min(spare, 5 - count))]
    assert out.tolist() == expected + [-1] * (5 - len(expected))

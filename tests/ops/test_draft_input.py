"""Draft blocks against a simulated ring, confidence against fp64, row budgets against loops."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_neuron.ops.arithmetic import FixedOrder, FreeOrder, Order
from deepinfer_neuron.ops.draft_input import (
    DraftBlocks,
    confidence,
    draft_blocks,
    split_rows_by_confidence,
    survival,
)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def blocks_of(
    requests: list[tuple[int, int, int]],
    block: int,
    ring: int,
    window: int,
    width: int | None = None,
) -> DraftBlocks:
    """Blocks of requests given as (position of the first row, accepted, state); state -1 pads."""
    slots, positions, first = [], [], []
    for position, accepted, state in requests:
        first.append(len(slots) if state >= 0 else -1)
        if state >= 0:
            at = range(position, position + accepted + 1)
            positions += at
            slots += [state * ring + p % ring for p in at]
    if not slots:
        slots, positions = [0], [0]
    accepted_drafts = ints([accepted for _, accepted, _ in requests])
    return draft_blocks(
        ints(slots),
        ints(positions),
        ints(first),
        accepted_drafts,
        block=block,
        ring=ring,
        window=window,
        width=width,
    )


def plain_block(
    position: int, accepted: int, state: int, block: int, ring: int, window: int, width: int
) -> tuple[list[int], list[int], list[int]]:
    if state < 0:
        return [0] * block, [-1] * block, [-1] * width
    last = position + accepted
    own = [last + 1 + i for i in range(block)]
    seen = list(range(last - window + 1, last + block + 1))
    keys = [state * ring + p % ring if p >= 0 else -1 for p in seen]
    return own, [state * ring + p % ring for p in own], keys + [-1] * (width - len(keys))


@pytest.mark.parametrize(
    ("block", "ring", "window"),
    [(5, 134, 128), (1, 132, 128), (5, 2048, 128), (3, 11, 7), (7, 8, 1)],
)
def test_blocks_are_those_of_a_loop(block: int, ring: int, window: int) -> None:
    source = random.Random(block)
    width = -(-(window + block) // 64) * 64
    starts = [0, 1, window - 2, window - 1, window, ring - 1, ring, 3 * ring - block, 10**6]
    requests = [(p, source.choice([0, block]), i + 1) for i, p in enumerate(starts) if p >= 0]
    for padding in ((0, 0, -1), (7, 3, -1)):
        requests = [padding, *requests, padding]
    got = blocks_of(requests, block, ring, window)
    for r, request in enumerate(requests):
        own, slots, keys = plain_block(*request, block, ring, window, width)
        assert got.positions[r].tolist() == own
        assert got.slots[r].tolist() == slots
        assert got.keys[r].tolist() == keys
        assert got.valid[r].tolist() == [request[2] >= 0] * block


def test_width_may_be_larger_or_smaller() -> None:
    for width in (2, 3, 40):
        got = blocks_of([(20, 1, 1)], 3, 16, 4, width)
        keys = plain_block(20, 1, 1, 3, 16, 4, max(width, 7))[2][:width]
        assert got.keys.tolist() == [keys]


def test_only_padding_and_no_requests() -> None:
    got = blocks_of([(0, 0, -1)] * 2, 5, 134, 128)
    assert bool((got.keys == -1).all())
    assert not bool(got.valid.any())
    assert blocks_of([], 5, 134, 128).keys.shape == (0, 192)


def test_worked_example() -> None:
    got = blocks_of([(199, 2, 3), (40, 5, 7)], 5, 134, 128)
    assert got.positions.tolist() == [[202, 203, 204, 205, 206], [46, 47, 48, 49, 50]]
    assert got.slots.tolist() == [[470, 471, 472, 473, 474], [984, 985, 986, 987, 988]]
    first = [*range(476, 536), *range(402, 470), *range(470, 475)]
    second = [-1] * 82 + [*range(938, 984), *range(984, 989)]
    assert got.keys[0].tolist() == first + [-1] * 59
    assert got.keys[1].tolist() == second + [-1] * 59


@pytest.mark.parametrize("block", [1, 3, 5, 7])
def test_every_key_read_is_the_newest_of_its_position(block: int) -> None:
    """Hundreds of steps with random acceptance on a ring with the least possible slack."""
    window, source = 16, random.Random(block)
    ring = window + block + 1
    held: dict[int, tuple[int, str]] = {}
    position = 0
    for _ in range(300):
        accepted = source.randrange(source.randrange(block + 1) + 1)
        for p in range(position, position + block + 1):  # rejected rows store keys too
            held[p % ring] = (p, "main")
        got = blocks_of([(position, accepted, 0)], block, ring, window)
        for p, slot in zip(got.positions[0].tolist(), got.slots[0].tolist(), strict=True):
            held[slot] = (p, "draft")
        last = position + accepted
        read = [held[slot] for slot in got.keys[0].tolist() if slot >= 0]
        context = [(p, "main") for p in range(max(0, last - window + 1), last + 1)]
        assert read == context + [(p, "draft") for p in range(last + 1, last + block + 1)]
        position = last + 1


@pytest.mark.parametrize("order", [FreeOrder(), FixedOrder()])
@pytest.mark.parametrize("markov", [0, 64])
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_confidence_is_that_of_fp64(order: Order, markov: int, rows: int) -> None:
    source = torch.Generator().manual_seed(rows + markov)
    wide = torch.randn(rows, 300, generator=source).to(torch.bfloat16)
    hidden, embedding = wide[:, 10:202], wide[:, 210 : 210 + markov]
    weight = (torch.randn(192 + markov, generator=source) / 8).to(torch.bfloat16)
    got = confidence(hidden, weight, 0.85, order, embedding if markov else None)
    features = torch.cat((hidden, embedding), 1).double()
    expected = torch.sigmoid(features @ weight.double() / 0.85)
    assert got.dtype == torch.float32
    assert got.shape == (rows,)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=0)


def test_confidence_is_clamped() -> None:
    hidden = torch.tensor([[1e4], [-1e4], [50.0], [0.0]], dtype=torch.bfloat16)
    weight = torch.ones(1, dtype=torch.bfloat16)
    got = confidence(hidden, weight, 1.0, FreeOrder()).tolist()
    assert got[0] == got[2] == 1.0
    assert got[1] == pytest.approx(math.exp(-60), rel=1e-5)
    assert got[3] == 0.5
    assert confidence(hidden, weight, 1e-5, FreeOrder()).tolist()[3] == 0.5


def test_survival_multiplies_in_order() -> None:
    rates = torch.rand(20, 7, generator=torch.Generator().manual_seed(1))
    got = survival(rates)
    for r in range(20):
        product = np.float32(1)
        for j in range(7):
            product = product * np.float32(rates[r, j].item())
            assert got[r, j].item() == product
    assert survival(rates[:, :0]).shape == (20, 0)


def plain_split(total: int, rates: list[list[float]]) -> list[int]:
    flat = [(-value, i, j) for i, row in enumerate(rates) for j, value in enumerate(row)]
    chosen = sorted(flat)[: max(0, total - len(rates))]
    return [1 + sum(i == r for _, i, _ in chosen) for r in range(len(rates))]


@pytest.mark.parametrize(("requests", "drafts"), [(1, 5), (32, 7), (7, 1), (0, 5), (3, 0)])
@pytest.mark.parametrize("kind", ["random", "ties", "zero", "one"])
def test_rows_go_to_the_likeliest_drafts(requests: int, drafts: int, kind: str) -> None:
    source = torch.Generator().manual_seed(requests)
    rates = torch.rand(requests, drafts, generator=source)
    if kind == "ties":
        rates = (rates * 3).floor() / 2
    elif kind != "random":
        rates.fill_(0.0 if kind == "zero" else 1.0)
    living = survival(rates)
    most = requests * (drafts + 1)
    for total in sorted({0, requests, requests + 1, (requests + most) // 2, most, most + 5}):
        got = split_rows_by_confidence(total, living)
        assert got.dtype == torch.int32
        assert got.tolist() == plain_split(total, living.tolist())
        if requests <= total <= most:
            assert int(got.sum()) == total or requests == 0


def test_split_of_a_worked_example() -> None:
    rates = torch.tensor([[0.9, 0.8, 0.5, 0.4, 0.3], [0.6, 0.5, 0.9, 0.9, 0.9]])
    assert split_rows_by_confidence(8, survival(rates)).tolist() == [4, 4]

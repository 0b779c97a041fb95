"""Decode metadata against a loop over tokens."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deepinfer_neuron.compat.tilelang_ops import decode_metadata
from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops import decode_metadata as ops
from tests.compat.outputs import Output

I32, B = torch.int32, torch.bool
BLOCK, RING, WINDOW, MOST = 16, 11, 8, 9
RATIOS = [
    ((2,), (2,), (2,)),
    ((1, 2), (), (1, 2)),
    ((1,), (), (1,)),
    ((1, 4), (4,), (1,)),
    ((),) * 3,
]


def ints(values: object) -> Tensor:
    return torch.tensor(values, dtype=I32)


class Batch:
    """Sequences with mixed lengths, some of them placeholders."""

    def __init__(self, count: int, seed: int) -> None:
        source = random.Random(seed)
        self.lengths = [source.randint(1, 5) for _ in range(count)]
        self.contexts = [q + source.choice([0, 1, 7, 15, 30, 31, 127]) for q in self.lengths]
        self.placeholder = [source.random() < 0.3 for _ in range(count)]
        self.state = [source.randrange(50) for _ in range(count)]
        self.tables = [
            [source.randrange(100) for _ in range(min(MOST, -(-k // BLOCK)))] for k in self.contexts
        ]
        self.sums = [sum(self.lengths[: i + 1]) for i in range(count)]
        self.offsets = [sum(map(len, self.tables[:i])) for i in range(count + 1)]
        self.total = sum(self.lengths)

    @property
    def flat(self) -> Tensor:
        return ints([page for table in self.tables for page in table])

    def tokens(self) -> list[tuple[int, int]]:
        """Sequence and position of each row."""
        pairs = zip(self.lengths, self.contexts, strict=True)
        return [(i, k - q + j) for i, (q, k) in enumerate(pairs) for j in range(q)]


def expected_rows(batch: Batch, balance: bool) -> list[Tensor]:
    rows = []
    for i, at in batch.tokens():
        length = min(at + 1, WINDOW)
        start = batch.state[i] * RING + (at - length + 1) % RING
        query = 998244353 if batch.placeholder[i] else i
        slot = batch.state[i] * RING + at % RING
        valid = not batch.placeholder[i]
        rows.append(
            (at, valid, balance, False, at + 1, [start, length], slot, query, batch.state[i])
        )
    columns = list(zip(*rows, strict=True)) or [()] * 9
    dtypes = [I32, B, B, B, I32, I32, I32, I32, I32]
    return [torch.tensor(c, dtype=t) for c, t in zip(columns, dtypes, strict=True)]


def expected_stores(batch: Batch, ratio: int) -> tuple[Tensor, Tensor]:
    page, positions, slots = BLOCK // ratio, [], []
    for i, at in batch.tokens():
        completes = (at + 1) % ratio == 0
        key = at // ratio
        positions.append(key * ratio if completes else 0)
        slots.append(batch.tables[i][key // page] * page + key % page if completes else -1)
    return ints(positions), ints(slots)


def fill(out: Output, values: list[Tensor]) -> Tensor:
    """What a buffer with one row per ratio holds afterwards."""
    expected = out.before.clone()
    for line, value in zip(expected, values, strict=False):
        if value.numel():
            line[: len(value)] = value
    return expected


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("ratios", RATIOS)
@pytest.mark.parametrize(("count", "spare"), [(0, 0), (1, 0), (7, 0), (40, 6)])
def test_metadata(
    count: int, spare: int, ratios: tuple[tuple[int, ...], ...], balance: bool
) -> None:
    batch = Batch(count, seed=count)
    ca, dense, sparse = ratios
    total, wide = batch.total, batch.total + spare
    simple = [Output((total,), t) for t in (I32, B, B, B, I32)]
    lengths = Output((max(len(sparse), 1), wide), I32)
    ranges = Output((max(len(dense), 1), wide, 2), I32)
    window = Output((total, 2), I32)
    more = [Output((total,), I32) for _ in range(3)]
    stores = [Output((max(len(ca), 1), wide), I32) for _ in range(2)]
    kernel = decode_metadata.prepare_v4_decode_metadata_tl(
        5, MOST, WINDOW, RING, BLOCK, balance, ca, dense, sparse
    )
    kernel(
        ints(batch.lengths),
        ints(batch.contexts),
        ints(batch.sums),
        batch.flat,
        ints(batch.offsets),
        ints(batch.state),
        torch.tensor(batch.placeholder, dtype=B),
        *(out.view for out in [*simple, lengths, ranges, window, *more, *stores]),
    )
    rows = [*simple, window, *more]
    for out, expected in zip(rows, expected_rows(batch, balance), strict=True):
        out.check(expected.view_as(out.view))
    after = [at + 1 for _, at in batch.tokens()]
    lengths.check(fill(lengths, [ints([n // r for n in after]) for r in sparse]))
    steps = [MOST * (BLOCK // r) for r in dense]
    dense_ranges = [
        ints([[row * s, n // r] for row, n in enumerate(after)])
        for s, r in zip(steps, dense, strict=True)
    ]
    ranges.check(fill(ranges, dense_ranges))
    pairs = [expected_stores(batch, r) for r in ca]
    stores[0].check(fill(stores[0], [positions for positions, _ in pairs]))
    stores[1].check(fill(stores[1], [slots for _, slots in pairs]))


def test_worked_example() -> None:
    """Six rows at positions 199 to 204 on a ring of 134."""
    kernel = decode_metadata.prepare_v4_decode_metadata_tl(
        6, 8, 128, 134, 64, False, (2,), (), (2,)
    )
    outs = [torch.zeros(6, dtype=t) for t in (I32, B, B, B, I32)]
    lengths, ranges = torch.zeros(1, 6, dtype=I32), torch.zeros(1, 6, 2, dtype=I32)
    window = torch.zeros(6, 2, dtype=I32)
    slots, query, state = (torch.zeros(6, dtype=I32) for _ in range(3))
    positions_c, slots_c = (torch.zeros(1, 6, dtype=I32) for _ in range(2))
    one = ints([6])
    kernel(
        one,
        ints([205]),
        one,
        ints([10, 11, 12, 13]),
        ints([0, 4]),
        ints([3]),
        torch.zeros(1, dtype=B),
        *outs,
        lengths,
        ranges,
        window,
        slots,
        query,
        state,
        positions_c,
        slots_c,
    )
    assert outs[0].tolist() == list(range(199, 205))
    assert slots.tolist() == list(range(467, 473))
    assert window[0].tolist() == [474, 128]
    assert lengths.tolist() == [[100, 100, 101, 101, 102, 102]]
    assert positions_c.tolist() == [[198, 0, 200, 0, 202, 0]]
    assert slots_c.tolist() == [[13 * 32 + 3, -1, 13 * 32 + 4, -1, 13 * 32 + 5, -1]]


@pytest.mark.parametrize("spare", [0, 3])
@pytest.mark.parametrize("count", [0, 1, 30])
def test_block_tables(count: int, spare: int) -> None:
    batch = Batch(count, seed=count + 1)
    out = Output((batch.total + spare, MOST), I32)
    kernel = decode_metadata.copy_block_tables_tl(5, MOST)
    kernel(ints(batch.lengths), ints(batch.sums), batch.flat, ints(batch.offsets), out.view)
    expected = out.before.clone()
    for row, (i, _) in enumerate(batch.tokens()):
        expected[row, : len(batch.tables[i])] = ints(batch.tables[i])
    out.check(expected)


def test_block_tables_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_WORKSPACE_ELEMENTS", 4 * MOST)
    test_block_tables(30, 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: decode_metadata.copy_block_tables_tl(5, -1),
        lambda: decode_metadata.prepare_v4_decode_metadata_tl(
            5, 8, 128, 0, 64, False, (2,), (), (2,)
        ),
        lambda: decode_metadata.prepare_v4_decode_metadata_tl(
            5, 8, 128, 134, 64, False, (3,), (), (3,)
        ),
    ],
)
def test_senseless_sizes_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        make()


def test_kernels_are_made_once() -> None:
    arguments = (5, 8, 128, 134, 64, False, (2,), (), (2,))
    kernel = decode_metadata.prepare_v4_decode_metadata_tl(*arguments)
    assert kernel is decode_metadata.prepare_v4_decode_metadata_tl(*arguments)
    tables = decode_metadata.copy_block_tables_tl(5, 8)
    assert tables is decode_metadata.copy_block_tables_tl(5, 8)

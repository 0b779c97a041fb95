"""Packing of steps, replayed on memories that remember which token lies where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer_neuron.cache.pools import pair_ring_length, window_ring_length
from deepinfer_neuron.model.step import EntryPlan, StepTensors
from deepinfer_neuron.runner.pack import ChunkPlan, StepGeometry, pack

LAYERS, COLUMNS = 2, 3

Token = tuple[int, int, int]
"""Sequence, position, and how often that position has been computed."""


def geometry(window: int, backtracking: int = 0) -> StepGeometry:
    """Rings that let ``backtracking`` tokens be undone; both ratios in use."""
    return StepGeometry(
        window=window,
        window_ring=window_ring_length(window, backtracking),
        pair_ring=pair_ring_length(2, backtracking),
        ratios=(1, 2),
    )


def a_plan(
    start: int,
    count: int,
    slot: int = 1,
    table: Sequence[int] = (1,),
    *,
    num_outputs: int = 1,
) -> ChunkPlan:
    """A chunk whose token ids and table rows say where they come from."""
    ids = [1000 * slot + position for position in range(start, start + count)]
    rows = np.arange(LAYERS * count * COLUMNS).reshape(LAYERS, count, COLUMNS) + 10_000 * slot
    return ChunkPlan(ids, start, slot, list(table), rows, num_outputs)


@dataclass
class Stream:
    """What is known of one sequence."""

    name: int
    slot: int
    table: list[int]
    length: int = 0
    highest: int = 0
    """Most tokens that its rings have ever held."""
    versions: dict[int, int] = field(default_factory=dict)

    def token(self, position: int) -> Token:
        """The current computation of a position."""
        return self.name, position, self.versions[position]


@dataclass
class Memory:
    """Ring places and pool slots with the tokens and entries they hold."""

    geometry: StepGeometry
    window: dict[int, Token] = field(default_factory=dict)
    pairs: dict[int, Token] = field(default_factory=dict)

    def advance(self, sequences: list[Stream], counts: Sequence[int]) -> None:
        """One step with those sequences that take tokens and have room in their tables."""
        pairs = zip(sequences, counts, strict=True)
        active = [(s, n) for s, n in pairs if n and s.length + n <= 128 * len(s.table)]
        if active:
            self.run([s for s, _ in active], [n for _, n in active])

    def run(self, sequences: list[Stream], counts: list[int]) -> None:
        """Pack the next tokens of some sequences and check every index of the step."""
        plans, rows, owners = [], [], []
        for sequence, count in zip(sequences, counts, strict=True):
            begin = sequence.length
            plans.append(a_plan(begin, count, sequence.slot, sequence.table))
            for position in range(begin, begin + count):
                sequence.versions[position] = sequence.versions.get(position, 0) + 1
                rows.append(sequence.token(position))
                owners.append(sequence)
            sequence.length = begin + count
            sequence.highest = max(sequence.highest, sequence.length)
        step = pack(plans, self.geometry)
        assert step.positions.tolist() == [position for _, position, _ in rows]
        self.check_window(step, rows, owners)
        for ratio in (1, 2):
            self.check_entries(step.entries[ratio], ratio, rows, owners)
        self.store(step, rows, sequences, counts)

    def check_window(self, step: StepTensors, rows: list[Token], owners: list[Stream]) -> None:
        """Each row sees exactly the last ``window`` positions, itself included, ascending."""
        history = [self.window[place] for place in step.window.history_places.tolist()]
        assert len(set(history)) == len(history)
        keys = history + rows
        for listed, (_, position, _), owner in zip(
            step.window.key_index.tolist(), rows, owners, strict=True
        ):
            seen = range(max(0, position - self.geometry.window + 1), position + 1)
            valid = [index for index in listed if index >= 0]
            assert [keys[index] for index in valid] == [owner.token(p) for p in seen]
            assert listed == valid + [-1] * (len(listed) - len(valid))

    def check_entries(
        self, plan: EntryPlan, ratio: int, rows: list[Token], owners: list[Stream]
    ) -> None:
        """A row whose token is the last of its group completes an entry; no other row does."""
        last = [i for i, (_, position, _) in enumerate(rows) if (position + 1) % ratio == 0]
        assert plan.rows.tolist() == last
        entries = [rows[i][1] // ratio for i in last]
        assert plan.positions.tolist() == [ratio * entry for entry in entries]
        size = 128 // ratio
        assert plan.slots.tolist() == [
            owners[i].table[entry // size] * size + entry % size
            for i, entry in zip(last, entries, strict=True)
        ]
        if ratio == 2:
            pool = [self.pairs[place] for place in plan.ring_read.tolist()] + rows
            firsts = [pool[index] for index in plan.first.tolist()]
            assert firsts == [owners[i].token(rows[i][1] - 1) for i in last]
        else:
            ring = plan.first, plan.ring_read, plan.ring_store_rows, plan.ring_store_places
            assert not any(part.numel() for part in ring)

    def store(
        self,
        step: StepTensors,
        rows: list[Token],
        sequences: list[Stream],
        counts: list[int],
    ) -> None:
        """The last tokens of each chunk go to their places, within the sequence's own slot."""
        window, pairs = step.window, step.entries[2]
        for memory, length, stored, places in (
            (self.window, self.geometry.window_ring, window.store_rows, window.store_places),
            (self.pairs, self.geometry.pair_ring, pairs.ring_store_rows, pairs.ring_store_places),
        ):
            kept: list[int] = []
            where: list[int] = []
            first = 0
            for count in counts:
                kept += range(first + count - min(length, count), first + count)
                first += count
            for row in kept:
                owner = next(s for s in sequences if s.name == rows[row][0])
                where.append(owner.slot * length + rows[row][1] % length)
            assert stored.tolist() == kept
            assert places.tolist() == where
            assert len(set(where)) == len(where)
            memory.update(zip(where, (rows[row] for row in kept), strict=True))


def three_sequences() -> list[Stream]:
    """Slots out of order, and blocks scattered over the pool."""
    tables = ([7, 2, 11, 5, 30], [1, 12, 3, 9, 31], [4, 8, 6, 10, 32])
    return [Stream(n, slot, tables[n]) for n, slot in enumerate((3, 1, 2))]


counts = st.sampled_from([0, 1, 1, 1, 2, 3, 4, 5, 8, 17, 63, 64, 65, 127, 128, 129])
steps = st.lists(st.tuples(counts, counts, counts).filter(any), min_size=1, max_size=6)
undone = st.lists(st.tuples(*[st.integers(0, 6)] * 3), min_size=6, max_size=6)


@given(st.sampled_from([1, 2, 3, 8, 16, 128]), steps)
@settings(deadline=None, derandomize=True, max_examples=150)
def test_any_chunking(window: int, plan: list[tuple[int, ...]]) -> None:
    """Sequences side by side, each cut in any way, in any company."""
    sequences, memory = three_sequences(), Memory(geometry(window))
    for sizes in plan:
        memory.advance(sequences, sizes)


@given(st.sampled_from([1, 2, 8, 16]), st.integers(1, 6), steps, undone)
@settings(deadline=None, derandomize=True, max_examples=150)
def test_undoing_tokens(
    window: int, backtracking: int, plan: list[tuple[int, ...]], back: list[tuple[int, ...]]
) -> None:
    """Up to ``backtracking`` tokens are computed again, as if they never had been."""
    sequences, memory = three_sequences(), Memory(geometry(window, backtracking))
    for sizes, steps_back in zip(plan, back, strict=False):
        for sequence, undo in zip(sequences, steps_back, strict=True):
            lowest = max(0, sequence.highest - backtracking)
            sequence.length = min(sequence.length, max(lowest, sequence.length - undo))
        memory.advance(sequences, sizes)


class TestWindow:
    """Small cases by hand."""

    @pytest.mark.parametrize(
        ("position", "first"), [(0, 0), (126, 0), (127, 0), (128, 1), (200, 73)]
    )
    def test_one_row(self, position: int, first: int) -> None:
        """With a window of 128, position 127 is the last that sees position 0."""
        step = pack([a_plan(position, 1, table=(1, 2))], geometry(128, 6))
        places = step.window.history_places.tolist()
        want = [134 + p % 134 for p in range(max(0, position - 127), position)]
        assert places == want
        seen = position - first + 1
        assert step.window.key_index.tolist() == [list(range(seen))]

    @pytest.mark.parametrize("position", [132, 133, 134, 135])
    def test_ring_wrap(self, position: int) -> None:
        step = pack([a_plan(position, 1, slot=2, table=(1, 2))], geometry(128, 6))
        assert step.window.store_rows.tolist() == [0]
        assert step.window.store_places.tolist() == [2 * 134 + position % 134]

    def test_a_prompt(self) -> None:
        """No history; earlier rows have shorter lists."""
        step = pack([a_plan(0, 4)], geometry(3))
        assert step.window.history_places.tolist() == []
        assert step.window.key_index.tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 2], [1, 2, 3]]
        assert step.window.store_rows.tolist() == [1, 2, 3]
        assert step.window.store_places.tolist() == [4, 5, 3]

    def test_a_later_chunk(self) -> None:
        """Two keys of the past come first, then the chunk's own."""
        step = pack([a_plan(5, 2)], geometry(3))
        assert step.window.history_places.tolist() == [3 + 3 % 3, 3 + 4 % 3]
        assert step.window.key_index.tolist() == [[0, 1, 2], [1, 2, 3]]

    def test_two_sequences(self) -> None:
        """History of the first, history of the second, rows of both."""
        step = pack([a_plan(4, 1, slot=2), a_plan(2, 2, slot=1)], geometry(3))
        assert step.window.history_places.tolist() == [6 + 2, 6 + 0, 3 + 0, 3 + 1]
        assert step.window.key_index.tolist() == [[0, 1, 4], [2, 3, 5], [3, 5, 6]]


class TestEntries:
    """Small cases by hand."""

    def plan(self, start: int, count: int, ratio: int = 2) -> EntryPlan:
        return pack([a_plan(start, count, table=(3, 1))], geometry(4, 1)).entries[ratio]

    def test_ratio_1(self) -> None:
        plan = self.plan(127, 2, ratio=1)
        assert plan.rows.tolist() == [0, 1]
        assert plan.positions.tolist() == [127, 128]
        assert plan.slots.tolist() == [3 * 128 + 127, 1 * 128]

    @pytest.mark.parametrize(
        ("start", "count", "rows", "first", "read"),
        [
            (0, 1, [], [], []),
            (1, 1, [0], [0], [2 + 0]),
            (0, 2, [1], [0], []),
            (0, 5, [1, 3], [0, 2], []),
            (5, 3, [0, 2], [0, 2], [2 + 0]),
            (5, 1, [0], [0], [2 + 0]),
            (6, 1, [], [], []),
        ],
    )
    def test_ratio_2(
        self, start: int, count: int, rows: list[int], first: list[int], read: list[int]
    ) -> None:
        """``first`` counts through the places read from the ring, then the rows."""
        plan = self.plan(start, count)
        assert plan.rows.tolist() == rows
        assert plan.first.tolist() == first
        assert plan.ring_read.tolist() == read

    def test_an_entry_stands_where_its_first_token_does(self) -> None:
        plan = self.plan(126, 4)
        assert plan.positions.tolist() == [126, 128]
        assert plan.slots.tolist() == [3 * 64 + 63, 1 * 64]

    @pytest.mark.parametrize(("start", "count"), [(0, 1), (3, 1), (0, 9), (5, 2)])
    def test_the_pair_ring_keeps_the_last_two(self, start: int, count: int) -> None:
        plan = self.plan(start, count)
        kept = list(range(max(0, count - 2), count))
        assert plan.ring_store_rows.tolist() == kept
        assert plan.ring_store_places.tolist() == [2 + (start + row) % 2 for row in kept]

    def test_only_the_ratios_in_use(self) -> None:
        one = StepGeometry(window=4, window_ring=5, pair_ring=2, ratios=(1,))
        assert list(pack([a_plan(0, 3)], one).entries) == [1]
        none = StepGeometry(window=4, window_ring=5, pair_ring=2, ratios=())
        assert not pack([a_plan(0, 3)], none).entries


class TestRows:
    """What passes through."""

    PLANS = (
        a_plan(4, 2, slot=2, table=(9,)),
        a_plan(0, 3, slot=1, table=(5, 6), num_outputs=0),
        a_plan(130, 1, slot=3, table=(7, 8, 4)),
    )

    def step(self) -> StepTensors:
        return pack(self.PLANS, geometry(4, 1))

    def test_tokens_and_positions(self) -> None:
        step = self.step()
        assert step.token_ids.tolist() == [2004, 2005, 1000, 1001, 1002, 3130]
        assert step.positions.tolist() == [4, 5, 0, 1, 2, 130]

    def test_outputs_are_last_rows_of_those_who_ask(self) -> None:
        assert self.step().output_rows.tolist() == [1, 5]
        silent = pack([self.PLANS[1]], geometry(4, 1))
        assert silent.output_rows.tolist() == []

    def test_engram_rows(self) -> None:
        rows = self.step().engram_rows
        assert rows.shape == (LAYERS, 6, COLUMNS)
        assert rows[:, 0].tolist() == [[20_000, 20_001, 20_002], [20_006, 20_007, 20_008]]
        assert torch.equal(rows[:, 2:5], torch.from_numpy(self.PLANS[1].engram_rows))

    def test_chunks(self) -> None:
        """Tables may be padded behind, with the dummy block."""
        chunks = self.step().chunks
        assert [(c.start, c.stop, c.stop_position) for c in chunks] == [
            (0, 2, 6),
            (2, 5, 3),
            (5, 6, 131),
        ]
        for chunk, plan in zip(chunks, self.PLANS, strict=True):
            table = chunk.block_table.tolist()
            assert table[: len(plan.block_table)] == plan.block_table
            assert set(table[len(plan.block_table) :]) <= {0}
        assert [chunks[2].entries(ratio) for ratio in (1, 2)] == [131, 65]

    def test_every_index_is_int64(self) -> None:
        step = self.step()
        parts: list[Tensor] = [step.token_ids, step.positions, step.engram_rows, step.output_rows]
        parts += vars(step.window).values()
        for plan in step.entries.values():
            parts += vars(plan).values()
        assert {part.dtype for part in parts} == {torch.int64}
        assert all(part.is_contiguous() for part in parts)

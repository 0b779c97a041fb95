"""Factories for steps that start before the last one's results are known, against loops."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deepinfer_neuron.compat.tilelang_ops import zos
from deepinfer_neuron.errors import ConfigError
from tests.compat.outputs import Output

I32 = torch.int32
SENTINEL, PAD = -1, 77


def ints(values: object, *shape: int) -> Tensor:
    return torch.tensor(values, dtype=I32).reshape(shape or (-1,))


class Step:
    """A step of a few sequences: fresh ones and ones of the last step in another order."""

    def __init__(self, count: int, nextn: int, old: float, history: int, seed: int) -> None:
        source = random.Random(seed)
        self.count, self.nextn, self.history = count, nextn, history
        self.before = 0 if old == 0 else count + 2
        places = source.sample(range(self.before), count) if self.before else []
        self.remap = [places[i] if source.random() < old else -1 for i in range(count)]
        self.lengths = [source.randint(1, nextn + 1) for _ in range(count)]
        self.total = sum(self.lengths)

        def tokens(rows: int, columns: int) -> list[list[int]]:
            return [[source.randrange(40) for _ in range(columns)] for _ in range(rows)]

        self.fresh, self.predicted = tokens(count, nextn + 1), tokens(self.before, nextn)
        self.sampled = [source.randrange(40) for _ in range(self.before)]
        self.accepted = [source.randint(0, nextn) for _ in range(self.before)]
        self.table = [SENTINEL if token % 11 == 5 else token * 3 for token in range(40)]
        window = tokens(count, nextn + history - 1)
        self.window = [[SENTINEL if t % 9 == 4 else t for t in line] for line in window]

    @property
    def sums(self) -> list[int]:
        return [sum(self.lengths[: i + 1]) for i in range(self.count)]

    def last_step(self) -> tuple[Tensor, Tensor]:
        return ints(self.sampled), ints(self.predicted, self.before, self.nextn)

    def token(self, i: int, j: int) -> int:
        """Token ``j`` of sequence ``i`` in this step."""
        place = self.remap[i]
        if place < 0:
            return self.fresh[i][j]
        return self.sampled[place] if j == 0 else self.predicted[place][j - 1]

    def compressed(self, i: int, j: int) -> int:
        return self.fresh[i][j] if self.remap[i] < 0 else self.table[self.token(i, j)]


CASES = [
    (count, nextn, old) for count in (0, 1, 13) for nextn in (0, 1, 5) for old in (0.0, 0.5, 1.0)
]


@pytest.mark.parametrize(("count", "nextn", "old"), CASES)
def test_input_ids(count: int, nextn: int, old: float) -> None:
    step = Step(count, nextn, old, 1, seed=count + nextn)
    out = Output((step.total + 3,), I32)
    kernel = zos.gather_input_ids_zos_tl(nextn + 1)
    kernel(
        ints(step.fresh, count, nextn + 1),
        *step.last_step(),
        ints(step.remap),
        ints(step.lengths),
        ints(step.sums),
        out.view,
    )
    expected = out.before.clone()
    rows = [step.token(i, j) for i in range(count) for j in range(step.lengths[i])]
    expected[: step.total] = ints(rows)
    out.check(expected)


@pytest.mark.parametrize("history", [1, 3, 4])
@pytest.mark.parametrize(("count", "nextn", "old"), CASES)
def test_engram_tokens(count: int, nextn: int, old: float, history: int) -> None:
    step = Step(count, nextn, old, history, seed=count * 7 + nextn)
    out = Output((step.total + 2, history), I32)
    kernel = zos.gather_engram_tokens_zos_tl(nextn + 1, history, PAD, SENTINEL)
    kernel(
        ints(step.window, count, nextn + history - 1),
        ints(step.fresh, count, nextn + 1),
        *step.last_step(),
        ints(step.accepted),
        ints(step.remap),
        ints(step.table),
        ints(step.lengths),
        ints(step.sums),
        out.view,
    )
    expected, row = out.before.clone(), 0
    for i in range(count):
        place = step.remap[i]
        kept = 0 if place < 0 else step.accepted[place]
        past = step.window[i][: kept + history - 1]
        for j in range(step.lengths[i]):
            line = [*past, *(step.compressed(i, c) for c in range(j + 1))][::-1][:history]
            cut = line.index(SENTINEL) if SENTINEL in line else history
            expected[row] = ints(line[:cut] + [PAD] * (history - cut))
            row += 1
    out.check(expected)


@pytest.mark.parametrize(("count", "nextn", "old"), CASES)
def test_lengths_of_keys(count: int, nextn: int, old: float) -> None:
    step = Step(count, nextn, old, 1, seed=count)
    lengths = Output((count,), I32)
    kernel = zos.compute_seqlens_k_zos_tl(nextn)
    kernel(lengths.view, ints(step.lengths), ints(step.remap), ints(step.accepted))
    less = [nextn - step.accepted[place] if place >= 0 else 0 for place in step.remap]
    lengths.check(lengths.before + ints(step.lengths) - ints(less))


def test_lengths_with_nothing_and_with_all_accepted() -> None:
    lengths = ints([211, 50, 9])
    zos.compute_seqlens_k_zos_tl(5)(lengths, ints([6, 6, 1]), ints([0, 1, -1]), ints([2, 5]))
    assert lengths.tolist() == [214, 56, 10]


@pytest.mark.parametrize(
    "make",
    [
        lambda: zos.gather_input_ids_zos_tl(0),
        lambda: zos.gather_engram_tokens_zos_tl(3, 0, 0, -1),
        lambda: zos.compute_seqlens_k_zos_tl(-1),
    ],
)
def test_senseless_sizes_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        make()


def test_kernels_are_made_once() -> None:
    assert zos.gather_input_ids_zos_tl(3) is zos.gather_input_ids_zos_tl(3)
    assert zos.compute_seqlens_k_zos_tl(3) is zos.compute_seqlens_k_zos_tl(3)
    arguments = (3, 4, 0, -1)
    kernel = zos.gather_engram_tokens_zos_tl(*arguments)
    assert kernel is zos.gather_engram_tokens_zos_tl(*arguments)

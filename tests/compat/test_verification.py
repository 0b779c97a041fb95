"""Factories of the verification family against loops."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deepinfer_neuron.compat.tilelang_ops import verification
from deepinfer_neuron.errors import ConfigError
from tests.compat.outputs import Output

I32, F32, B, U64 = torch.int32, torch.float32, torch.bool, torch.uint64
LENGTHS = [[], [1], [6], [1, 4, 1, 6, 2, 3], [3] * 20]


def ints(values: object, *shape: int) -> Tensor:
    return torch.tensor(values, dtype=I32).reshape(shape or (-1,))


def bools(values: list[bool]) -> Tensor:
    return torch.tensor(values, dtype=B)


def starts(lengths: list[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths))]


def owners(lengths: list[int]) -> list[int]:
    return [i for i, n in enumerate(lengths) for _ in range(n)]


def places(lengths: list[int]) -> list[int]:
    return [j for n in lengths for j in range(n)]


def judged(lengths: list[int]) -> list[bool]:
    return [j < n - 1 for n in lengths for j in range(n)]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_metadata(lengths: list[int]) -> None:
    total = sum(lengths)
    outs = [Output((total,), t) for t in (I32, I32, B)]
    kernel = verification.prepare_verification_metadata_tl(5)
    kernel(ints(starts(lengths)), ints(lengths), *(out.view for out in outs))
    outs[0].check(ints(owners(lengths)))
    outs[1].check(ints(places(lengths)))
    outs[2].check(bools(judged(lengths)))


@pytest.mark.parametrize("lengths", LENGTHS)
def test_parameters_of_rows(lengths: list[int]) -> None:
    count, total, source = len(lengths), sum(lengths), random.Random(1)
    values = [[source.random() for _ in lengths] for _ in range(2)]
    values += [[source.randrange(-(2**31), 2**31) for _ in lengths] for _ in range(2)]
    seeds = [source.getrandbits(64) for _ in lengths]
    dtypes = [F32, F32, I32, I32, U64]
    given = [torch.tensor(v, dtype=t) for v, t in zip([*values, seeds], dtypes, strict=True)]
    outs = [Output((total,), t) for t in dtypes]
    kernel = verification.expand_sampling_params_tl()
    kernel(*given, ints(owners(lengths)), ints(places(lengths)), *(out.view for out in outs))
    assert len(given[0]) == count
    for index, out in enumerate(outs):
        rows = [given[index][i].item() for i in owners(lengths)]
        if index == 3:
            moved = [p + j * 10_000_019 for p, j in zip(rows, places(lengths), strict=True)]
            rows = [(p + 2**31) % 2**32 - 2**31 for p in moved]
        out.check(torch.tensor(rows, dtype=dtypes[index]))


@pytest.mark.parametrize("rows", [0, 1, 9])
def test_lookup_by_key(rows: int) -> None:
    source, width = random.Random(rows), 64
    keys = [[source.randrange(40) for _ in range(width)] for _ in range(rows)]
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(1))
    queries = [source.randrange(-20, 60) for _ in range(rows)]
    out = Output((rows, 1), F32)
    kernel = verification.map_lookup_tl(width)
    kernel(ints(keys, rows, width), values, ints(queries, rows, 1), out.view)
    expected = [
        max((values[r, c].item() for c in range(width) if keys[r][c] == q), default=-math.inf)
        for r, q in enumerate(queries)
    ]
    out.check(torch.tensor(expected).view(rows, 1))


@pytest.mark.parametrize("dtype", [F32, I32])
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_lookup_by_index(rows: int, dtype: torch.dtype) -> None:
    width = 64
    wide = torch.randn(rows, width + 9, generator=torch.Generator().manual_seed(2)) * 50
    values = wide.to(dtype)[:, 4 : 4 + width]
    queries = [(-1, 0, width - 1, width, -width, 2 * width, 5, 6, 7)[r] for r in range(rows)]
    out = Output((rows, 1), dtype)
    kernel = verification.map_lookup_tl(width, mode="by_index", value_dtype=dtype)
    kernel(None, values, ints(queries, rows, 1), out.view)
    absent = -math.inf if dtype == F32 else -1
    expected = [values[r, q].item() if 0 <= q < width else absent for r, q in enumerate(queries)]
    out.check(torch.tensor(expected, dtype=dtype).view(rows, 1))


@pytest.mark.parametrize("rows", [0, 1, 15])
def test_drafts_in_the_list_of_the_target(rows: int) -> None:
    source, width, vocab, pool = random.Random(rows), 64, 200, 9
    lists = [source.sample(range(vocab), width) for _ in range(pool + rows)]
    logprobs = torch.randn(pool, width, generator=torch.Generator().manual_seed(3))
    drafts = [source.choice([-1, *range(vocab)]) for _ in range(pool)]
    read = [source.randrange(pool) for _ in range(rows)]
    targets = lists[pool:]
    outs = [Output((rows, width), F32), Output((rows,), I32), Output((rows,), I32)]
    kernel = verification.remap_draft_topk_tl(width, vocab)
    kernel(
        ints(lists[:pool], pool, width),
        logprobs,
        ints(drafts),
        ints(targets, rows, width),
        ints(read),
        *(out.view for out in outs),
    )
    expected = torch.full((rows, width), -math.inf)
    local = []
    for r, line in enumerate(read):
        for c, token in enumerate(targets[r]):
            if token in lists[line]:
                expected[r, c] = logprobs[line, lists[line].index(token)]
        local.append(targets[r].index(drafts[line]) if drafts[line] in targets[r] else -1)
    outs[0].check(expected)
    outs[1].check(ints(local))
    outs[2].check(torch.arange(rows))


def plain_result(
    accept: list[bool], tokens: list[int], drafts: list[int], lengths: list[int], golden: list[int]
) -> list[tuple[int, bool, bool]]:
    rows, row = [], 0
    for length in lengths:
        alive = True
        for step in range(length):
            forced = golden[row] != -1
            ok = golden[row] == drafts[row] if forced else accept[row]
            goes_on = ok and step < length - 1
            token = golden[row] if forced else tokens[row]
            rows.append((token, alive and goes_on, alive and not goes_on))
            alive, row = alive and goes_on, row + 1
    return rows


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_accept_result(lengths: list[int], forced: bool) -> None:
    total, source = sum(lengths), random.Random(len(lengths))
    accept = [source.random() < 0.7 for _ in range(total)]
    tokens = [source.randrange(5) for _ in range(total)]
    pool = [source.randrange(3) for _ in range(7)]
    read = [source.randrange(7) for _ in range(total)]
    golden = [source.choice([-1, 0, 1, 2]) if forced else -1 for _ in range(total)]
    outs = [Output((total,), t) for t in (I32, B, B)]
    verification.get_accept_result_tl(forced)(
        bools(accept),
        ints(golden) if forced else ints(tokens),
        ints(pool),
        ints(read),
        ints(tokens),
        bools(judged(lengths)),
        ints(starts(lengths)),
        ints(owners(lengths)),
        *(out.view for out in outs),
    )
    expected = plain_result(accept, tokens, [pool[i] for i in read], lengths, golden)
    columns = list(zip(*expected, strict=True)) or [(), (), ()]
    for out, column, dtype in zip(outs, columns, (I32, B, B), strict=True):
        out.check(torch.tensor(column, dtype=dtype))


class Finish:
    """Random arguments and outputs of the last kernel."""

    def __init__(self, lengths: list[int], steps: int, top: int, chance: float) -> None:
        source = random.Random(steps + top)
        self.lengths, self.steps, self.total = lengths, steps, sum(lengths)
        total, count, generator = self.total, len(lengths), torch.Generator().manual_seed(top)
        accept = [source.random() < chance for _ in range(total)]
        rows = plain_result(accept, [0] * total, [0] * total, lengths, [-1] * total)
        self.accept, self.final = [a for _, a, _ in rows], [f for _, _, f in rows]
        self.values = [
            torch.randint(0, 50, (total,), generator=generator).to(I32),
            torch.randn(total, generator=generator),
            torch.rand(total, generator=generator),
            torch.randn(total, top + 8, generator=generator)[:, :top],
            torch.randint(0, 50, (total, top + 8), generator=generator).to(I32)[:, :top],
        ]
        self.probs = torch.rand(total, generator=generator)
        self.pool = torch.rand(9, generator=generator)
        self.read = [source.randrange(9) for _ in range(total)]
        self.stops = [[source.choice([-1, 3, 7, 11]), source.choice([-1, 5])] for _ in lengths]
        for r in range(0, count, 2):  # a hit behind the final row must not count
            last = starts(lengths)[r] + lengths[r] - 1
            self.stops[r][0] = int(self.values[0][last])
        widths = [(), (), (), (top,), (top,)]
        dtypes = [I32, F32, F32, F32, I32]
        self.outs = [Output(s, t) for s, t in [((count,), I32), ((steps,), I32), ((steps,), I32)]]
        self.outs += [Output((1,), F32), Output((count,), B)]
        for size in (count, total):
            self.outs += [Output((size, *w), t) for w, t in zip(widths, dtypes, strict=True)]

    def run(self, *, sums: bool, confidence: bool) -> None:
        kernel = verification.finalize_verification_tl(sums, confidence, self.steps, 2)
        ids, logprobs, smaller, *top = self.values
        unused = torch.empty(len(self.lengths), 2, dtype=I32)
        kernel(
            bools(self.accept),
            bools(self.final),
            ids,
            logprobs,
            smaller if sums else logprobs,
            *top,
            ints(starts(self.lengths)),
            ints(self.lengths),
            ints(owners(self.lengths)),
            bools(judged(self.lengths)),
            self.probs if confidence else logprobs,
            self.pool if confidence else logprobs,
            ints(self.read) if confidence else ids,
            ints(self.stops, len(self.lengths), 2) if confidence else unused,
            *(out.view for out in self.outs),
        )

    def check(self, *, sums: bool, confidence: bool) -> None:
        finals = [row for row, final in enumerate(self.final) if final]
        first = starts(self.lengths)
        self.outs[0].check(ints([row - s for row, s in zip(finals, first, strict=True)]))
        generated, verified = [0] * self.steps, [0] * self.steps
        error = 0.0
        for row, place in enumerate(places(self.lengths)):
            if self.accept[row]:
                generated[place] += 1
            if judged(self.lengths)[row]:
                verified[min(place, self.steps - 1)] += 1
                error += abs(float(self.probs[row]) - float(self.pool[self.read[row]]))
        self.outs[1].check(ints(generated))
        self.outs[2].check(ints(verified))
        got = self.outs[3].view.clone()
        self.outs[3].check(got)
        assert got.item() == pytest.approx(error if confidence else 0.0, rel=1e-5, abs=1e-6)
        if confidence:
            emitted = [
                any(int(t) in self.stops[r] for t in self.values[0][s : finals[r] + 1])
                for r, s in enumerate(first)
            ]
            self.outs[4].check(bools(emitted))
        fills = [-1, 0, 0, 0, 0]
        for index, (values, fill) in enumerate(zip(self.values, fills, strict=True)):
            sampled, kept = self.outs[5 + index], self.outs[10 + index]
            if index == 2 and not sums:
                sampled.check(sampled.before)
                kept.check(kept.before)
                continue
            sampled.check(values[finals])
            expected = torch.full_like(values, fill)
            expected[self.accept] = values[self.accept]
            kept.check(expected)


@pytest.mark.parametrize("flags", [(True, True), (False, False), (True, False)])
@pytest.mark.parametrize("chance", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("top", [0, 5])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_finish(lengths: list[int], top: int, chance: float, flags: tuple[bool, bool]) -> None:
    step = Finish(lengths, max([n - 1 for n in lengths] + [1]), top, chance)
    step.run(sums=flags[0], confidence=flags[1])
    step.check(sums=flags[0], confidence=flags[1])


@pytest.mark.parametrize(
    "make",
    [
        lambda: verification.prepare_verification_metadata_tl(0),
        lambda: verification.map_lookup_tl(64, "by_name"),
        lambda: verification.remap_draft_topk_tl(0, 64),
        lambda: verification.finalize_verification_tl(True, True, 0, 2),
    ],
)
def test_senseless_arguments_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize(
    ("factory", "arguments"),
    [
        (verification.prepare_verification_metadata_tl, (5,)),
        (verification.expand_sampling_params_tl, ()),
        (verification.map_lookup_tl, (64, "by_index", I32)),
        (verification.remap_draft_topk_tl, (64, 200)),
        (verification.get_accept_result_tl, (True,)),
        (verification.finalize_verification_tl, (True, True, 5, 2)),
    ],
)
def test_kernels_are_made_once(factory: Callable[..., object], arguments: tuple[object]) -> None:
    assert factory(*arguments) is factory(*arguments)

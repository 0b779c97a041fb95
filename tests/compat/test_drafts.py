"""Factories of the draft family against loops."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_neuron.compat.tilelang_ops import drafts
from deepinfer_neuron.errors import ConfigError
from tests.compat.outputs import Output

I32, F32 = torch.int32, torch.float32


def ints(values: object) -> Tensor:
    return torch.tensor(values, dtype=I32)


@pytest.mark.parametrize(
    ("factory", "arguments"),
    [
        (drafts.get_fused_dflash_get_input_tl, (2048, 192, True, True)),
        (drafts.confidence_head_fused_tl, (512, 64, True)),
        (drafts.copy_dflash_decode_input_tl, (True,)),
        (drafts.store_mtp_info_tl, (5, 1024, False, True)),
        (drafts.compute_seqlens_q_by_confidence_rates_tl, (5,)),
    ],
)
def test_kernels_are_made_once(factory: Callable[..., object], arguments: tuple[object]) -> None:
    assert factory(*arguments) is factory(*arguments)


def plain_input(
    slots: list[int],
    positions: list[int],
    first: list[int],
    offsets: list[int],
    sizes: tuple[int, ...],
) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    block, ring, window, width = sizes
    new_slots, new_positions, keys = [], [], []
    for at, offset in zip(first, offsets, strict=True):
        row = max(at, 0)
        base, last = slots[row] - positions[row] % ring, positions[row] + offset
        own = [last + 1 + t for t in range(block)]
        key = [last - (window - 1) + c for c in range(width)]
        line = [
            base + v % ring if c < window + block and v >= 0 and at >= 0 else -1
            for c, v in enumerate(key)
        ]
        new_positions.append([p if at >= 0 else 0 for p in own])
        new_slots.append([base + p % ring if at >= 0 else -1 for p in own])
        keys += [line] * block
    return new_slots, new_positions, keys


@pytest.mark.parametrize("masks", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize(("requests", "padding"), [(7, 0), (5, 3), (0, 1), (1, 0), (0, 0)])
@pytest.mark.parametrize(("block", "ring"), [(5, 134), (1, 132), (3, 2048)])
def test_draft_input(
    masks: tuple[bool, bool], requests: int, padding: int, block: int, ring: int
) -> None:
    source = random.Random(ring + requests)
    window = 128
    width = -(-(window + block) // 64) * 64
    first = [r * (block + 1) for r in range(requests)] + [-1] * padding
    positions = [source.choice([0, 5, 127, 131, 2040, 10**6]) for _ in range(requests)]
    rows = [p + j for p in positions for j in range(block + 1)] or [3]
    slots = [(1 + i // (block + 1)) * ring + p % ring for i, p in enumerate(rows)]
    offsets = [source.randint(0, block) for _ in first]
    shape = (len(first), block)
    outputs = [Output(shape, I32) for _ in range(3)]
    flags = [Output(shape, torch.bool) for _ in range(2)]
    keys = Output((len(first) * block, width), I32)
    kernel = drafts.get_fused_dflash_get_input_tl(ring, width, *masks)
    kernel(
        ints(slots),
        ints(rows),
        ints(first),
        ints(offsets),
        *(out.view for out in outputs),
        *(flag.view if used else None for flag, used in zip(flags, masks, strict=True)),
        keys.view,
        window + block,
        window,
    )
    expected = plain_input(slots, rows, first, offsets, (block, ring, window, width))
    outputs[0].check(ints(expected[0]).view(shape))
    outputs[1].check(ints(expected[1]).view(shape))
    outputs[2].check(torch.zeros(shape))
    valid = torch.tensor([[at >= 0] * block for at in first], dtype=torch.bool).view(shape)
    flags[0].check(valid if masks[0] else flags[0].before)
    flags[1].check(torch.zeros(shape) if masks[1] else flags[1].before)
    keys.check(ints(expected[2]).view(-1, width))


def test_draft_input_refuses_a_wrong_key_count() -> None:
    kernel = drafts.get_fused_dflash_get_input_tl(134, 192, False, False)
    one, block = ints([0]), torch.zeros(1, 5, dtype=I32)
    with pytest.raises(ConfigError, match="133"):
        kernel(one, one, one, one, block, block, block, None, None, ints([[0] * 192] * 5), 9, 128)


@pytest.mark.parametrize("rank", [0, 64])
@pytest.mark.parametrize("rows", [0, 1, 33])
def test_confidence(rank: int, rows: int) -> None:
    source = torch.Generator().manual_seed(rank + rows)
    wide = torch.randn(rows, 400, generator=source).to(torch.bfloat16)
    hidden = wide[:, 7:263]
    markov = wide[:, 264 : 264 + rank] if rank else None
    weight = (torch.randn(256 + rank, generator=source) / 16).to(torch.bfloat16)
    table = torch.full((rows, 5), 7.0)
    kernel = drafts.confidence_head_fused_tl(
        n_embed=256, markov_rank=rank, has_markov_emb=markov is not None
    )
    kernel(hidden, markov, weight, table[:, 2], 0.85)
    features = hidden if markov is None else torch.cat((hidden, markov), 1)
    expected = torch.sigmoid(features.double() @ weight.double() / 0.85)
    torch.testing.assert_close(table[:, 2].double(), expected, atol=1e-5, rtol=0)
    assert bool((table[:, [0, 1, 3, 4]] == 7.0).all())
    again = torch.empty(rows)
    kernel(hidden, markov, weight, again, 0.85)
    assert torch.equal(again, table[:, 2])


@pytest.mark.parametrize("driver", [True, False])
@pytest.mark.parametrize(("count", "size", "spare"), [(3, 8, 8), (8, 8, 8), (0, 4, 4), (3, 8, 2)])
def test_copy_of_the_decode_input(driver: bool, count: int, size: int, spare: int) -> None:
    dtypes = [I32, I32, I32, I32, F32, F32, I32, torch.uint64, I32]
    make = [torch.arange(100, 100 + count).to(t) + 0 if t != torch.uint64 else None for t in dtypes]
    sources = [x if x is not None else torch.arange(count).add(-5).view(torch.uint64) for x in make]
    paddings = [torch.arange(spare).to(I32).to(t) for t in dtypes]
    targets = [Output((size,), t) for t in dtypes]
    kernel = drafts.copy_dflash_decode_input_tl(driver)
    kernel(*sources, *paddings, *(target.view for target in targets))
    for i, target in enumerate(targets):
        expected = target.before.clone()
        if driver or i == 0:
            expected[:count] = sources[i]
            rest = min(size - count, spare)
            expected[count : count + rest] = paddings[i][:rest]
        target.check(expected)


@pytest.mark.parametrize("flags", [(True, True), (False, False), (True, False)])
@pytest.mark.parametrize("slots", [[], [0], [3], [0, 0, 0], [5, 1, 0, 2, 4, 0], [1, 2, 3, 4, 5]])
def test_store_keeps_slot_0(slots: list[int], flags: tuple[bool, bool]) -> None:
    nextn, width = 3, 11
    source = torch.Generator().manual_seed(len(slots))
    shapes = [(nextn,), (nextn, width), (nextn, width), (nextn,)]
    dtypes = [I32, F32, I32, F32]
    values = [
        (torch.randn(len(slots), *shape, generator=source) * 100).to(t)
        for shape, t in zip(shapes, dtypes, strict=True)
    ]
    pools = [Output((6 * nextn, *s[1:]), t) for s, t in zip(shapes, dtypes, strict=True)]
    used = [True, True, *flags]
    kernel = drafts.store_mtp_info_tl(nextn, width, *flags)
    given = [v if u else None for v, u in zip(values, used, strict=True)]
    kernel(ints(slots), *given, *(p.view if u else None for p, u in zip(pools, used, strict=True)))
    for pool, value, written in zip(pools, values, used, strict=True):
        expected = pool.before.clone()
        for r, slot in enumerate(slots):
            for step in range(nextn):
                if slot and written:
                    expected[slot * nextn + step] = value[r, step]
        pool.check(expected)


def plain_split(total: int, remap: list[int], rates: Tensor) -> tuple[Tensor, list[int]]:
    nextn = rates.shape[1]
    products = torch.zeros(len(remap), nextn)
    for i, source in enumerate(remap):
        product = np.float32(1)
        for j in range(nextn):
            product = product * np.float32(rates[source, j].item() if source >= 0 else 0.0)
            products[i, j] = float(product)
    flat = sorted((-p, n) for n, p in enumerate(products.flatten().tolist()))
    chosen = [n // nextn for _, n in flat[: max(0, total - len(remap))]]
    return products, [1 + chosen.count(i) for i in range(len(remap))]


@pytest.mark.parametrize("remap", [[], [0], [-1, -1], [2, -1, 0, 1], [1, 1, 0, -1, 3]])
@pytest.mark.parametrize("kind", ["random", "ties"])
def test_rows_by_confidence(remap: list[int], kind: str) -> None:
    nextn, count = 4, len(remap)
    rates = torch.rand(4, nextn, generator=torch.Generator().manual_seed(3))
    if kind == "ties":
        rates = rates.round()
    for total in (count, count + 1, count + 2 * nextn, count * (nextn + 1)):
        products, lengths = Output((count, nextn), F32), Output((count,), I32)
        kernel = drafts.compute_seqlens_q_by_confidence_rates_tl(nextn=nextn)
        kernel(ints(remap), rates, products.view, lengths.view, total)
        expected = plain_split(total, remap, rates)
        products.check(expected[0])
        lengths.check(ints(expected[1]))


def test_rows_by_confidence_without_a_last_step() -> None:
    products, lengths = torch.ones(2, 3), torch.zeros(2, dtype=I32)
    kernel = drafts.compute_seqlens_q_by_confidence_rates_tl(3)
    kernel(ints([-1, -1]), torch.empty(0, 3), products, lengths, 4)
    assert not bool(products.any())
    assert lengths.tolist() == [3, 1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: drafts.get_fused_dflash_get_input_tl(0, 192, True, True),
        lambda: drafts.confidence_head_fused_tl(0, 0, False),
        lambda: drafts.confidence_head_fused_tl(64, 0, True),
        lambda: drafts.store_mtp_info_tl(-1, 64, False, False),
        lambda: drafts.compute_seqlens_q_by_confidence_rates_tl(0),
    ],
)
def test_senseless_sizes_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        make()

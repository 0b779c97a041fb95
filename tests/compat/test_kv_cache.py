"""Store and load against byte-by-byte placement of plainly quantized rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer_neuron.compat.tilelang_ops import load_paged_kv_cache_tl, store_kv_cache_tl
from deepinfer_neuron.errors import ConfigError
from tests.compat.guards import SENTINEL, Guarded, integers, strided
from tests.compat.layouts import (
    COMPRESSED,
    INDEX_FP4,
    INDEX_FP8,
    INDEX_FP32,
    PLAIN,
    QUANTIZED,
    WINDOW,
    Layout,
)
from tests.ops.number_formats import normal, random_bytes, same_bits
from tests.ops.plain_casts import plain_cast, plain_values

BLOCKS = 3
GAP = 40
"""Bytes between pages."""
OFFSET = 24


def new_cache(layout: Layout, size: int) -> Guarded:
    record = layout.data_bytes + layout.scale_bytes
    shape = (BLOCKS, size, record)
    return Guarded(shape, (size * record + GAP, record, 1), torch.uint8, OFFSET)


def places(layout: Layout, size: int, slot: int) -> tuple[int, int]:
    """First byte of the data and of the scales of a slot in the buffer of :func:`new_cache`."""
    record = layout.data_bytes + layout.scale_bytes
    page = OFFSET + slot // size * (size * record + GAP)
    row = slot % size
    if layout.token_interleaved:
        return page + row * record, page + row * record + layout.data_bytes
    return (
        page + row * layout.data_bytes,
        page + size * layout.data_bytes + row * layout.scale_bytes,
    )


def plain_store(buffer: Tensor, layout: Layout, size: int, kv: Tensor, slots: list[int]) -> None:
    assert layout.quantized_dtype is not None
    assert layout.sf_format is not None
    power = layout.sf_format == "ue8m0"
    codes, scale = plain_cast(
        kv, layout.quantized_dtype, layout.elements_per_sf, layout.sf_format, power
    )
    for row, slot in enumerate(slots):
        if slot >= 0:
            data, factor = places(layout, size, slot)
            buffer[data : data + codes.shape[1]] = codes[row]
            buffer[factor : factor + scale.shape[1]] = scale[row]


SLOTS = {
    "none": [],
    "one": [0],
    "absent_first_and_last": [-1, 5, 2, 40, -1],
    "absent_run": [7, -1, -1, -1, 8, 9],
    "all_absent": [-1, -1],
    "last_slot": [-1, 98],
}


@pytest.mark.parametrize("layout", QUANTIZED, ids=lambda layout: str(layout.quantized_dtype))
@pytest.mark.parametrize("name", SLOTS)
def test_store(layout: Layout, name: str) -> None:
    """Every byte of the buffer: records, untouched slots, gaps between pages, both ends."""
    size, slots = 33, SLOTS[name]
    cache = new_cache(layout, size)
    expected = cache.bytes.clone()
    kernel = store_kv_cache_tl(layout, size)
    for update in range(2):
        kv = normal((len(slots), layout.channels), update) * (-2.0) ** update
        kernel(kv, cache.view, torch.tensor(slots, dtype=torch.int32))
        if slots:
            plain_store(expected, layout, size, kv, slots)
        assert torch.equal(cache.bytes, expected)
    if 0 not in slots:
        assert (cache.bytes[OFFSET : OFFSET + layout.data_bytes] == SENTINEL).all()


@pytest.mark.parametrize("layout", [WINDOW, COMPRESSED, INDEX_FP4, INDEX_FP8])
def test_store_wide_range(layout: Layout) -> None:
    """Subnormals, zeros of both signs, exact powers of two, large numbers, single outliers."""
    rows = 30
    kv = normal((rows, layout.channels), 5)
    power = torch.arange(rows) * 8 - 133
    kv = (kv.float() * torch.pow(2.0, power.float())[:, None]).to(torch.bfloat16)
    kv[0], kv[1] = 0.0, -0.0
    kv[2, ::3] = 448.0
    kv[3, ::3] = -6.0
    cache = new_cache(layout, 33)
    expected = cache.bytes.clone()
    store_kv_cache_tl(layout, 33)(kv, cache.view, torch.arange(rows, dtype=torch.int32))
    plain_store(expected, layout, 33, kv, list(range(rows)))
    assert torch.equal(cache.bytes, expected)


def test_store_more_rows_than_at_once() -> None:
    kv, slots = normal((2500, 512), 1), torch.randperm(2500, generator=torch.Generator()).int()
    cache = torch.zeros(25, 100, 528, dtype=torch.uint8)
    store_kv_cache_tl(WINDOW, 100)(kv, cache, slots)
    single = torch.zeros_like(cache)
    for row in (0, 1023, 1024, 2499):
        store_kv_cache_tl(WINDOW, 100)(kv[row : row + 1], single, slots[row : row + 1])
        slot = int(slots[row])
        assert torch.equal(cache[slot // 100, slot % 100], single[slot // 100, slot % 100])


@pytest.mark.parametrize("slots", [[], [4, -1, 0, 65]])
def test_plain_store_and_load(slots: list[int]) -> None:
    """bf16 records, strided rows in and out."""
    kv = strided(normal((len(slots), 64), 2))
    cache = Guarded((BLOCKS, 33, 64), (33 * 64 + 32, 64, 1), torch.bfloat16, 16)
    cache.view.zero_()
    store_kv_cache_tl(PLAIN, 33)(kv, cache.view, torch.tensor(slots, dtype=torch.int32))
    assert cache.intact()
    for row, slot in enumerate(slots):
        if slot >= 0:
            assert same_bits(cache.view[slot // 33, slot % 33], kv[row])
    out = torch.full((6, 64), 9.0, dtype=torch.bfloat16)
    segments = torch.tensor([[1, 31, 33, 0], [-1, 0, 1, 4], [0, 4, 5, 5]], dtype=torch.int32)
    load_paged_kv_cache_tl(PLAIN, 33)(segments, out, out, cache.view, cache.view)
    assert same_bits(out[:2], cache.view[1, 31:33])
    assert (out[2:4] == 9).all()
    assert not out[4].any()
    assert same_bits(out[5], cache.view[0, 4])


SEGMENTS = [
    [2, 0, 5, 20],
    [-1, 3, 6, 4],
    [0, 32, 33, 0],
    [1, 30, 30, 12],
    [0, 7, 19, 8],
    [2, 5, 6, 25],
]
COVERED = {20: (2, 0, 5), 4: (-1, 3, 6), 0: (0, 32, 33), 8: (0, 7, 19), 25: (2, 5, 6)}


def loaded_slots(size: int) -> dict[int, int]:
    """Output row to slot, -1 for zeros."""
    rows = {}
    for start, (block, begin, end) in COVERED.items():
        for row in range(begin, end):
            rows[start + row - begin] = block * size + row if block >= 0 else -1
    return rows


def filled_cache(layout: Layout, size: int) -> Guarded:
    """A cache of stored random rows."""
    cache = new_cache(layout, size)
    kv = normal((BLOCKS * size, layout.channels), 7) * 3
    store_kv_cache_tl(layout, size)(kv, cache.view, torch.arange(BLOCKS * size, dtype=torch.int32))
    return cache


def views(cache: Guarded, layout: Layout, size: int) -> tuple[Tensor, Tensor]:
    """Data and scale views in the types that callers pass."""
    record = layout.data_bytes + layout.scale_bytes
    page = size * record + GAP
    steps = (
        [record, record] if layout.token_interleaved else [layout.data_bytes, layout.scale_bytes]
    )
    data = cache.bytes.as_strided((BLOCKS, size, layout.data_bytes), (page, steps[0], 1), OFFSET)
    start = places(layout, size, 0)[1]
    scale = cache.bytes.as_strided((BLOCKS, size, layout.scale_bytes), (page, steps[1], 1), start)
    data = data.view(torch.float8_e4m3fn if layout.quantized_dtype == "e4m3" else torch.int8)
    if layout.sf_format == "e4m3":
        scale = scale.view(torch.float8_e4m3fn)
    elif not layout.do_cast:
        scale = scale.view(torch.float32 if layout.sf_format == "fp32" else torch.int32)
    return data, scale


@pytest.mark.parametrize("layout", [WINDOW, COMPRESSED])
@pytest.mark.parametrize("size", [32, 33])
def test_load_values(layout: Layout, size: int) -> None:
    """Segments in any order, zeros for block -1, uncovered rows untouched."""
    segments = [row for row in SEGMENTS if row[2] <= size]
    cache = filled_cache(layout, size)
    data, scale = views(cache, layout, size)
    out = Guarded((30, 512), (520, 1), torch.bfloat16, 8)
    kernel = load_paged_kv_cache_tl(layout, size, 1, 2, 3, index_batch_size=2)
    kernel(torch.tensor(segments, dtype=torch.int32), out.view, out.view, data, scale)
    untouched = Guarded((30, 512), (520, 1), torch.bfloat16, 8).view
    assert out.intact()
    assert layout.quantized_dtype is not None
    assert layout.sf_format is not None
    rows = loaded_slots(size)
    for row in range(30):
        slot = rows.get(row)
        if slot is None or (size == 32 and row == 0):
            assert same_bits(out.view[row], untouched[row])
        elif slot < 0:
            assert same_bits(out.view[row], torch.zeros(512, dtype=torch.bfloat16))
        else:
            first, factor = places(layout, size, slot)
            expected = plain_values(
                cache.bytes[None, first : first + layout.data_bytes],
                cache.bytes[None, factor : factor + layout.scale_bytes],
                layout.quantized_dtype,
                layout.elements_per_sf,
                layout.sf_format,
            )
            assert torch.equal(out.view[row], expected[0])


@pytest.mark.parametrize("layout", [INDEX_FP4, INDEX_FP8, INDEX_FP32])
def test_load_codes(layout: Layout) -> None:
    """Index records come back bit by bit, scales without their last axis."""
    size = 33
    cache = filled_cache(layout, size)
    data, scale = views(cache, layout, size)
    kv = torch.full((30, layout.data_bytes), 3, dtype=torch.uint8).view(data.dtype)
    kv_sf = torch.full((30,), 3, dtype=scale.dtype)
    kernel = load_paged_kv_cache_tl(layout, size)
    kernel(torch.tensor(SEGMENTS, dtype=torch.int32), kv, kv_sf, data, scale)
    rows = loaded_slots(size)
    for row in range(30):
        got, factor = kv.view(torch.uint8)[row], kv_sf[row : row + 1]
        slot = rows.get(row)
        if slot is None:
            assert (got == 3).all()
            assert factor.item() == 3
        elif slot < 0:
            assert not got.any()
            assert factor.item() == 0
        else:
            assert torch.equal(got, data.view(torch.uint8)[slot // size, slot % size])
            assert same_bits(factor, scale[slot // size, slot % size])


@pytest.mark.parametrize("segments", [[], [[-1, 0, 3, 1]], [[1, 4, 4, 0]]])
def test_load_from_nothing(segments: list[list[int]]) -> None:
    """No segments, an absent one, and an empty one."""
    data = torch.zeros(2, 8, 512, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.full((2, 8, 16), 127, dtype=torch.uint8)
    out = torch.full((5, 512), 7.0, dtype=torch.bfloat16)
    table = torch.tensor(segments, dtype=torch.int32).view(-1, 4)
    load_paged_kv_cache_tl(WINDOW, 8)(table, out, out, data, scale)
    zeros = [1, 2, 3] if segments and segments[0][0] < 0 else []
    assert [row for row in range(5) if not out[row].any()] == zeros


def test_many_short_segments() -> None:
    """A row per segment, more rows than are loaded at once."""
    count = 3000
    data = random_bytes((50, 64, 512), 1, 0, 120)
    scale = random_bytes((50, 64, 16), 2, 110, 130)
    block, row = integers((count,), 0, 50, 3), integers((count,), 0, 64, 4)
    target = torch.randperm(count, generator=torch.Generator().manual_seed(5)).int()
    out = torch.empty(count, 512, dtype=torch.bfloat16)
    segments = torch.stack((block, row, row + 1, target), dim=1)
    load_paged_kv_cache_tl(WINDOW, 64)(segments, out, out, data.view(torch.float8_e4m3fn), scale)
    at = (block.long(), row.long())
    expected = data[at].view(torch.float8_e4m3fn).float().unflatten(1, (16, 32))
    expected = expected * torch.pow(2.0, scale[at].float() - 127)[..., None]
    assert torch.equal(out[target.long()].float(), expected.flatten(1))


def test_bad_static_arguments() -> None:
    mixed = Layout("e4m3", 448, 64, 64, True, "ue8m0")
    odd = Layout("e4m3", 512, 16, 0, True, "e4m3")
    unknown = Layout("int8", 512, 32, 0, True, "ue8m0")
    for factory in (store_kv_cache_tl, load_paged_kv_cache_tl):
        for layout in (mixed, odd, unknown):
            with pytest.raises(ConfigError):
                factory(layout, 64)
        with pytest.raises(ConfigError):
            factory(WINDOW, 0)

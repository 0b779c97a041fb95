"""The fused chain against its single steps, each written plainly."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_neuron.compat.tilelang_ops import (
    fused_norm_rope_hadamard_cast_store_kvcache_tl,
    norm_tl,
    store_kv_cache_tl,
)
from deepinfer_neuron.errors import ConfigError
from tests.compat.guards import Guarded, integers
from tests.compat.layouts import (
    COMPRESSED,
    INDEX_FP4,
    INDEX_FP8,
    INDEX_FP32,
    PLAIN,
    WINDOW,
    Layout,
)
from tests.ops.number_formats import fused, normal, same_bits
from tests.ops.plain_casts import plain_cast, plain_values

BF16, I32, U8 = torch.bfloat16, torch.int32, torch.uint8
ROTARY, POSITIONS, EPS = 8, 50, 1e-20


def factory(heads: int, dim: int, **changes: Any) -> Any:
    """A variant with every step off except the ones given."""
    static: dict[str, Any] = {
        "do_norm": False,
        "norm_eps": EPS,
        "do_rope": False,
        "rotary_dim": ROTARY,
        "rope_offset": dim - ROTARY,
        "positions_dtype": "int32",
        "is_neox": False,
        "conjugate": False,
        "do_hadamard": False,
        "hadamard_scale": 1.0,
        "cast_fmt": "",
        "num_per_channels": 0,
        "round_sf": False,
        "sf_format": "",
        "return_bf16": False,
        "bf16_stage": "transform",
        "return_quant": False,
        "cache_layout": None,
        "block_size": 0,
        "small_batch": False,
    }
    assert static.keys() >= changes.keys()
    return fused_norm_rope_hadamard_cast_store_kvcache_tl(heads, dim, **(static | changes))


def heads_of(n: int, heads: int, dim: int, seed: int = 1) -> Tensor:
    """Random values with gaps between tokens."""
    return normal((n, heads * dim + 64), seed)[:, : heads * dim].unflatten(1, (heads, dim))


def out_bf16(n: int, heads: int, dim: int) -> Guarded:
    return Guarded((n, heads, dim), (heads * dim + 16, dim, 1), BF16, 16)


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    flat = x.reshape(1, -1, x.shape[-1])
    y = torch.empty_like(flat)
    static = ("bfloat16", "bfloat16", "float", False, EPS, 1.0, False, 0, False, False, False)
    norm_tl(x.shape[-1], *static, False, 3, 0)(flat, y, weight, flat, flat, flat, flat, flat)
    return y.view(x.shape)


def plain_rope(
    x: Tensor, table: Tensor, positions: list[int], start: int, neox: bool, conjugate: bool
) -> Tensor:
    out, half = x.clone(), ROTARY // 2
    for t, head, i in itertools.product(range(x.shape[0]), range(x.shape[1]), range(half)):
        a, b = (start + i, start + half + i) if neox else (start + 2 * i, start + 2 * i + 1)
        cos = np.float32(table[positions[t], i].item())
        sin = np.float32(table[positions[t], half + i].item()) * np.float32(-1 if conjugate else 1)
        x0, x1 = np.float32(x[t, head, a].item()), np.float32(x[t, head, b].item())
        out[t, head, a] = fused(x0, cos, -(x1 * sin))
        out[t, head, b] = fused(x0, sin, x1 * cos)
    return out


def plain_hadamard(x: Tensor, scale: float) -> Tensor:
    y = x.float().numpy().copy()
    distance, dim = 1, x.shape[-1]
    while distance < dim:
        for i in range(dim):
            if not i & distance:
                a, b = y[..., i].copy(), y[..., i + distance].copy()
                y[..., i], y[..., i + distance] = a + b, a - b
        distance *= 2
    return torch.from_numpy(y * np.float32(scale)).to(BF16)


BOTH_WAYS = list(itertools.product([False, True], repeat=2))
TABLE = normal((POSITIONS, ROTARY), 9, torch.float32)


@pytest.mark.parametrize("positions_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("neox", "conjugate"), BOTH_WAYS)
@pytest.mark.parametrize("start", [0, 24, 56])
def test_rope(positions_dtype: torch.dtype, neox: bool, conjugate: bool, start: int) -> None:
    """Both pairings, both directions, any offset, repeated positions."""
    x, positions = heads_of(5, 3, 64), integers((5,), 0, POSITIONS, 2).to(positions_dtype)
    out = out_bf16(5, 3, 64)
    call = factory(
        3,
        64,
        do_rope=True,
        rope_offset=start,
        positions_dtype=str(positions_dtype).removeprefix("torch."),
        is_neox=neox,
        conjugate=conjugate,
        return_bf16=True,
    )
    call(x, None, positions, TABLE, None, out.view, None, None, None, None)
    assert same_bits(out.view, plain_rope(x, TABLE, positions.tolist(), start, neox, conjugate))
    assert out.intact()


@pytest.mark.parametrize("dim", [1, 2, 32, 128])
@pytest.mark.parametrize("scale", [1.0, 128.0**-0.5])
def test_hadamard(dim: int, scale: float) -> None:
    x, out = heads_of(7, 2, dim), out_bf16(7, 2, dim)
    call = factory(2, dim, do_hadamard=True, hadamard_scale=scale, rotary_dim=0, return_bf16=True)
    call(x, None, None, None, None, out.view, None, None, None, None)
    assert same_bits(out.view, plain_hadamard(x, scale))
    assert out.intact()


@pytest.mark.parametrize("stage", ["norm", "transform", "cast_back"])
@pytest.mark.parametrize(("heads", "n"), [(1, 9), (4, 3), (12, 1), (2, 0)])
def test_stages(stage: str, heads: int, n: int) -> None:
    """All steps together; the norm is the norm operator's, bit by bit."""
    dim = 64
    x, weight, positions = heads_of(n, heads, dim), normal((dim,), 3), integers((n,), 0, 50, 4)
    steps = [plain_norm(x, weight)]
    steps.append(plain_rope(steps[0], TABLE, positions.tolist(), dim - ROTARY, False, False))
    steps.append(plain_hadamard(steps[1], 0.125))
    expected = {"norm": steps[0], "transform": steps[2]}
    codes, scale = plain_cast(steps[2].flatten(0, 1), "e4m3", 32, "ue8m0")
    expected["cast_back"] = plain_values(codes, scale, "e4m3", 32, "ue8m0").view(x.shape)
    out = out_bf16(n, heads, dim)
    quant = Guarded((n, heads, dim), (heads * dim + 8, dim, 1), torch.float8_e4m3fn, 8)
    sf = Guarded((n, heads, 2), (heads * 2 + 4, 2, 1), U8, 2)
    call = factory(
        heads,
        dim,
        do_norm=True,
        do_rope=True,
        do_hadamard=True,
        hadamard_scale=0.125,
        cast_fmt="e4m3",
        num_per_channels=32,
        round_sf=True,
        sf_format="ue8m0",
        return_bf16=True,
        bf16_stage=stage,
        return_quant=True,
    )
    call(x, weight, positions, TABLE, None, out.view, quant.view, sf.view, None, None)
    assert same_bits(out.view, expected[stage])
    assert torch.equal(quant.view.view(U8).reshape(n * heads, dim), codes)
    assert torch.equal(sf.view.reshape(n * heads, 2), scale)
    assert out.intact()
    assert quant.intact()
    assert sf.intact()


CASTS = [
    ("e4m3", 32, True, "ue8m0"),
    ("e4m3", 128, True, "ue8m0"),
    ("e4m3", 16, True, "fp32"),
    ("e4m3", 64, False, "fp32"),
    ("e4m3", 128, False, "fp32"),
    ("e2m1", 16, False, "e4m3"),
    ("e2m1", 32, True, "ue8m0"),
]


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("heads", [1, 3])
def test_casts(cast: tuple[str, int, bool, str], heads: int) -> None:
    """Codes, scales (bytes of padded words, e4m3 or fp32) and the values cast back."""
    values, group, rounded, kind = cast
    n, dim = 5, 128
    x = heads_of(n, heads, dim) * torch.pow(2.0, torch.arange(n) * 4.0 - 12)[:, None, None]
    x = x.to(BF16)
    codes, scale = plain_cast(x.flatten(0, 1), values, group, kind, rounded)
    packed = dim if values == "e4m3" else dim // 2
    data_type = torch.float8_e4m3fn if values == "e4m3" else torch.int8
    quant = Guarded((n, heads, packed), (heads * packed, packed, 1), data_type, 4)
    count = dim // group
    sf_type = {"ue8m0": U8, "fp32": torch.float32, "e4m3": torch.float8_e4m3fn}[kind]
    width = count + count % 2 if kind == "ue8m0" else count
    sf = Guarded((n, heads, width), (heads * width, width, 1), sf_type, 2)
    out = out_bf16(n, heads, dim)
    call = factory(
        heads,
        dim,
        cast_fmt=values,
        num_per_channels=group,
        round_sf=rounded,
        sf_format=kind,
        return_bf16=True,
        bf16_stage="cast_back",
        return_quant=True,
    )
    call(x, None, None, None, None, out.view, quant.view, sf.view, None, None)
    assert torch.equal(quant.view.view(U8).reshape(codes.shape), codes)
    got = (
        sf.view[..., :count].reshape(n * heads, count).clone(memory_format=torch.contiguous_format)
    )
    assert torch.equal(got.view(U8), scale)
    expected = plain_values(codes, scale, values, group, kind)
    assert same_bits(out.view.reshape(expected.shape), expected)
    assert quant.intact()
    assert sf.intact()
    assert out.intact()


SLOTS = [[-1, 5, 2, 40, -1], [32, 33, 34, -1, -1], [-1, -1], [0], []]


@pytest.mark.parametrize("layout", [WINDOW, COMPRESSED, INDEX_FP4, INDEX_FP8, INDEX_FP32])
@pytest.mark.parametrize("slots", SLOTS)
def test_cache_store(layout: Layout, slots: list[int]) -> None:
    """The whole buffer equals that of a plain store of the transformed values."""
    n, dim, size = len(slots), layout.channels, 33
    record = layout.data_bytes + layout.scale_bytes
    x, weight, positions = heads_of(n, 1, dim), normal((dim,), 3), integers((n,), 0, 50, 4)
    where = torch.tensor(slots, dtype=I32)
    shape, strides = (3, size, record), (size * record + 40, record, 1)
    cache, expected = (Guarded(shape, strides, U8, 24) for _ in range(2))
    call = factory(
        1,
        dim,
        do_norm=True,
        do_rope=True,
        cast_fmt=layout.quantized_dtype,
        num_per_channels=layout.elements_per_sf,
        round_sf=layout.sf_format == "ue8m0",
        sf_format=layout.sf_format,
        return_bf16=True,
        cache_layout=layout,
        block_size=size,
    )
    out = out_bf16(n, 1, dim)
    call(x, weight, positions, TABLE, None, out.view, None, None, cache.view, where)
    turned = plain_rope(
        plain_norm(x, weight), TABLE, positions.tolist(), dim - ROTARY, False, False
    )
    store_kv_cache_tl(layout, size)(turned[:, 0], expected.view, where)
    assert same_bits(out.view, turned)
    assert torch.equal(cache.bytes, expected.bytes)


def test_plain_cache_store() -> None:
    """A cache of bf16 rows takes the transformed values."""
    x = heads_of(3, 1, 64)
    cache = torch.zeros(2, 4, 64, dtype=BF16)
    call = factory(1, 64, cache_layout=PLAIN, block_size=4)
    call(x, None, None, None, None, None, None, None, cache, torch.tensor([6, -1, 1], dtype=I32))
    assert same_bits(cache[1, 2], x[0, 0])
    assert same_bits(cache[0, 1], x[2, 0])
    assert not cache[0, 0].any()


def test_rows_do_not_depend_on_each_other() -> None:
    """More rows than are computed at once."""
    n, dim = 2100, 512
    x, weight, positions = heads_of(n, 1, dim), normal((dim,), 3), integers((n,), 0, 50, 4)
    call = factory(1, dim, do_norm=True, do_rope=True, do_hadamard=True, return_bf16=True)
    out, one = torch.empty(n, 1, dim, dtype=BF16), torch.empty(1, 1, dim, dtype=BF16)
    call(x, weight, positions, TABLE, None, out, None, None, None, None)
    for row in (0, 1023, 1024, 2099):
        part = slice(row, row + 1)
        call(x[part], weight, positions[part], TABLE, None, one, None, None, None, None)
        assert same_bits(out[part], one)


@pytest.mark.parametrize(
    "changes",
    [
        {"cast_fmt": "e4m3", "num_per_channels": 32, "round_sf": False, "sf_format": "ue8m0"},
        {"cast_fmt": "e2m1", "num_per_channels": 16, "round_sf": True, "sf_format": "e4m3"},
        {"cast_fmt": "e2m1", "num_per_channels": 32, "round_sf": False, "sf_format": "e4m3"},
        {"cast_fmt": "e4m3", "num_per_channels": 80, "round_sf": True, "sf_format": "ue8m0"},
        {"cast_fmt": "e3m2", "num_per_channels": 32, "round_sf": True, "sf_format": "ue8m0"},
        {"return_bf16": True, "bf16_stage": "rope"},
        {"return_bf16": True, "bf16_stage": "cast_back"},
        {"cache_layout": WINDOW},
    ],
)
def test_bad_static_arguments(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        factory(1, 512, **changes)


def test_shapes_that_do_not_fit() -> None:
    window = {"cast_fmt": "e4m3", "num_per_channels": 32, "round_sf": True, "sf_format": "ue8m0"}
    with pytest.raises(ConfigError):
        factory(2, 512, cache_layout=WINDOW, **window)
    with pytest.raises(ConfigError):
        factory(1, 96, do_hadamard=True)

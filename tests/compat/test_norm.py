"""The norm against fp64, and its casts against plain casts of its own bf16 output."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from deepinfer_neuron.compat.tilelang_ops import norm_tl
from deepinfer_neuron.errors import ConfigError
from tests.compat.guards import Guarded
from tests.ops.number_formats import normal, same_bits
from tests.ops.plain_casts import one_rounding, plain_cast

BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def kernel(width: int, **changes: object):  # type: ignore[no-untyped-def]
    """A norm in the callers' way: fifteen arguments by position, strides by keyword."""
    static: dict[str, object] = {
        "hidden_size": width,
        "dtype": "bfloat16",
        "return_dtype": "bfloat16",
        "reduce_dtype": "float",
        "has_residual": False,
        "eps": 1e-6,
        "out_scale": 1.0,
        "do_fp8_cast": False,
        "num_per_channels": 0,
        "use_tma_aligned_col_major_sf": False,
        "round_sf": False,
        "use_packed_ue8m0": False,
        "return_origin_out": False,
        "xdim": 3,
        "shared_sf_block_m": 0,
    }
    strides = ("x", "y", "residual", "residual_out", "y_origin")
    static |= changes
    return norm_tl(
        *static.values(), **{f"{name}_stride_s": width for name in strides}, sf_stride_s=width
    )


def rows(shape: tuple[int, int, int], seed: int, dtype: torch.dtype = BF16) -> Tensor:
    """Random values with gaps between rows and between matrices."""
    b, m, n = shape
    wide = normal((b, m + 1, n + 16), seed, dtype)
    return wide[:, :m, :n]


def output(shape: tuple[int, int, int], dtype: torch.dtype) -> Guarded:
    _, m, n = shape
    return Guarded(shape, ((m * (n + 8)) + 8, n + 8, 1), dtype, 8)


def exact(z: Tensor, weight: Tensor, eps: float, scale: float) -> Tensor:
    wide = z.double()
    root = (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return wide / root * weight.double() * scale


SHAPES = [
    (1, 1, 128),
    (1, 37, 512),
    (5, 3, 128),
    (3, 5, 7168),
    (1, 0, 128),
    (0, 1, 128),
    (130, 9, 512),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("eps", "scale"), [(1e-6, 1.5), (1e-20, 1.0)])
@pytest.mark.parametrize("residual", [False, True])
def test_bf16(shape: tuple[int, int, int], eps: float, scale: float, residual: bool) -> None:
    """One rounding; the sum with a residual is rounded first; unused tensors are x itself."""
    x, weight = rows(shape, 1), normal((shape[2],), 2)
    y, total = output(shape, BF16), output(shape, BF16)
    before = x.clone()
    z = x
    call = kernel(shape[2], eps=eps, out_scale=scale, has_residual=residual)
    if residual:
        addend = rows(shape, 3)
        call(x, y.view, weight, addend, total.view, x, x, x)
        z = (x.float() + addend.float()).to(BF16)
        assert same_bits(total.view, z)
    else:
        call(x, y.view, weight, x, x, x, x, x)
        assert not total.view.numel() or total.bytes.unique().numel() == 1
    assert one_rounding(y.view, exact(z, weight, eps, scale))
    assert same_bits(x, before)
    assert y.intact()
    assert total.intact()


def test_fp32() -> None:
    x, weight, y = rows((1, 6, 256), 1, F32), normal((256,), 2, F32), output((1, 6, 256), F32)
    kernel(256, dtype="float", return_dtype="float")(x, y.view, weight, x, x, x, x, x)
    expected = exact(x, weight, 1e-6, 1.0)
    assert ((y.view.double() - expected).abs() <= expected.abs() * 1e-6).all()


def test_tiny_rows_need_the_small_epsilon() -> None:
    """eps 1e-20 must survive: values around 1e-9 are normalized to about 1."""
    x, weight = rows((1, 3, 128), 1) * 1e-9, torch.ones(128, dtype=BF16)
    y = output((1, 3, 128), BF16)
    kernel(128, eps=1e-20)(x, y.view, weight, x, x, x, x, x)
    assert 0.5 < y.view.float().pow(2).mean() < 1.01


LAYOUTS = list(itertools.product([False, True], [False, True], [False, True]))


@pytest.mark.parametrize(("rounded", "packed", "column_major"), LAYOUTS)
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("width", [128, 480])
@pytest.mark.parametrize("origin", [False, True])
def test_fp8(
    rounded: bool, packed: bool, column_major: bool, group: int, width: int, origin: bool
) -> None:
    """Codes and scales of the bf16 output, in every scale layout; odd numbers of scales."""
    if (packed and not rounded) or width % group:
        return
    shape = (1, 11, width)
    x, weight = rows(shape, 1), normal((width,), 2)
    plain, y, kept = output(shape, BF16), output(shape, FP8), output(shape, BF16)
    kernel(width, out_scale=1.5)(x, plain.view, weight, x, x, x, x, x)
    groups = width // group
    words = (groups + 1) // 2
    if packed and column_major:
        sf = Guarded((1, 11, words, 2), (11 * 2 * words, 2, 22, 1), torch.uint8, 4)
    elif packed:
        sf = Guarded((1, 11, groups), (11 * 2 * words, 2 * words, 1), torch.uint8, 4)
    elif column_major:
        sf = Guarded((1, 11, groups), (11 * groups, 1, 11), F32, 4)
    else:
        sf = Guarded((1, 11, groups), (11 * groups, groups, 1), F32, 4)
    call = kernel(
        width,
        return_dtype="float8",
        out_scale=1.5,
        do_fp8_cast=True,
        num_per_channels=group,
        use_tma_aligned_col_major_sf=column_major,
        round_sf=rounded,
        use_packed_ue8m0=packed,
        return_origin_out=origin,
    )
    call(x, y.view, weight, x, x, sf.view, x, kept.view if origin else x)
    codes, scale = plain_cast(plain.view[0], "e4m3", group, "ue8m0" if packed else "fp32", rounded)
    got = sf.view.reshape(11, -1)[:, :groups].clone(memory_format=torch.contiguous_format)
    assert torch.equal(y.view[0].view(torch.uint8), codes)
    assert torch.equal(got.view(torch.uint8), scale)
    assert y.intact()
    assert sf.intact()
    assert kept.intact()
    if origin:
        assert same_bits(kept.view, plain.view)


def test_rows_do_not_depend_on_each_other() -> None:
    x, weight = normal((1, 700, 1024), 1), normal((1024,), 2)
    y, one = torch.empty_like(x), torch.empty_like(x[:, :1])
    kernel(1024)(x, y, weight, x, x, x, x, x)
    for row in (0, 511, 512, 699):
        part = x[:, row : row + 1]
        kernel(1024)(part, one, weight, part, part, part, part, part)
        assert same_bits(y[:, row : row + 1], one)


def test_bad_static_arguments() -> None:
    for changes in (
        {"dtype": "float16"},
        {"reduce_dtype": "double"},
        {"shared_sf_block_m": 64},
        {"do_fp8_cast": True, "num_per_channels": 48},
        {"do_fp8_cast": True, "num_per_channels": 0},
    ):
        with pytest.raises(ConfigError):
            kernel(128, **changes)

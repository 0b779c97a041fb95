"""Group casts by row against plain ones, and against those of the model."""

from __future__ import annotations

import itertools

import pytest
import torch

from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops.quant import q4_cache_codes, q4_index_codes, q8_codes
from deepinfer_neuron.ops.record_cast import GroupFormat, decode_rows, encode_rows
from tests.ops.number_formats import normal, same_bits
from tests.ops.plain_casts import plain_cast, plain_values

FORMATS = [
    GroupFormat(values, group, scale, power)
    for values, group, (scale, power) in itertools.product(
        ("e4m3", "e2m1"), (16, 32, 128), (("ue8m0", True), ("fp32", True), ("fp32", False))
    )
] + [GroupFormat("e2m1", 16, "e4m3", False)]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_round_trip(fmt: GroupFormat, dtype: torch.dtype) -> None:
    """Wide ranges, exact powers of two, zeros of both signs, magnitudes under the margin."""
    x = normal((24, 128), 1, torch.float32) * torch.pow(2.0, torch.arange(24) * 4.0 - 40)[:, None]
    x = x.to(dtype)
    x[0], x[1], x[2, ::2], x[3] = 0.0, -0.0, 448.0, -6.0
    codes, scale = encode_rows(x, fmt)
    expected = plain_cast(x, fmt.values, fmt.group, fmt.scale, fmt.power_of_two)
    assert torch.equal(codes, expected[0])
    assert torch.equal(scale.contiguous().view(torch.uint8), expected[1])
    values = plain_values(*expected, fmt.values, fmt.group, fmt.scale)
    assert same_bits(decode_rows(codes, scale, fmt), values)


def test_every_bf16_number() -> None:
    """All finite bf16 numbers, each alone in a group with a fixed largest value."""
    words = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    x = words.view(torch.bfloat16)
    x = x[x.isfinite() & (x.abs() <= 448)]
    rows = torch.full((x.numel(), 2), 448.0, dtype=torch.bfloat16)
    rows[:, 0] = x
    codes, scale = encode_rows(rows, GroupFormat("e4m3", 2, "ue8m0"))
    assert (scale == 127).all()
    assert torch.equal(codes[:, 0], x.float().to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize(
    ("fmt", "model"),
    [
        (GroupFormat("e4m3", 32, "ue8m0"), q8_codes),
        (GroupFormat("e2m1", 32, "ue8m0"), q4_index_codes),
        (GroupFormat("e2m1", 16, "e4m3", False), q4_cache_codes),
    ],
)
def test_the_kinds_of_the_model(fmt: GroupFormat, model) -> None:  # type: ignore[no-untyped-def]
    x = normal((9, 2, 64), 3)
    assert all(torch.equal(a, b) for a, b in zip(encode_rows(x, fmt), model(x), strict=True))


@pytest.mark.parametrize(
    "bad",
    [
        ("e4m3", 16, "e4m3"),
        ("e2m1", 32, "e4m3"),
        ("fp8", 32, "ue8m0"),
        ("e4m3", 32, ""),
        ("e2m1", 1, "fp32"),
    ],
)
def test_formats_that_do_not_exist(bad: tuple[str, int, str]) -> None:
    with pytest.raises(ConfigError):
        GroupFormat(*bad)

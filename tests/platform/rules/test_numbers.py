"""Rules about data types, arithmetic and forms of operators, and what to write instead."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.rule_snippets import (
    Pair,
    Snippet,
    in_region,
    ints,
    outside,
    rule,
    zeros,
)

# Data types and arithmetic.


@rule("D01")
def test_d01_native_codes() -> Pair:
    return (
        in_region(lambda x: x.to(torch.float8_e4m3fn).to(torch.float32), zeros(4)),
        in_region(lambda x: x.to(torch.float8_e5m2).to(torch.float32), zeros(4)),
    )


@rule("D02")
def test_d02_cast_to_fp8_outside_regions() -> Pair:
    return (
        outside(lambda x: x.to(torch.float8_e5m2), zeros(4)),
        in_region(lambda x: x.to(torch.float8_e5m2).view(torch.uint8), zeros(4)),
    )


@rule("D03")
def test_d03_native_scales() -> Pair:
    return (
        in_region(lambda x: x.view(torch.float8_e8m0fnu).float(), zeros(4, dtype=torch.uint8)),
        in_region(
            lambda x: (x.to(torch.int32) * 2**23).view(torch.float32), zeros(4, dtype=torch.uint8)
        ),
    )


@rule("D04")
def test_d04_sum_of_ints() -> Pair:
    return (
        in_region(lambda x: x.sum().to(torch.int32), ints(1, 2)),
        in_region(lambda x: x.sum(dtype=torch.int32), ints(1, 2)),
    )


@rule("D04")
def test_d04_wide_arithmetic() -> Pair:
    return (
        in_region(lambda x: (x.long() * 3 + 1).to(torch.int32), ints(1, 2)),
        in_region(lambda x, t: t[(x * 3 + 1).long()], ints(0, 1), zeros(8, 2)),
    )


@rule("D04")
def test_d04_doubles() -> Pair:
    return (
        in_region(lambda x: x.double().exp().float(), zeros(4)),
        in_region(lambda x: x.exp(), zeros(4)),
    )


@rule("D04")
def test_d04_wide_constant() -> Pair:
    return (
        in_region(lambda x: x & 0xFFFF0000, ints(1, 2)),
        in_region(lambda x: x & -0x10000, ints(1, 2)),
    )


@rule("D04")
def test_d04_wide_tensor_on_the_device() -> Pair:
    return (
        lambda d: torch.zeros(4, dtype=torch.int64, device="neuron"),
        lambda d: torch.zeros(4, dtype=torch.int32, device="neuron"),
    )


@rule("D05")
def test_d05_integer_product() -> Pair:
    args = (zeros(2, 4, dtype=torch.int32), zeros(4, 2, dtype=torch.int32))
    return (
        in_region(torch.mm, *args),
        in_region(lambda a, b: (a.float() @ b.float()).to(torch.int32), *args),
    )


@rule("D05")
def test_d05_integer_scatter() -> Pair:
    def counting(ids: Tensor, ones: Tensor) -> Tensor:
        return torch.zeros(4, dtype=ones.dtype).index_add(0, ids, ones)

    return (
        in_region(counting, ints(1, 1), ints(1, 1)),
        in_region(lambda ids, ones: counting(ids, ones.float()), ints(1, 1), ints(1, 1)),
    )


@rule("D06")
def test_d06_floor_division() -> Pair:
    return (
        in_region(lambda x: x // 3, ints(7, 8)),
        in_region(lambda x: torch.div(x, 3, rounding_mode="trunc"), ints(7, 8)),
    )


@rule("D07")
def test_d07_sorted_integers() -> Pair:
    return (
        in_region(lambda x: x.topk(2)[0], ints(3, 1, 2)),
        in_region(lambda x: x.float().topk(2)[0].to(torch.int32), ints(3, 1, 2)),
    )


@rule("D08")
def test_d08_narrow_shift() -> Pair:
    return (
        in_region(lambda x: x >> 4, zeros(4, dtype=torch.uint8)),
        in_region(lambda x: x.to(torch.int32) >> 4, zeros(4, dtype=torch.uint8)),
    )


@rule("D09", waived="G10")
def test_d09_interleaved_pair_to_int16() -> Pair:
    return (
        in_region(lambda x: (x[::2] | (x[1::2] * 256)).to(torch.int16), ints(1, 2, 3, 4)),
        in_region(_packed, ints(1, 2, 3, 4)),
    )


@rule("D10")
def test_d10_byte_table() -> Pair:
    def widened(table: Tensor, ids: Tensor) -> Tensor:
        return F.embedding(ids, table.view(torch.int32)).view(torch.int8)

    args = (zeros(17, 64, dtype=torch.int8), ints(3, 16))
    return in_region(lambda table, ids: table[ids], *args), in_region(widened, *args)


@rule("D11")
def test_d11_sum_of_booleans() -> Pair:
    return (
        in_region(lambda x: (x > 0).sum(dtype=torch.int32), zeros(4)),
        in_region(lambda x: (x > 0).to(torch.int32).sum(dtype=torch.int32), zeros(4)),
    )


@rule("D11")
def test_d11_gather_over_the_vocabulary() -> Pair:
    def selected(logits: Tensor, ids: Tensor) -> Tensor:
        here = torch.arange(65, dtype=torch.int32) == ids
        return torch.where(here, logits, 0.0).sum(-1)

    args = (zeros(2, 65), lambda d: d.put([[1], [2]], torch.int32))
    return (
        in_region(lambda logits, ids: logits.gather(1, ids.long()), *args),
        in_region(selected, *args),
    )


@rule("D15")
def test_d15_square() -> Pair:
    return in_region(lambda x: x.pow(2), zeros(4)), in_region(lambda x: x * x, zeros(4))


@rule("D15")
def test_d15_power_of_two() -> Pair:
    def by_bits(exponent: Tensor) -> Tensor:
        return ((exponent + 127) * 2**23).view(torch.float32)

    return in_region(torch.exp2, zeros(4)), in_region(by_bits, ints(0, 1, -3))


@rule("D16")
def test_d16_rotation_in_complex_numbers() -> Pair:
    def real(x: Tensor) -> Tensor:
        a, b = x.view(-1, 2).unbind(-1)
        return torch.stack((-b, a), -1).flatten(-2)

    return (
        in_region(
            lambda x: torch.view_as_real(torch.view_as_complex(x.view(-1, 2)) * 1j).flatten(),
            zeros(4),
        ),
        in_region(real, zeros(4)),
    )


@rule("D18")
def test_d18_random_numbers() -> Pair:
    return (
        in_region(lambda x: x + torch.rand(4), zeros(4)),
        in_region(torch.add, zeros(4), zeros(4)),
    )


# Forms of operators.


@rule("L01", waived="G10")
def test_l01_rotation_by_strided_assignment() -> Pair:
    def strided(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[..., 1::2] = x.view(-1, 2)[:, 0]
        return y

    def stacked(x: Tensor) -> Tensor:
        half = x.view(-1, 2)[:, 0]
        return torch.stack((torch.zeros_like(half), half), -1).flatten(-2)

    return (
        in_region(strided, zeros(8)),
        in_region(stacked, zeros(8)),
    )


@rule("L03")
def test_l03_index_behind_the_end() -> Pair:
    def pick(index: int) -> Snippet:
        return in_region(lambda table, ids: table[ids], zeros(4, 2), ints(0, index))

    return pick(4), pick(3)


@rule("L03")
def test_l03_padding_by_minus_one() -> Pair:
    def write(index: int) -> Snippet:
        def body(cache: Tensor, at: Tensor, rows: Tensor) -> None:
            cache.index_put_((at,), rows)

        return in_region(body, zeros(4, 2), ints(1, index), zeros(2, 2))

    return write(-1), write(0)


@rule("L05")
def test_l05_one_hot_of_the_vocabulary() -> Pair:
    def hot(classes: int) -> Snippet:
        return in_region(lambda x: F.one_hot(x.long(), classes).to(torch.float32), ints(1, 2))

    return hot(65), hot(64)


@rule("L06")
def test_l06_empty_batch() -> Pair:
    return in_region(lambda x: x + 1, zeros(0, 4)), in_region(lambda x: x + 1, zeros(1, 4))


@rule("L07")
def test_l07_channels_last() -> Pair:
    return (
        in_region(lambda x: x.contiguous(memory_format=torch.channels_last) + 1, zeros(1, 2, 2, 2)),
        in_region(lambda x: x.contiguous() + 1, zeros(1, 2, 2, 2)),
    )


def _packed(x: Tensor) -> Tensor:
    """Pairs of bytes as int16, the first one low, through float32."""
    low, high = x.float().view(-1, 2).unbind(-1)
    pair = low + 256 * high
    return torch.where(pair >= 32768, pair - 65536, pair).to(torch.int16)


def test_packing_through_floats_is_exact_for_all_pairs_of_bytes() -> None:
    low, high = torch.meshgrid(torch.arange(256), torch.arange(256), indexing="ij")
    pairs = torch.stack((low, high), -1).flatten()
    expected = pairs.to(torch.uint8).view(torch.int16)
    assert torch.equal(_packed(pairs.to(torch.int32)), expected)

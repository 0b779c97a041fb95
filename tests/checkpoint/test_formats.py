"""Codecs of the stored number formats, over every byte and every tie."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_neuron.checkpoint.formats import (
    E2M1_MAX,
    E4M3_MAX,
    decode_e2m1,
    decode_e2m1_bf16,
    decode_e4m3,
    decode_ue8m0,
    dequantize_fp4,
    dequantize_fp8,
    dequantize_fp8_rows,
    encode_e2m1,
    encode_e4m3,
    expand_blocks,
    unpack_nibbles,
)
from tests.ops.number_formats import (
    E2M1_MAGNITUDES,
    E4M3_MAGNITUDES,
    Floats,
    bf16,
    e2m1_value,
    e2m1_values,
    e4m3_value,
    e4m3_values,
    finite_e4m3_codes,
    nearest_e2m1,
    nearest_e4m3,
    normal,
    random_bytes,
    same_bits,
    wide,
)

ALL_BYTES = torch.arange(256, dtype=torch.uint8)
SCALES = (0, 1, 9, 10, 60, 105, 126, 127, 128, 134, 135, 136, 200, 246, 254)
"""Scale bytes, the smallest and largest and those on both sides of 134 included."""

EXACT_SCALES = tuple(byte for byte in SCALES if 10 <= byte <= 246)
"""Scale bytes with which every code has an exact bf16 value."""


def powers(scale: Tensor) -> Floats:
    """``2^(byte - 127)``."""
    return np.array([math.ldexp(1.0, byte - 127) for byte in range(256)])[scale.numpy()]


def as_bf16(values: Floats) -> Tensor:
    """Nearest bf16 values; all numbers here have few bits, so fp32 between changes nothing."""
    with np.errstate(over="ignore"):
        return torch.from_numpy(bf16(values.astype(np.float32))).to(torch.bfloat16)


def around(value: float) -> NDArray[np.float32]:
    """The fp32 numbers just below a value, the value, and the one just above."""
    middle = np.float32(value)
    return np.array([np.nextafter(middle, np.float32(side)) for side in (-1e9, value, 1e9)])


class TestE4m3:
    """One value per byte."""

    def test_every_byte(self) -> None:
        got = decode_e4m3(ALL_BYTES)
        want = torch.tensor([e4m3_value(code) for code in range(256)])
        assert got.dtype == torch.float32
        nan = torch.isnan(got)
        assert nan.nonzero().flatten().tolist() == [0x7F, 0xFF]
        assert same_bits(got[~nan], want[~nan])

    def test_every_value_has_its_own_code(self) -> None:
        codes = ALL_BYTES[(ALL_BYTES & 0x7F) != 0x7F]
        assert torch.equal(encode_e4m3(decode_e4m3(codes)), codes)
        assert torch.equal(encode_e4m3(decode_e4m3(codes).to(torch.bfloat16)), codes)

    @pytest.mark.parametrize("sign", [1, -1])
    def test_ties_go_to_the_even_code(self, sign: int) -> None:
        flag = 0 if sign > 0 else 0x80
        for code in range(0x7E):
            middle = (E4M3_MAGNITUDES[code] + E4M3_MAGNITUDES[code + 1]) / 2
            got = encode_e4m3(sign * torch.from_numpy(around(middle))).tolist()
            even = code + code % 2
            assert got == [flag | code, flag | even, flag | (code + 1)], middle

    @pytest.mark.parametrize("value", [448.0, 449.0, 464.0, 480.0, 1e30, 3.4e38])
    def test_large_values_saturate(self, value: float) -> None:
        assert encode_e4m3(torch.tensor([value, -value])).tolist() == [0x7E, 0xFE]
        assert e4m3_value(0x7E) == E4M3_MAX

    def test_zeros_keep_their_sign(self) -> None:
        tiny = torch.tensor([0.0, -0.0, 2.0**-10, -(2.0**-10), 1e-40, -1e-40])
        assert encode_e4m3(tiny).tolist() == [0, 0x80, 0, 0x80, 0, 0x80]

    @pytest.mark.parametrize("scale", [1e-3, 0.02, 1.0, 100.0, 1000.0])
    def test_random_values(self, scale: float) -> None:
        values = normal((4000,), 1, torch.float32) * scale
        assert encode_e4m3(values).tolist() == nearest_e4m3(wide(values)).tolist()

    def test_shapes(self) -> None:
        codes = encode_e4m3(normal((6, 8), 2).t())
        assert codes.shape == (8, 6)
        assert torch.equal(decode_e4m3(codes[::2]), decode_e4m3(codes)[::2])
        assert decode_e4m3(torch.empty(0, 3, dtype=torch.uint8)).shape == (0, 3)
        assert encode_e4m3(torch.empty(2, 0)).shape == (2, 0)


class TestE2m1:
    """Two values per byte, the even column in the low nibble."""

    def test_every_byte(self) -> None:
        got = decode_e2m1(ALL_BYTES[:, None])
        want = [[e2m1_value(byte % 16), e2m1_value(byte // 16)] for byte in range(256)]
        assert same_bits(got, torch.tensor(want))

    def test_nibbles(self) -> None:
        packed = torch.tensor([[0x21, 0x43], [0xFE, 0x08]], dtype=torch.uint8)
        assert unpack_nibbles(packed).tolist() == [[1, 2, 3, 4], [14, 15, 8, 0]]

    def test_every_pair_of_values_has_its_own_byte(self) -> None:
        """Negative zero included: code 8."""
        packed = ALL_BYTES.view(16, 16)
        assert torch.equal(encode_e2m1(decode_e2m1(packed)), packed)
        assert torch.equal(encode_e2m1(decode_e2m1(packed).to(torch.bfloat16)), packed)

    @pytest.mark.parametrize("sign", [1, -1])
    @pytest.mark.parametrize(
        ("middle", "winner"),
        [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)],
    )
    def test_ties_go_to_the_even_code(self, middle: float, winner: float, sign: int) -> None:
        values = sign * torch.from_numpy(around(middle))
        got = decode_e2m1(encode_e2m1(values.repeat_interleave(2)))[::2]
        code = int(np.searchsorted(E2M1_MAGNITUDES, middle)) - 1
        want = sign * torch.tensor([E2M1_MAGNITUDES[code], winner, E2M1_MAGNITUDES[code + 1]])
        assert same_bits(got, want.to(torch.float32))

    @pytest.mark.parametrize("value", [6.0, 6.5, 7.0, 1e30])
    def test_large_values_saturate(self, value: float) -> None:
        assert encode_e2m1(torch.tensor([value, -value])).tolist() == [0xF7]
        assert e2m1_value(7) == E2M1_MAX

    def test_zeros_keep_their_sign(self) -> None:
        tiny = torch.tensor([0.0, -0.0, 0.25, -0.25, 1e-40, -1e-40])
        assert encode_e2m1(tiny).tolist() == [0x80, 0x80, 0x80]

    @pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
    def test_random_values(self, scale: float) -> None:
        values = normal((3, 2000), 3, torch.float32) * scale
        codes = unpack_nibbles(encode_e2m1(values))
        assert codes.tolist() == nearest_e2m1(wide(values)).tolist()

    def test_bf16_decoder(self) -> None:
        """The fast decoder gives the values times 2^-126, which bf16 holds as its own fields."""
        got = decode_e2m1_bf16(ALL_BYTES[:, None])
        assert got.dtype == torch.bfloat16
        assert same_bits(got.to(torch.float32) * 2.0**126, decode_e2m1(ALL_BYTES[:, None]))

    def test_empty(self) -> None:
        assert decode_e2m1(torch.empty(3, 0, dtype=torch.uint8)).shape == (3, 0)
        assert encode_e2m1(torch.empty(0, 4)).shape == (0, 2)
        assert decode_e2m1_bf16(torch.empty(0, 4, dtype=torch.uint8)).shape == (0, 8)


def test_every_ue8m0_byte() -> None:
    """Byte 0 is 2^-127, an fp32 subnormal; 255 is NaN."""
    got = decode_ue8m0(ALL_BYTES)
    want = torch.tensor([math.ldexp(1.0, byte - 127) for byte in range(255)])
    assert got.dtype == torch.float32
    assert same_bits(got[:255], want)
    assert math.isnan(got[255].item())


class TestFp8Matrix:
    """e4m3 codes with one scale per 32 x 32 block."""

    @pytest.mark.parametrize("scale", SCALES)
    def test_every_code(self, scale: int) -> None:
        """Values out of the normal range of bf16 round to nearest, as subnormals or infinities."""
        codes = ALL_BYTES[(ALL_BYTES & 0x7F) != 0x7F].repeat(2)[:496].view(16, 31)
        got = dequantize_fp8(codes, torch.tensor([[scale]], dtype=torch.uint8))
        want = e4m3_values(codes.numpy()) * math.ldexp(1.0, scale - 127)
        assert same_bits(got, as_bf16(want))
        if scale in EXACT_SCALES:
            assert np.array_equal(wide(got), want)

    @pytest.mark.parametrize(
        "shape", [(33, 65), (32, 32), (1, 1), (64, 96), (31, 64), (64, 33), (96, 1)]
    )
    def test_each_block_has_its_scale(self, shape: tuple[int, int]) -> None:
        rows, columns = shape
        codes = finite_e4m3_codes(shape, 4)
        grid = (-(-rows // 32), -(-columns // 32))
        choice = random_bytes(grid, 5, 0, len(EXACT_SCALES)).to(torch.int64)
        scale = torch.tensor(EXACT_SCALES, dtype=torch.uint8)[choice]
        factor = powers(scale)
        want = e4m3_values(codes.numpy())
        for row in range(rows):
            for column in range(columns):
                want[row, column] *= factor[row // 32, column // 32]
        got = dequantize_fp8(codes, scale)
        assert got.dtype == torch.bfloat16
        assert np.array_equal(wide(got), want)

    def test_block_boundary(self) -> None:
        """Row 31 belongs to the first block, row 32 to the second; columns alike."""
        codes = torch.full((64, 64), 0x38, dtype=torch.uint8)
        scale = torch.tensor([[127, 128], [129, 130]], dtype=torch.uint8)
        got = dequantize_fp8(codes, scale)
        assert got[[31, 31, 32, 32], [31, 32, 31, 32]].tolist() == [1.0, 2.0, 4.0, 8.0]

    def test_a_large_scale_beside_small_ones(self) -> None:
        """One block near the top of the range must not disturb the others."""
        codes = finite_e4m3_codes((33, 96), 6)
        scale = torch.tensor([[254, 1, 127], [10, 246, 0]], dtype=torch.uint8)
        spread = np.repeat(np.repeat(powers(scale), 32, axis=0)[:33], 32, axis=1)
        assert same_bits(dequantize_fp8(codes, scale), as_bf16(e4m3_values(codes.numpy()) * spread))

    @pytest.mark.parametrize("step", [32, 64, 96])
    @pytest.mark.parametrize("columns", [64, 65])
    def test_chunks_of_rows_give_the_same_bits(self, step: int, columns: int) -> None:
        """Even where one chunk holds a scale that another does not."""
        codes = finite_e4m3_codes((161, columns), 7)
        scale = random_bytes((6, -(-columns // 32)), 8, 0, 255)
        parts = [
            dequantize_fp8(codes[start : start + step], scale[start // 32 : (start + step) // 32])
            for start in range(0, 161, step)
        ]
        assert same_bits(torch.cat(parts), dequantize_fp8(codes, scale))

    def test_nan_scale(self) -> None:
        codes = torch.full((2, 64), 0x38, dtype=torch.uint8)
        got = dequantize_fp8(codes, torch.tensor([[255, 127]], dtype=torch.uint8))
        assert torch.isnan(got).sum(dim=1).tolist() == [32, 32]
        assert torch.isnan(got[:, :32]).all()

    @pytest.mark.parametrize("shape", [(0, 64), (0, 33), (64, 0), (0, 0)])
    def test_empty(self, shape: tuple[int, int]) -> None:
        scale = torch.empty(-(-shape[0] // 32), -(-shape[1] // 32), dtype=torch.uint8)
        assert dequantize_fp8(torch.empty(shape, dtype=torch.uint8), scale).shape == shape

    def test_expand_blocks(self) -> None:
        got = expand_blocks(torch.tensor([[1, 2], [3, 4]]), 33, 40)
        assert got.shape == (33, 40)
        assert got[[0, 31, 32, 31], [31, 32, 0, 39]].tolist() == [1, 2, 3, 2]


class TestFp8Rows:
    """e4m3 rows with one scale per group of channels."""

    @pytest.mark.parametrize("shape", [(5, 64), (2, 3, 96), (128,)])
    def test_each_group_has_its_scale(self, shape: tuple[int, ...]) -> None:
        codes = finite_e4m3_codes(shape, 9)
        scale = random_bytes((*shape[:-1], shape[-1] // 32), 10, 10, 247)
        want = e4m3_values(codes.numpy()) * np.repeat(powers(scale), 32, axis=-1)
        got = dequantize_fp8_rows(codes, scale)
        assert got.dtype == torch.bfloat16
        assert np.array_equal(wide(got), want)

    def test_rows_do_not_matter_to_each_other(self) -> None:
        codes, scale = finite_e4m3_codes((40, 64), 11), random_bytes((40, 2), 12, 0, 255)
        alone = [dequantize_fp8_rows(codes[i : i + 1], scale[i : i + 1]) for i in range(40)]
        assert same_bits(torch.cat(alone), dequantize_fp8_rows(codes, scale))

    def test_empty(self) -> None:
        empty = torch.empty(0, 64, dtype=torch.uint8)
        assert dequantize_fp8_rows(empty, empty[:, :2]).shape == (0, 64)


class TestFp4Matrix:
    """Packed e2m1 codes with one scale per row and 32 columns."""

    @pytest.mark.parametrize("scale", SCALES)
    def test_every_byte(self, scale: int) -> None:
        packed = ALL_BYTES.view(16, 16)
        got = dequantize_fp4(packed, torch.full((16, 1), scale, dtype=torch.uint8))
        want = e2m1_values(unpack_nibbles(packed).numpy()) * math.ldexp(1.0, scale - 127)
        assert same_bits(got, as_bf16(want))
        if scale in EXACT_SCALES:
            assert np.array_equal(wide(got), want)

    def test_nibble_order(self) -> None:
        """The byte 0x72 holds 1 in the even column and 6 in the odd one; 0x08 holds -0 and 0."""
        packed = torch.zeros(1, 16, dtype=torch.uint8)
        packed[0, :2] = torch.tensor([0x72, 0x08], dtype=torch.uint8)
        got = dequantize_fp4(packed, torch.tensor([[128]], dtype=torch.uint8))
        assert got[0, :2].tolist() == [2.0, 12.0]
        assert torch.signbit(got[0, 2:4]).tolist() == [True, False]

    @pytest.mark.parametrize("shape", [(5, 64), (2, 3, 96)])
    def test_each_row_and_group_has_its_scale(self, shape: tuple[int, ...]) -> None:
        packed = random_bytes((*shape[:-1], shape[-1] // 2), 13)
        scale = random_bytes((*shape[:-1], shape[-1] // 32), 14, 10, 247)
        codes = unpack_nibbles(packed).numpy()
        want = e2m1_values(codes) * np.repeat(powers(scale), 32, axis=-1)
        got = dequantize_fp4(packed, scale)
        assert got.dtype == torch.bfloat16
        assert got.shape == shape
        assert np.array_equal(wide(got), want)

    @pytest.mark.parametrize("step", [1, 7, 32])
    def test_chunks_of_rows_give_the_same_bits(self, step: int) -> None:
        packed, scale = random_bytes((70, 48), 15), random_bytes((70, 3), 16, 0, 255)
        parts = [
            dequantize_fp4(packed[start : start + step], scale[start : start + step])
            for start in range(0, 70, step)
        ]
        assert same_bits(torch.cat(parts), dequantize_fp4(packed, scale))

    def test_empty(self) -> None:
        empty = torch.empty(0, 32, dtype=torch.uint8)
        assert dequantize_fp4(empty, empty[:, :2]).shape == (0, 64)

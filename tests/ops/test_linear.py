"""Products with packed weights, against fp64 on weights decoded one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_neuron.checkpoint.formats import unpack_nibbles
from deepinfer_neuron.ops.arithmetic import (
    Arithmetic,
    FixedOrder,
    fixed_arithmetic,
    free_arithmetic,
)
from deepinfer_neuron.ops.linear import fp4_linear, fp8_linear, linear, linear_fp32
from deepinfer_neuron.ops.quant import q8
from tests.ops.number_formats import (
    Floats,
    bf16,
    e2m1_values,
    e4m3_values,
    finite_e4m3_codes,
    normal,
    random_bytes,
    same_bits,
    wide,
)

FIXED, FREE = fixed_arithmetic(), free_arithmetic()
CHUNKS = (1, 32 * 96, 96 * 96, 1 << 20)
"""Bounds on decoded weights: 32 rows at a time, 32, 96, all."""


def inputs(columns: int, rows: int = 5) -> Tensor:
    """``q8`` values; a short last group is quantized as if zeros followed."""
    padded = torch.zeros(rows, -(-columns // 32) * 32, dtype=torch.bfloat16)
    padded[:, :columns] = normal((rows, columns), 1)
    return q8(padded, FIXED)[:, :columns].contiguous()


def fp8_weight(rows: int, columns: int) -> tuple[Tensor, Tensor, Floats]:
    """Codes, scales of varied size, and values."""
    codes = finite_e4m3_codes((rows, columns), 2)
    scale = random_bytes((-(-rows // 32), -(-columns // 32)), 3, 110, 125)
    factor = np.exp2(wide(scale) - 127)
    block_row, block_column = np.arange(rows) // 32, np.arange(columns) // 32
    return codes, scale, e4m3_values(codes.numpy()) * factor[block_row][:, block_column]


def fp4_weight(rows: int, columns: int) -> tuple[Tensor, Tensor, Floats]:
    """Packed codes, scales of varied size, and values."""
    packed = random_bytes((rows, columns // 2), 4)
    scale = random_bytes((rows, columns // 32), 5, 115, 128)
    factor = np.repeat(np.exp2(wide(scale) - 127), 32, axis=1)
    return packed, scale, e2m1_values(unpack_nibbles(packed).numpy()) * factor


def nearly_one_rounding(got: Tensor, exact: Floats, yardstick: Floats) -> bool:
    """Within half a bf16 step of the exact product, plus the noise of fp32 sums."""
    half_step = np.exp2(np.floor(np.log2(np.abs(exact) + 1e-30)) - 8)
    return bool((np.abs(wide(got) - exact) <= half_step + 2.0**-20 * yardstick).all())


class TestFp8Linear:
    """e4m3 weights with 32 x 32 scale blocks."""

    @pytest.mark.parametrize("shape", [(64, 96), (70, 96), (33, 65), (1, 32), (96, 160)])
    def test_value(self, shape: tuple[int, int]) -> None:
        """Blocks of 32 are summed exactly, so fixed order shows a single rounding."""
        codes, scale, weight = fp8_weight(*shape)
        x = inputs(shape[1])
        exact = wide(x) @ weight.T
        got = fp8_linear(x, codes, scale, FIXED)
        assert got.dtype == torch.bfloat16
        assert np.array_equal(wide(got), bf16(exact.astype(np.float32)))
        free = fp8_linear(x, codes, scale, FREE)
        assert nearly_one_rounding(free, exact, np.abs(wide(x)) @ np.abs(weight).T)

    @pytest.mark.parametrize("chunk", CHUNKS)
    @pytest.mark.parametrize("shape", [(192, 96), (170, 65)])
    def test_chunks_change_no_bit(self, shape: tuple[int, int], chunk: int) -> None:
        codes, scale, _ = fp8_weight(*shape)
        x = inputs(shape[1])
        assert same_bits(
            fp8_linear(x, codes, scale, FIXED, chunk), fp8_linear(x, codes, scale, FIXED, 1 << 30)
        )

    def test_free_order_in_chunks(self) -> None:
        codes, scale, weight = fp8_weight(170, 96)
        x = inputs(96)
        yardstick = np.abs(wide(x)) @ np.abs(weight).T
        for chunk in CHUNKS:
            got = fp8_linear(x, codes, scale, FREE, chunk)
            assert nearly_one_rounding(got, wide(x) @ weight.T, yardstick)

    def test_rows_on_both_sides_of_a_scale_block(self) -> None:
        codes = torch.zeros(64, 32, dtype=torch.uint8)
        codes[31, 0] = codes[32, 0] = 0x38
        scale = torch.tensor([[127], [130]], dtype=torch.uint8)
        x = torch.ones(1, 32, dtype=torch.bfloat16)
        for chunk in CHUNKS:
            assert fp8_linear(x, codes, scale, FIXED, chunk)[0, 30:34].tolist() == [0, 1, 8, 0]

    def test_fp32_inputs_keep_fp32(self) -> None:
        """With rounding off, activations are fp32 and so is the product."""
        codes, scale, weight = fp8_weight(40, 64)
        x = normal((3, 64), 6, torch.float32)
        got = fp8_linear(x, codes, scale, Arithmetic(FixedOrder(), rounding=False))
        assert got.dtype == torch.float32
        np.testing.assert_allclose(wide(got), wide(x) @ weight.T, rtol=1e-6, atol=1e-5)

    @pytest.mark.parametrize("arithmetic", [FIXED, FREE])
    def test_no_rows(self, arithmetic: Arithmetic) -> None:
        codes, scale, _ = fp8_weight(40, 64)
        assert fp8_linear(inputs(64, 0), codes, scale, arithmetic).shape == (0, 40)


class TestFp4Linear:
    """Packed e2m1 weights with one scale per row and 32 inputs."""

    @pytest.mark.parametrize("shape", [(64, 96), (70, 64), (1, 32), (33, 160)])
    def test_value(self, shape: tuple[int, int]) -> None:
        packed, scale, weight = fp4_weight(*shape)
        x = inputs(shape[1])
        exact = wide(x) @ weight.T
        got = fp4_linear(x, packed, scale, FIXED)
        assert got.dtype == torch.bfloat16
        assert np.array_equal(wide(got), bf16(exact.astype(np.float32)))
        free = fp4_linear(x, packed, scale, FREE)
        assert nearly_one_rounding(free, exact, np.abs(wide(x)) @ np.abs(weight).T)

    @pytest.mark.parametrize("chunk", CHUNKS)
    def test_chunks_change_no_bit(self, chunk: int) -> None:
        packed, scale, _ = fp4_weight(170, 96)
        x = inputs(96)
        assert same_bits(
            fp4_linear(x, packed, scale, FIXED, chunk), fp4_linear(x, packed, scale, FIXED, 1 << 30)
        )

    @pytest.mark.parametrize("arithmetic", [FIXED, FREE])
    def test_no_rows(self, arithmetic: Arithmetic) -> None:
        packed, scale, _ = fp4_weight(40, 64)
        assert fp4_linear(inputs(64, 0), packed, scale, arithmetic).shape == (0, 40)


class TestDense:
    """bf16 and fp32 weights."""

    def test_linear_rounds_once(self) -> None:
        x, w = normal((5, 96), 7), normal((12, 96), 8)
        got = linear(x, w, FIXED)
        assert got.dtype == torch.bfloat16
        assert np.array_equal(wide(got), bf16((wide(x) @ wide(w).T).astype(np.float32)))

    @pytest.mark.parametrize("chunk", CHUNKS)
    def test_linear_fp32_is_not_rounded_to_bf16(self, chunk: int) -> None:
        x, w = normal((5, 96), 9), normal((170, 96), 10)
        want = torch.from_numpy((wide(x) @ wide(w).T).astype(np.float32))
        got = linear_fp32(x, w, FIXED, chunk)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=2e-7, atol=1e-9)
        assert not torch.equal(got, got.to(torch.bfloat16).to(torch.float32))

    def test_a_widened_weight_gives_the_same_bits(self) -> None:
        x, w = normal((5, 96), 11), normal((70, 96), 12)
        assert same_bits(linear_fp32(x, w.float(), FIXED), linear_fp32(x, w, FIXED))
        np.testing.assert_allclose(
            wide(linear_fp32(x, w, FREE, 1)), wide(linear_fp32(x, w.float(), FREE)), atol=1e-4
        )

    @pytest.mark.parametrize("arithmetic", [FIXED, FREE])
    def test_no_rows(self, arithmetic: Arithmetic) -> None:
        w = normal((40, 64), 13)
        assert linear(inputs(64, 0), w, arithmetic).shape == (0, 40)
        assert linear_fp32(inputs(64, 0), w, arithmetic).shape == (0, 40)

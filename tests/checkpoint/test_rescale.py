"""fp8 matrices for units whose e4m3 ends at 240, against arithmetic in fp64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_neuron.checkpoint.formats import dequantize_fp8, dequantize_fp8_rows
from deepinfer_neuron.checkpoint.rescale import (
    HALVED_CODES,
    IEEE_E4M3_MAX,
    ROUNDED_CODES,
    halved_code,
    rescale_fp8,
)
from deepinfer_neuron.errors import CheckpointError, ConfigError
from tests.ops.number_formats import (
    e4m3_value,
    finite_e4m3_codes,
    nearest_e4m3,
    random_bytes,
    same_bits,
)

FINITE = [code for code in range(256) if code & 0x7F != 0x7F]


class TestTable:
    """The 256 codes."""

    @pytest.mark.parametrize("code", FINITE)
    def test_each_code_is_the_nearest_to_half_its_value(self, code: int) -> None:
        half = np.array([e4m3_value(code) / 2])
        assert HALVED_CODES[code] == halved_code(code) == nearest_e4m3(half)[0]
        halved = e4m3_value(HALVED_CODES[code])
        assert abs(halved) <= IEEE_E4M3_MAX
        assert math.copysign(1.0, halved) == math.copysign(1.0, e4m3_value(code))
        assert (halved * 2 != e4m3_value(code)) == (code in ROUNDED_CODES)
        assert abs(halved * 2 - e4m3_value(code)) <= 2.0**-9

    def test_sixteen_codes_are_rounded(self) -> None:
        assert sorted(ROUNDED_CODES) == [*range(1, 16, 2), *range(129, 144, 2)]

    @pytest.mark.parametrize("code", [0x7F, 0xFF])
    def test_nan_codes_have_no_half(self, code: int) -> None:
        with pytest.raises(CheckpointError, match="not a number"):
            halved_code(code)

    def test_fourteen_finite_codes_need_it(self) -> None:
        assert sum(abs(e4m3_value(code)) > IEEE_E4M3_MAX for code in FINITE) == 14


class TestMatrix:
    """Whole matrices, block by block."""

    @settings(max_examples=30, deadline=None, derandomize=True)
    @given(
        st.integers(1, 70),
        st.integers(1, 70),
        st.integers(0, 1 << 20),
        st.booleans(),
        st.booleans(),
    )
    def test_values_change_in_rounded_codes_only(
        self, rows: int, columns: int, seed: int, every: bool, small: bool
    ) -> None:
        codes = finite_e4m3_codes((rows, columns), seed)
        if small:
            # Only the first block needs it.
            codes = (codes & 0x80) | (codes & 0x7F).clamp(max=0x77)
            codes[0, 0] = 0x78
        scale = random_bytes((-(-rows // 32), -(-columns // 32)), seed + 2, 100, 150)
        result = rescale_fp8(codes, scale, every_block=every)
        assert int((result.codes & 0x7F).max()) <= 0x77
        before, after = (
            dequantize_fp8(c, s) for c, s in ((codes, scale), (result.codes, result.scale))
        )
        changed = before != after
        moved = (result.scale != scale).repeat_interleave(32, 0)[:rows]
        moved = moved.repeat_interleave(32, 1)[:, :columns]
        rounds = torch.tensor(sorted(ROUNDED_CODES), dtype=torch.uint8)
        assert torch.equal(changed, moved & torch.isin(codes, rounds))
        assert result.rounded == int(changed.sum())
        assert result.blocks == scale.numel()
        assert result.rescaled == int((result.scale != scale).sum())
        if every:
            assert result.rescaled == result.blocks
        elif small:
            assert result.rescaled == 1

    def test_blocks_within_the_limit_are_left_alone(self) -> None:
        codes = torch.full((64, 64), 0x77, dtype=torch.uint8)
        codes[40, 5] = 0xF8
        scale = torch.full((2, 2), 120, dtype=torch.uint8)
        result = rescale_fp8(codes, scale)
        assert result.scale.tolist() == [[120, 120], [121, 120]]
        assert same_bits(result.codes[:32], codes[:32])
        assert same_bits(result.codes[32:, 32:], codes[32:, 32:])
        assert (result.blocks, result.rescaled, result.rounded) == (4, 1, 0)

    def test_rows_of_groups(self) -> None:
        codes, scale = finite_e4m3_codes((5, 96), 3), random_bytes((5, 3), 4, 100, 150)
        codes[codes & 0x7F < 16] = 0x20
        result = rescale_fp8(codes, scale, block=(1, 32))
        assert result.rounded == 0
        expected = dequantize_fp8_rows(codes, scale)
        assert same_bits(dequantize_fp8_rows(result.codes, result.scale), expected)

    def test_inputs_are_not_written_to(self) -> None:
        codes, scale = finite_e4m3_codes((32, 32), 5), torch.full((1, 1), 127, dtype=torch.uint8)
        copies = codes.clone(), scale.clone()
        rescale_fp8(codes, scale, every_block=True)
        assert same_bits(codes, copies[0])
        assert same_bits(scale, copies[1])

    def test_nan_codes_are_refused(self) -> None:
        codes = torch.zeros(32, 32, dtype=torch.uint8)
        codes[3, 4], codes[5, 6] = 0x7F, 0xFF
        with pytest.raises(CheckpointError, match="2 codes"):
            rescale_fp8(codes, torch.zeros(1, 1, dtype=torch.uint8))

    @pytest.mark.parametrize("byte", [254, 255])
    def test_scales_that_cannot_double_are_refused(self, byte: int) -> None:
        codes = torch.full((32, 32), 0x7E, dtype=torch.uint8)
        scale = torch.full((1, 1), byte, dtype=torch.uint8)
        with pytest.raises(CheckpointError, match=f"is {byte}"):
            rescale_fp8(codes, scale)
        assert rescale_fp8(codes, scale - scale + 253).scale.item() == 254
        assert rescale_fp8(codes & 0x77, scale).rescaled == 0

    def test_scales_of_another_shape_are_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"\[2, 1\] are needed"):
            rescale_fp8(
                torch.zeros(33, 32, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8)
            )

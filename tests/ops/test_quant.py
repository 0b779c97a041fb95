"""Run-time quantizers against group-by-group forms with exact comparisons."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer_neuron.checkpoint.formats import decode_e4m3, unpack_nibbles
from deepinfer_neuron.ops.arithmetic import Arithmetic, FreeOrder, fixed_arithmetic
from deepinfer_neuron.ops.quant import (
    q4_cache_codes,
    q4_cache_values,
    q4_index,
    q4_index_codes,
    q4_index_values,
    q8,
    q8_codes,
    q8_values,
    round_e4m3,
    ue8m0_scale,
)
from tests.ops.number_formats import (
    E4M3_MAGNITUDES,
    Codes,
    Floats,
    e2m1_values,
    e4m3_values,
    nearest_e2m1,
    nearest_e4m3,
    normal,
    pack_nibbles,
    same_bits,
    wide,
)

ROUNDED = fixed_arithmetic()
UNROUNDED = Arithmetic(FreeOrder(), rounding=False)

Q8_FLOOR = float(np.float32(1e-4))
INDEX_FLOOR = 6 * 2.0**-126
CACHE_FLOOR = 6 * 2.0**-9
SIXTH = np.float32(1) / np.float32(6)

bf16_numbers = st.floats(-1e4, 1e4, width=16) | st.floats(-1.0, 1.0, width=16)
fp32_numbers = st.floats(-(2.0**100), 2.0**100, width=32)


def group(*values: float, width: int = 32, dtype: torch.dtype = torch.float32) -> Tensor:
    """One group: the given values, then zeros."""
    x = torch.zeros(1, width, dtype=dtype)
    x[0, : len(values)] = torch.tensor(values, dtype=torch.float64).to(dtype)
    return x


def smallest_power(amax: float, largest: float) -> int:
    """The smallest exponent ``e`` with ``amax <= largest * 2^e``, by exact comparisons."""
    exponent = math.frexp(amax / largest)[1] - 2
    while amax > math.ldexp(largest, exponent):
        exponent += 1
    return exponent


def power_groups(x: Floats, width: int, floor: float, largest: float) -> tuple[Floats, Codes]:
    """Scaled groups ``[..., groups, width]`` and biased exponents ``[..., groups]``."""
    groups = x.reshape(*x.shape[:-1], -1, width)
    amax = np.abs(groups).max(axis=-1)
    exponent = [smallest_power(max(float(a), floor), largest) for a in amax.flatten()]
    shift = np.array(exponent).reshape(amax.shape)
    return groups * np.exp2(-shift.astype(np.float64))[..., None], shift + 127


def after(value: float) -> float:
    """The next fp32 number."""
    return float(np.nextafter(np.float32(value), np.float32(np.inf)))


def before(value: float) -> float:
    """The previous fp32 number."""
    return float(np.nextafter(np.float32(value), np.float32(0)))


def mixed(seed: int, dtype: torch.dtype) -> Tensor:
    """Rows ``[24, 128]`` whose groups differ in size by many powers of two."""
    spread = torch.exp2(normal((24, 4, 1), seed, torch.float32) * 8).expand(24, 4, 32).flatten(1)
    return (normal((24, 128), seed + 1, torch.float32) * spread).to(dtype)


class TestQ8:
    """e4m3 with a power-of-two scale per 32 channels."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_codes(self, dtype: torch.dtype) -> None:
        x = mixed(1, dtype)
        codes, scale = q8_codes(x)
        scaled, byte = power_groups(wide(x), 32, Q8_FLOOR, 448.0)
        assert scale.tolist() == byte.tolist()
        assert codes.tolist() == nearest_e4m3(scaled).reshape(24, 128).tolist()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_values_are_those_of_the_codes(self, dtype: torch.dtype) -> None:
        x = mixed(3, dtype)
        codes, scale = q8_codes(x)
        got = q8(x, ROUNDED)
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, q8_values(codes, scale))
        factor = np.repeat(np.exp2(wide(scale) - 127), 32, axis=-1)
        assert np.array_equal(wide(got), e4m3_values(codes.numpy()) * factor)

    @given(st.lists(fp32_numbers | bf16_numbers, min_size=1, max_size=32))
    @settings(deadline=None, derandomize=True)
    def test_any_group(self, numbers: list[float]) -> None:
        x = group(*numbers)
        codes, scale = q8_codes(x)
        scaled, byte = power_groups(wide(x), 32, Q8_FLOOR, 448.0)
        assert scale.tolist() == byte.tolist()
        assert codes.tolist() == nearest_e4m3(scaled)[0].tolist()
        assert torch.equal(q8(x, ROUNDED), q8_values(codes, scale))

    def test_a_group_of_zeros_has_byte_105(self) -> None:
        codes, scale = q8_codes(torch.zeros(2, 64))
        assert scale.tolist() == [[105, 105], [105, 105]]
        assert not codes.any()
        assert not q8(torch.zeros(2, 64), ROUNDED).any()

    @pytest.mark.parametrize("sign", [1, -1])
    @pytest.mark.parametrize("k", [-21, -8, -1, 0, 1, 5, 60])
    def test_exact_powers_are_not_bumped(self, k: int, sign: int) -> None:
        """``448 * 2^k`` fits exactly; one fp32 step more needs the next power."""
        top = math.ldexp(448.0, k)
        at, above, below = (q8_codes(group(sign * x)) for x in (top, after(top), before(top)))
        assert [int(s) for _, s in (at, above, below)] == [127 + k, 128 + k, 127 + k]
        flag = 0 if sign > 0 else 0x80
        assert [int(c[0, 0]) - flag for c, _ in (at, above, below)] == [0x7E, 0x76, 0x7E]

    @pytest.mark.parametrize(("amax", "kept"), [(448.0, 2.0**-9), (after(448.0), 0.0)])
    def test_the_bump_doubles_the_smallest_step(self, amax: float, kept: float) -> None:
        """So that 2^-9 becomes a tie and goes to zero."""
        x = group(amax, 2.0**-9)
        assert q8(x, ROUNDED)[0, :2].tolist() == [448.0, kept]
        assert q8_values(*q8_codes(x))[0, :2].tolist() == [448.0, kept]

    def test_bytes_of_a_few_magnitudes(self) -> None:
        magnitudes = (1.0, 447.0, 448.0, 449.0, 896.0, 897.0)
        assert [int(q8_codes(group(a))[1]) for a in magnitudes] == [119, 127, 127, 128, 128, 129]

    def test_small_magnitudes_share_the_floor(self) -> None:
        """Below 1e-4 the scale stays 2^-22, so values sink into subnormals and to zero."""
        below = (before(Q8_FLOOR), Q8_FLOOR, 5e-5, 1e-6, 1e-9, 1e-40)
        assert [int(q8_codes(group(a))[1]) for a in below] == [105] * len(below)
        assert q8(group(2.0**-31, 1.5 * 2.0**-31, 2.0**-33), ROUNDED)[0, :3].tolist() == [
            2.0**-31,
            2.0**-30,
            0.0,
        ]
        limit = math.ldexp(448.0, -22)
        assert [int(q8_codes(group(a))[1]) for a in (limit, after(limit))] == [105, 106]

    def test_every_code_survives(self) -> None:
        """A group that holds 448 keeps all finite values as they are."""
        codes = torch.arange(256, dtype=torch.uint8)
        codes = codes[(codes & 0x7F) != 0x7F]
        filler = torch.full((248 // 31 * 31 + 31,), 0x7E, dtype=torch.uint8)
        filler[: len(codes)] = codes
        rows = torch.cat((torch.full((9, 1), 0x7E, dtype=torch.uint8), filler.view(9, 31)), dim=1)
        got, scale = q8_codes(decode_e4m3(rows))
        assert set(scale.flatten().tolist()) == {127}
        assert torch.equal(got, rows)
        assert torch.equal(q8(decode_e4m3(rows), ROUNDED).to(torch.float32), decode_e4m3(rows))

    def test_ties(self) -> None:
        """Between 16 and 18 (steps of 2) and between subnormals, the even code wins."""
        x = group(448.0, 17.0, 19.0, -17.0, -19.0, 2.0**-10, 3 * 2.0**-10, after(17.0))
        want = [448.0, 16.0, 20.0, -16.0, -20.0, 0.0, 2.0**-8, 18.0]
        assert q8(x, ROUNDED)[0, :8].tolist() == want
        assert q8_values(*q8_codes(x))[0, :8].tolist() == want

    @given(st.lists(bf16_numbers, min_size=32, max_size=32))
    @settings(deadline=None, derandomize=True)
    def test_a_second_pass_changes_no_value(self, numbers: list[float]) -> None:
        once = q8(group(*numbers, dtype=torch.bfloat16), ROUNDED)
        assert torch.equal(q8(once, ROUNDED), once)
        assert torch.equal(q8_values(*q8_codes(once)), once)

    def test_a_second_pass_may_change_bytes(self) -> None:
        """225 rounds to 224 = 448 / 2, which the next pass stores with half the scale."""
        once = group(449.0, 1.0)
        codes, scale = q8_codes(once)
        again, smaller = q8_codes(q8_values(codes, scale))
        assert (int(scale), int(smaller)) == (128, 127)
        assert not torch.equal(codes, again)
        assert torch.equal(q8_values(codes, scale), q8_values(again, smaller))

    def test_groups_do_not_matter_to_each_other(self) -> None:
        x = mixed(5, torch.float32)
        parts = [q8(part, ROUNDED) for part in x.split(32, dim=1)]
        assert same_bits(torch.cat(parts, dim=1), q8(x, ROUNDED))
        rows = [q8(row, ROUNDED) for row in x.split(1)]
        assert same_bits(torch.cat(rows), q8(x, ROUNDED))

    def test_leading_axes_and_emptiness(self) -> None:
        x = mixed(7, torch.bfloat16)
        assert same_bits(q8(x.view(4, 6, 128), ROUNDED).flatten(0, 1), q8(x, ROUNDED))
        assert q8(x[:0], ROUNDED).shape == (0, 128)
        assert [part.shape for part in q8_codes(x[:0])] == [(0, 128), (0, 4)]

    def test_without_rounding_nothing_happens(self) -> None:
        x = mixed(8, torch.float32)
        assert q8(x, UNROUNDED) is x


class TestRoundE4m3:
    """Rounding to e4m3 values without their codes."""

    def test_every_value_stays(self) -> None:
        values = torch.from_numpy(E4M3_MAGNITUDES).to(torch.float32)
        assert torch.equal(round_e4m3(values), values)
        assert torch.equal(round_e4m3(-values), -values)

    @pytest.mark.parametrize("sign", [1, -1])
    def test_ties_and_their_neighbours(self, sign: int) -> None:
        for low, high in itertools.pairwise(E4M3_MAGNITUDES):
            middle = (low + high) / 2
            x = sign * np.array([before(middle), middle, after(middle)])
            want = e4m3_values(nearest_e4m3(x))
            assert np.array_equal(wide(round_e4m3(torch.from_numpy(x).to(torch.float32))), want)

    def test_random_values(self) -> None:
        x = normal((5000,), 9, torch.float32) * torch.exp2(torch.linspace(-15, 6, 5000))
        assert x.abs().max() < 448
        assert np.array_equal(wide(round_e4m3(x)), e4m3_values(nearest_e4m3(wide(x))))


class TestScaleRule:
    """The exponent from bits: an integer rule on the fields of the largest magnitude."""

    @staticmethod
    def by_fields(amax: Tensor, largest: float) -> Tensor:
        """Field ``E - 8``, one more if the fraction is above 0.75 (fp8); ``E - 2``, 0.5 (fp4)."""
        word = amax.view(torch.int32)
        field, fraction = word >> 23, word & 0x7FFFFF
        if largest == 448.0:
            return field - 8 + (fraction > 0x600000)
        return field - 2 + (fraction > 0x400000)

    @pytest.mark.parametrize("largest", [448.0, 6.0])
    @pytest.mark.parametrize("field", [105, 127, 200])
    def test_every_fraction(self, largest: float, field: int) -> None:
        fractions = torch.arange(0, 1 << 23, dtype=torch.int32)
        amax = (fractions | field << 23).view(torch.float32)
        assert torch.equal(ue8m0_scale(amax, largest), self.by_fields(amax, largest))

    @given(st.integers(10, 254), st.integers(0, (1 << 23) - 1), st.sampled_from([448.0, 6.0]))
    @settings(deadline=None, derandomize=True)
    def test_any_magnitude(self, field: int, fraction: int, largest: float) -> None:
        amax = torch.tensor([field << 23 | fraction], dtype=torch.int32).view(torch.float32)
        assert torch.equal(ue8m0_scale(amax, largest), self.by_fields(amax, largest))

    @given(st.integers(0, 254), st.integers(0, (1 << 23) - 1))
    @settings(deadline=None, derandomize=True)
    def test_floors(self, field: int, fraction: int) -> None:
        """Any magnitude, subnormals included: fp8 bytes start at 105, fp4 bytes at 1."""
        amax = torch.tensor([field << 23 | fraction], dtype=torch.int32).view(torch.float32)
        x = torch.cat((amax, torch.zeros(31)))[None]
        q8_byte, index_byte = int(q8_codes(x)[1]), int(q4_index_codes(x)[1])
        assert q8_byte == max(105, int(self.by_fields(amax, 448.0)))
        assert index_byte == max(1, int(self.by_fields(amax, 6.0)))


class TestQ4Index:
    """e2m1 with a power-of-two scale per 32 channels."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_codes(self, dtype: torch.dtype) -> None:
        x = mixed(11, dtype)
        packed, scale = q4_index_codes(x)
        scaled, byte = power_groups(wide(x), 32, INDEX_FLOOR, 6.0)
        assert scale.tolist() == byte.tolist()
        assert packed.tolist() == pack_nibbles(nearest_e2m1(scaled).reshape(24, 128)).tolist()

    def test_values_are_those_of_the_codes(self) -> None:
        x = mixed(13, torch.bfloat16)
        packed, scale = q4_index_codes(x)
        got = q4_index(x, ROUNDED)
        factor = np.repeat(np.exp2(wide(scale) - 127), 32, axis=-1)
        assert got.dtype == torch.bfloat16
        assert np.array_equal(wide(got), e2m1_values(unpack_nibbles(packed).numpy()) * factor)
        assert same_bits(got, q4_index_values(packed, scale))

    def test_a_group_of_zeros_has_byte_1(self) -> None:
        packed, scale = q4_index_codes(torch.zeros(1, 64))
        assert scale.tolist() == [[1, 1]]
        assert not packed.any()

    @pytest.mark.parametrize("k", [-125, -10, 0, 1, 60])
    def test_exact_powers_are_not_bumped(self, k: int) -> None:
        top = math.ldexp(6.0, k)
        found = [q4_index_codes(group(x)) for x in (top, after(top), before(top))]
        assert [int(s) for _, s in found] == [127 + k, 128 + k, 127 + k]
        assert [int(c[0, 0]) for c, _ in found] == [7, 5, 7]

    def test_the_floor(self) -> None:
        """``6 * 2^-126`` and everything below share byte 1; there, values sink to zero."""
        below = (INDEX_FLOOR, before(INDEX_FLOOR), 2.0**-126, 2.0**-140)
        assert [int(q4_index_codes(group(a))[1]) for a in below] == [1] * 4
        assert int(q4_index_codes(group(after(INDEX_FLOOR)))[1]) == 2
        assert q4_index(group(2.0**-126, 2.0**-129), ROUNDED)[0, :2].tolist() == [2.0**-126, 0.0]

    def test_small_groups_are_not_zeroed(self) -> None:
        """The floor is far below that of fp8 groups: a group of 1e-6 keeps its values."""
        x = group(6.0 * 2.0**-20, 2.0**-20, dtype=torch.bfloat16)
        assert torch.equal(q4_index(x, ROUNDED), x)

    def test_zeros_keep_their_sign(self) -> None:
        packed, _ = q4_index_codes(group(6.0, -0.1, 0.1, -0.25))
        assert packed[0, :2].tolist() == [0x87, 0x80]

    @given(st.lists(bf16_numbers, min_size=32, max_size=32))
    @settings(deadline=None, derandomize=True)
    def test_a_second_pass_changes_no_value(self, numbers: list[float]) -> None:
        once = q4_index(group(*numbers, dtype=torch.bfloat16), ROUNDED)
        assert torch.equal(q4_index(once, ROUNDED), once)

    def test_without_rounding_nothing_happens(self) -> None:
        x = mixed(14, torch.float32)
        assert q4_index(x, UNROUNDED) is x


class TestQ4Cache:
    """e2m1 with an e4m3 scale per 16 channels."""

    @staticmethod
    def slow(x: Floats) -> tuple[Codes, Codes]:
        """Unpacked codes ``[n, C]`` and scale codes ``[n, C / 16]``, each fp32 step rounded."""
        groups = x.astype(np.float32).reshape(len(x), -1, 16)
        amax = np.maximum(np.abs(groups).max(axis=-1), np.float32(CACHE_FLOOR))
        scale = nearest_e4m3(np.minimum(amax * SIXTH, np.float32(448)).astype(np.float64))
        inverse = np.float32(1) / e4m3_values(scale).astype(np.float32)
        codes = nearest_e2m1((groups * inverse[..., None]).astype(np.float64))
        return codes.reshape(x.shape), scale

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("size", [0.01, 1.0, 300.0])
    def test_codes(self, size: float, dtype: torch.dtype) -> None:
        x = (normal((50, 128), 15, torch.float32) * size).to(dtype)
        packed, scale = q4_cache_codes(x)
        codes, sigma = self.slow(wide(x))
        assert scale.tolist() == sigma.tolist()
        assert packed.tolist() == pack_nibbles(codes).tolist()

    def test_values(self) -> None:
        """Every scale code times every value is exact in bf16."""
        scale = torch.arange(1, 127, dtype=torch.uint8)[:, None]
        packed = torch.arange(8, dtype=torch.uint8).mul(34).add(16).expand(126, 8)
        got = q4_cache_values(packed, scale)
        want = e2m1_values(unpack_nibbles(packed).numpy()) * e4m3_values(scale.numpy())
        assert got.dtype == torch.bfloat16
        assert np.array_equal(wide(got), want)

    @given(st.lists(bf16_numbers, min_size=16, max_size=16))
    @settings(deadline=None, derandomize=True)
    def test_any_group(self, numbers: list[float]) -> None:
        x = group(*numbers, width=16, dtype=torch.bfloat16)
        packed, scale = q4_cache_codes(x)
        codes, sigma = self.slow(wide(x))
        assert (packed.tolist(), scale.tolist()) == (pack_nibbles(codes).tolist(), sigma.tolist())

    @pytest.mark.parametrize("value", [0.0, 1e-30, 2.0**-9, CACHE_FLOOR])
    def test_the_smallest_scale(self, value: float) -> None:
        """It is 2^-9, the smallest e4m3 value: code 1."""
        packed, scale = q4_cache_codes(group(value, width=16))
        assert scale.tolist() == [[1]]
        assert packed[0, 0] == {0.0: 0, 1e-30: 0, 2.0**-9: 2, CACHE_FLOOR: 7}[value]

    @pytest.mark.parametrize("value", [2688.0, 2700.0, 1e4, 1e20])
    def test_the_largest_scale(self, value: float) -> None:
        """448 times 6 is 2688: what is larger saturates."""
        packed, scale = q4_cache_codes(group(value, -value, width=16))
        assert scale.tolist() == [[0x7E]]
        assert q4_cache_values(packed, scale)[0, :2].tolist() == [2688.0, -2688.0]

    def test_a_scale_that_rounds_down_saturates(self) -> None:
        """6.25 / 6 = 1.0417 rounds to 1, and 6.25 to 6; 6.5 / 6 = 1.0833 rounds up to 1.125."""
        for value, sigma, kept in ((6.25, 1.0, 6.0), (6.5, 1.125, 6.75)):
            packed, scale = q4_cache_codes(group(value, width=16))
            assert decode_e4m3(scale).item() == sigma
            assert q4_cache_values(packed, scale)[0, 0] == kept

    def test_the_reciprocal_not_the_quotient(self) -> None:
        """``x * (1 / s)`` can pass a midpoint that ``x / s`` hits: code and quotient differ.

        Searched over all scales and midpoints; each ``midpoint * s`` is exact in bf16.
        """
        midpoints = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
        differing = 0
        for code in range(1, 0x7F):
            sigma = np.float32(e4m3_values(np.array(code)))
            product = (midpoints.astype(np.float32) * sigma) * (np.float32(1) / sigma)
            x = group(6 * float(sigma), *(midpoints * sigma), width=16, dtype=torch.bfloat16)
            packed, scale = q4_cache_codes(x)
            assert scale.item() == code
            got = unpack_nibbles(packed)[0, 1:8].tolist()
            assert got == nearest_e2m1(product.astype(np.float64)).tolist()
            differing += got != nearest_e2m1(midpoints).tolist()
        assert differing > 10

    def test_a_second_pass_may_change_values(self) -> None:
        """With subnormal scales: an entry must never be quantized twice.

        In units of 2^-9: 9 / 6 = 1.5 gives the scale 2 and the value 8; then 8 / 6 gives 1 and 6.
        """
        once = q4_cache_values(*q4_cache_codes(group(9 * 2.0**-9, width=16)))
        again = q4_cache_values(*q4_cache_codes(once))
        assert (once[0, 0].item(), again[0, 0].item()) == (8 * 2.0**-9, 6 * 2.0**-9)

    def test_empty(self) -> None:
        packed, scale = q4_cache_codes(torch.empty(0, 64))
        assert (packed.shape, scale.shape) == ((0, 32), (0, 4))
        assert q4_cache_values(packed, scale).shape == (0, 64)

"""Rotary embedding: both frequency tables, the fp32 angle, and fused arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_neuron.ops.arithmetic import Arithmetic, FreeOrder, fixed_arithmetic
from deepinfer_neuron.ops.rope import Yarn, rope, rope_table
from tests.ops.number_formats import Floats, bf16, fused, normal, same_bits, wide

RELEASED = Yarn(factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=65536)
ROUNDED = fixed_arithmetic()
UNROUNDED = Arithmetic(FreeOrder(), rounding=False)


def frequencies(theta: float, yarn: Yarn | None, width: int = 64) -> Floats:
    """Angles at position 1, from sine and cosine."""
    table = wide(rope_table(2, width, theta, yarn))[1]
    return np.arctan2(table[width // 2 :], table[: width // 2])


def turned(x: Tensor, turns: Tensor, inverse: bool = False) -> Floats:
    """Complex multiplication of channel pairs in fp64, unrounded."""
    width = turns.shape[1]
    cos, sin = wide(turns)[:, : width // 2], wide(turns)[:, width // 2 :]
    factor = cos - 1j * sin if inverse else cos + 1j * sin
    if x.dim() == 3:
        factor = factor[:, None]
    out = wide(x)
    pairs = (out[..., -width::2] + 1j * out[..., -width + 1 :: 2]) * factor
    out[..., -width::2], out[..., -width + 1 :: 2] = pairs.real, pairs.imag
    return out


class TestTable:
    """Frequencies and angles."""

    def test_base_frequencies(self) -> None:
        """The released base table, theta 10000 and 64 channels."""
        got = frequencies(10000.0, None)
        assert got[0] == pytest.approx(1.0, rel=1e-6)
        assert got[1] == pytest.approx(0.7498942, rel=1e-6)
        assert got[31] == pytest.approx(1.3335215e-4, rel=1e-6)
        np.testing.assert_allclose(got, 10000.0 ** (-np.arange(32) / 32), rtol=1e-6)

    @pytest.mark.parametrize(
        ("index", "value"),
        [
            (0, 1.0),
            (1, 0.687656045),
            (15, 3.6355385e-3),
            (16, 2.2656249e-3),
            (20, 2.9697779e-4),
            (24, 1.9531253e-5),
            (25, 5.3723124e-6),
            (31, 5.6805294e-7),
        ],
    )
    def test_interpolated_frequencies(self, index: int, value: float) -> None:
        """The released compressed table: pairs up to 15 unchanged, from 25 divided by 16."""
        assert frequencies(160000.0, RELEASED)[index] == pytest.approx(value, rel=1e-6)

    def test_the_ramp_between(self) -> None:
        plain = 160000.0 ** (-np.arange(32) / 32)
        ramp = np.clip((np.arange(32) - 15) / 10, 0, 1)
        want = plain / 16 * ramp + plain * (1 - ramp)
        np.testing.assert_allclose(frequencies(160000.0, RELEASED), want, rtol=1e-6)

    def test_a_ramp_without_width(self) -> None:
        """If both ends coincide, the step lies just behind that pair."""
        yarn = Yarn(4.0, 1.0, 1.0, original_max_position_embeddings=6)
        plain = 10000.0 ** (-np.arange(4) / 4)
        turns = 6 / (2 * math.pi)
        assert -1 < 8 * math.log(turns) / (2 * math.log(10000.0)) < 0
        want = plain / np.array([1, 4, 4, 4])
        np.testing.assert_allclose(frequencies(10000.0, yarn, 8), want, rtol=1e-6)

    def test_the_ramp_is_clamped_to_the_pairs(self) -> None:
        """A tiny original length puts both ends below 0; a huge one puts them above."""
        plain = 10000.0 ** (-np.arange(4) / 4)
        tiny = Yarn(4.0, 32.0, 1.0, original_max_position_embeddings=8)
        np.testing.assert_allclose(
            frequencies(10000.0, tiny, 8), plain / np.array([1, 4, 4, 4]), rtol=1e-6
        )
        huge = Yarn(4.0, 32.0, 1.0, original_max_position_embeddings=10**9)
        np.testing.assert_allclose(frequencies(10000.0, huge, 8), plain, rtol=1e-6)

    def test_layout(self) -> None:
        table = rope_table(5, 64, 10000.0, None)
        assert table.shape == (5, 64)
        assert table.dtype == torch.float32
        assert table[0].tolist() == [1.0] * 32 + [0.0] * 32

    def test_a_longer_table_starts_the_same(self) -> None:
        short, long = (rope_table(n, 64, 160000.0, RELEASED) for n in (77, 500))
        assert same_bits(long[:77], short)

    def test_far_positions_use_the_fp32_angle(self) -> None:
        """Near a million, the rounding of the product moves the angle by up to 0.03."""
        length, width = 1_000_001, 8
        table = rope_table(length, width, 10000.0, None)
        frequency = np.float32(1) / np.float32(10000) ** (np.arange(4, dtype=np.float32) / 4)
        far = np.arange(length - 200, length)
        angle = (far.astype(np.float32)[:, None] * frequency).astype(np.float64)
        got = wide(table[-200:])
        np.testing.assert_allclose(got[:, :4], np.cos(angle), atol=1e-7)
        np.testing.assert_allclose(got[:, 4:], np.sin(angle), atol=1e-7)
        precise = far[:, None] * frequency.astype(np.float64)
        assert np.abs(np.cos(precise) - got[:, :4]).max() > 1e-3


class TestRotation:
    """Pairs of neighbouring channels."""

    TABLE = rope_table(600, 16, 10000.0, None)

    @pytest.mark.parametrize("inverse", [False, True])
    @pytest.mark.parametrize("shape", [(20, 48), (20, 3, 48), (20, 16)])
    def test_value(self, shape: tuple[int, ...], inverse: bool) -> None:
        x, turns = normal(shape, 1), self.TABLE[torch.arange(20) * 29]
        got = rope(x, turns, ROUNDED, inverse=inverse)
        want = turned(x, turns, inverse)
        assert got.dtype == torch.bfloat16
        assert (wide(got) == bf16(want)).mean() > 0.999
        np.testing.assert_allclose(wide(got), want, rtol=2.0**-8, atol=1e-6)

    @pytest.mark.parametrize("inverse", [False, True])
    def test_only_the_last_channels_move(self, inverse: bool) -> None:
        x, turns = normal((20, 2, 48), 2), self.TABLE[1:21]
        got = rope(x, turns, ROUNDED, inverse=inverse)
        assert same_bits(got[..., :32], x[..., :32])
        assert (got[..., 32:] != x[..., 32:]).any(dim=-1).all()

    def test_pairs_are_interleaved(self) -> None:
        """A quarter turn of the first pair takes channel 0 to channel 1 and leaves the rest."""
        turns = torch.tensor([[0.0, 1.0, 1.0, 0.0]])
        x = torch.tensor([[9.0, 1.0, 2.0, 3.0, 4.0]], dtype=torch.bfloat16)
        assert rope(x, turns, ROUNDED).tolist() == [[9.0, -2.0, 1.0, 3.0, 4.0]]
        assert rope(x, turns, ROUNDED, inverse=True).tolist() == [[9.0, 2.0, -1.0, 3.0, 4.0]]

    def test_position_zero_changes_nothing(self) -> None:
        x = normal((5, 48), 3)
        assert torch.equal(rope(x, self.TABLE[:1].expand(5, -1), ROUNDED), x)

    def test_inverse(self) -> None:
        x, turns = normal((50, 2, 48), 4), self.TABLE[100:150]
        back = rope(rope(x, turns, ROUNDED), turns, ROUNDED, inverse=True)
        pair = wide(x).reshape(50, 2, 24, 2)
        size = np.repeat(np.abs(pair).max(axis=-1), 2, axis=-1)
        assert (np.abs(wide(back) - wide(x)) <= 2.0**-6 * size).all()
        exact = rope(rope(x.float(), turns, UNROUNDED), turns, UNROUNDED, inverse=True)
        np.testing.assert_allclose(wide(exact), wide(x), atol=2e-6)

    @pytest.mark.parametrize("inverse", [False, True])
    def test_the_first_product_is_fused(self, inverse: bool) -> None:
        """``fma(x0, c, -(x1 s))``: the second product is rounded, the first is not."""
        x, turns = normal((40, 2, 16), 5, torch.float32), self.TABLE[200:240]
        got = rope(x, turns, UNROUNDED, inverse=inverse)
        separate = 0
        for row in range(40):
            for pair in range(8):
                x0, x1 = x[row, 1, 2 * pair : 2 * pair + 2].numpy()
                c, s = turns[row, [pair, 8 + pair]].numpy() * (1, -1 if inverse else 1)
                c, s = np.float32(c), np.float32(s)
                want = (fused(x0, c, -(x1 * s)), fused(x0, s, x1 * c))
                y0, y1 = got[row, 1, 2 * pair : 2 * pair + 2].tolist()
                assert (y0, y1) == want
                separate += (y0, y1) != (float(x0 * c - x1 * s), float(x0 * s + x1 * c))
        assert separate > 20

    def test_rows_do_not_matter_to_each_other(self) -> None:
        x, turns = normal((23, 2, 48), 6), self.TABLE[300:323]
        one_by_one = [rope(x[i : i + 1], turns[i : i + 1], ROUNDED) for i in range(len(x))]
        assert same_bits(torch.cat(one_by_one), rope(x, turns, ROUNDED))

    def test_no_rows(self) -> None:
        assert rope(normal((0, 2, 48), 7), self.TABLE[:0], ROUNDED).shape == (0, 2, 48)

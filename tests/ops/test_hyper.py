"""Hyper-connections: coefficients, Sinkhorn, collapse and expand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_neuron.ops.arithmetic import (
    Arithmetic,
    FixedOrder,
    fixed_arithmetic,
    free_arithmetic,
    fused_multiply_add,
)
from deepinfer_neuron.ops.hyper import (
    Mix,
    collapse,
    expand,
    mix_coefficients,
    sinkhorn,
    stream_mean,
)
from tests.ops.number_formats import Floats, bf16, fused, normal, same_bits, wide

EPS, NORM_EPS = 1e-6, 1e-20
FIXED, FREE = fixed_arithmetic(), free_arithmetic()
UNROUNDED = Arithmetic(FixedOrder(), rounding=False)
BOTH = pytest.mark.parametrize("arithmetic", [FIXED, FREE])

Site = tuple[Tensor, Tensor, Tensor]
"""``fn``, ``base`` and ``scale`` of a site."""


def balanced(x: Floats, iterations: int) -> Floats:
    """Sinkhorn's iteration on one matrix in fp64."""
    matrix = np.exp(x)
    matrix = matrix / matrix.sum(axis=1, keepdims=True) + EPS
    matrix = matrix / (matrix.sum(axis=0) + EPS)
    for _ in range(1, iterations):
        for row in range(len(x)):
            matrix[row] /= matrix[row].sum() + EPS
        for column in range(len(x)):
            matrix[:, column] /= matrix[:, column].sum() + EPS
    return matrix


def coefficients(trunk: Tensor, site: Site, iterations: int = 20) -> tuple[Floats, Floats, Floats]:
    """One row at a time in fp64, from the flattened trunk."""
    fn, base, scale = map(wide, site)
    result: tuple[list[Floats], list[Floats], list[Floats]] = ([], [], [])
    for row in wide(trunk):
        flat = row.flatten()
        z = fn @ flat / np.sqrt((flat**2).mean() + NORM_EPS)
        z = z * scale[[0] * 4 + [1] * 4 + [2] * 16] + base
        gate = 1 / (1 + np.exp(-z))
        result[0].append(gate[:4] + EPS)
        result[1].append(2 * gate[4:8])
        result[2].append(balanced(z[8:].reshape(4, 4), iterations))
    return tuple(np.stack(part) for part in result)  # type: ignore[return-value]


def a_site(width: int, seed: int) -> Site:
    """Parameters with distinct sizes in every part."""
    fn = normal((24, 4 * width), seed, torch.float32) * 0.1
    return fn, normal((24,), seed + 1, torch.float32), torch.tensor([0.7, -0.9, 1.3])


def mixed(trunk: Tensor, site: Site, arithmetic: Arithmetic, iterations: int = 20) -> Mix:
    return mix_coefficients(
        trunk, *site, norm_eps=NORM_EPS, eps=EPS, iterations=iterations, arithmetic=arithmetic
    )


class TestSinkhorn:
    """Near doubly stochastic matrices."""

    X = normal((30, 4, 4), 1, torch.float32) * 4

    @BOTH
    def test_value(self, arithmetic: Arithmetic) -> None:
        got = sinkhorn(self.X, EPS, 20, arithmetic)
        want = np.stack([balanced(x, 20) for x in wide(self.X)])
        assert got.dtype == torch.float32
        np.testing.assert_allclose(wide(got), want, rtol=2e-5, atol=1e-9)

    @BOTH
    def test_columns_sum_to_one(self, arithmetic: Arithmetic) -> None:
        """Exactly up to epsilon, since the columns come last; rows only nearly."""
        got = wide(sinkhorn(self.X, EPS, 20, arithmetic))
        assert np.abs(got.sum(axis=1) - 1).max() < 1e-5
        assert np.abs(got.sum(axis=2) - 1).max() > 1e-4

    @pytest.mark.parametrize("other", [1, 19, 21])
    def test_the_number_of_rounds_matters(self, other: int) -> None:
        got, wrong = (wide(sinkhorn(self.X, EPS, n, FIXED)) for n in (20, other))
        assert np.abs(got - wrong).max() > 1e-4
        np.testing.assert_allclose(
            wrong, np.stack([balanced(x, other) for x in wide(self.X)]), rtol=2e-5, atol=1e-9
        )

    def test_epsilon_counts(self) -> None:
        """A row of one certain entry keeps ``eps`` in the others."""
        x = torch.full((1, 4, 4), -1000.0) + torch.eye(4) * 2000
        got = wide(sinkhorn(x, EPS, 1, FIXED))[0]
        assert np.abs(got[~np.eye(4, dtype=bool)] - EPS).max() < 1e-10

    @BOTH
    def test_large_entries_stay_finite(self, arithmetic: Arithmetic) -> None:
        assert torch.isfinite(sinkhorn(self.X * 1e4, EPS, 20, arithmetic)).all()

    def test_matrices_do_not_matter_to_each_other(self) -> None:
        parts = [sinkhorn(x, EPS, 20, FIXED) for x in self.X.split(7)]
        assert same_bits(torch.cat(parts), sinkhorn(self.X, EPS, 20, FIXED))


class TestMix:
    """The coefficients of a site."""

    @BOTH
    def test_value(self, arithmetic: Arithmetic) -> None:
        trunk, site = normal((12, 4, 64), 2), a_site(64, 3)
        got = mixed(trunk, site, arithmetic)
        for part, want in zip(got, coefficients(trunk, site), strict=True):
            assert part.dtype == torch.float32
            np.testing.assert_allclose(wide(part), want, rtol=1e-4, atol=1e-6)

    def test_ranges(self) -> None:
        """``pre`` lies in (eps, 1 + eps), ``post`` in (0, 2)."""
        fn, _, scale = a_site(64, 4)
        base = torch.full((24,), 100.0)
        base[[0, 4]] = -100.0
        mix = mixed(normal((3, 4, 64), 5), (fn, base, scale), FIXED)
        assert mix.pre[:, 0].tolist() == [float(np.float32(EPS))] * 3
        assert mix.post[:, 0].tolist() == pytest.approx([0.0] * 3, abs=1e-37)
        assert mix.post[:, 1].tolist() == [2.0] * 3

    def test_comb_is_stored_by_rows(self) -> None:
        """Element ``8 + 4 i + j`` joins input stream ``i`` to output stream ``j``."""
        fn, base, scale = a_site(64, 6)
        base = torch.zeros(24)
        base[8 + 4 * 1 + 2] = 9.0
        mix = mixed(torch.zeros(1, 4, 64, dtype=torch.bfloat16), (fn, base, scale), FIXED)
        assert mix.comb[0].argmax().item() == 4 * 1 + 2

    @BOTH
    def test_a_trunk_of_zeros_leaves_the_base(self, arithmetic: Arithmetic) -> None:
        trunk, site = torch.zeros(2, 4, 64, dtype=torch.bfloat16), a_site(64, 7)
        mix = mixed(trunk, site, arithmetic)
        assert all(torch.isfinite(part).all() for part in mix)
        want = 1 / (1 + np.exp(-wide(site[1])))
        np.testing.assert_allclose(wide(mix.pre), np.tile(want[:4] + EPS, (2, 1)), rtol=1e-6)
        np.testing.assert_allclose(wide(mix.post), np.tile(2 * want[4:8], (2, 1)), rtol=1e-6)

    @BOTH
    def test_the_size_of_the_trunk_does_not_matter(self, arithmetic: Arithmetic) -> None:
        """The norm divides it out, down to the epsilon of 1e-20."""
        trunk, site = normal((5, 4, 64), 8), a_site(64, 9)
        for part, small in zip(
            mixed(trunk, site, arithmetic), mixed(trunk * 2.0**-20, site, arithmetic), strict=True
        ):
            torch.testing.assert_close(small, part, rtol=1e-5, atol=1e-7)

    def test_the_weight_is_not_rounded_to_bf16(self) -> None:
        trunk, (fn, base, scale) = normal((5, 4, 64), 10), a_site(64, 11)
        rough = mixed(trunk, (fn.to(torch.bfloat16).float(), base, scale), FIXED)
        assert (mixed(trunk, (fn, base, scale), FIXED).pre - rough.pre).abs().max() > 1e-4

    @pytest.mark.parametrize("size", [1, 5])
    def test_regathered_rows_give_the_same_bits(self, size: int) -> None:
        trunk, site = normal((13, 4, 64), 12), a_site(64, 13)
        whole = mixed(trunk, site, FIXED)
        parts = [mixed(part, site, FIXED) for part in trunk.split(size)]
        for index, part in enumerate(whole):
            assert same_bits(torch.cat([mix[index] for mix in parts]), part)
        order = torch.tensor([12, 3, 3, 0])
        for moved, part in zip(mixed(trunk[order], site, FIXED), whole, strict=True):
            assert same_bits(moved, part[order])


class TestCollapseAndExpand:
    """Streams to one vector and back."""

    @staticmethod
    def a_mix(rows: int, seed: int) -> Mix:
        return Mix(
            normal((rows, 4), seed, torch.float32).abs(),
            normal((rows, 4), seed + 1, torch.float32).abs(),
            normal((rows, 4, 4), seed + 2, torch.float32).abs(),
        )

    def test_the_first_collapse_is_the_embedding(self) -> None:
        """A one-hot mix returns its stream unchanged."""
        trunk = normal((5, 4, 32), 1)
        for stream in range(4):
            pre = torch.zeros(5, 4)
            pre[:, stream] = 1.0
            assert torch.equal(collapse(trunk, pre, FIXED), trunk[:, stream])

    @BOTH
    def test_collapse(self, arithmetic: Arithmetic) -> None:
        trunk, pre = normal((30, 4, 64), 2), self.a_mix(30, 3).pre
        got = collapse(trunk, pre, arithmetic)
        want = np.einsum("nm,nmd->nd", wide(pre), wide(trunk))
        assert got.dtype == torch.bfloat16
        assert (wide(got) == bf16(want)).mean() > 0.999

    @BOTH
    def test_expand(self, arithmetic: Arithmetic) -> None:
        """``comb[i, j]`` carries stream ``i`` into stream ``j``; one rounding per stream."""
        out, trunk, mix = normal((30, 64), 4), normal((30, 4, 64), 5), self.a_mix(30, 6)
        got = expand(out, trunk, mix, arithmetic)
        want = np.zeros((30, 4, 64))
        for j in range(4):
            want[:, j] = wide(mix.post)[:, j, None] * wide(out)
            for i in range(4):
                want[:, j] += wide(mix.comb)[:, i, j, None] * wide(trunk)[:, i]
        assert got.dtype == torch.bfloat16
        assert (wide(got) == bf16(want)).mean() > 0.999

    def test_orientation(self) -> None:
        comb = torch.zeros(1, 4, 4)
        comb[0, 0, 2] = 1.0
        mix = Mix(torch.zeros(1, 4), torch.zeros(1, 4), comb)
        trunk = normal((1, 4, 8), 7)
        got = expand(torch.zeros(1, 8, dtype=torch.bfloat16), trunk, mix, FIXED)
        assert torch.equal(got[0, 2], trunk[0, 0])
        assert not got[0, [0, 1, 3]].any()

    def test_the_order_of_fused_steps(self) -> None:
        """Stream 0 first, each step a fused multiply-add, the output term alone rounded first."""
        out, trunk = normal((4, 8), 8, torch.float32), normal((4, 4, 8), 9, torch.float32)
        mix = self.a_mix(4, 10)
        got_x, got = collapse(trunk, mix.pre, UNROUNDED), expand(out, trunk, mix, UNROUNDED)
        for row in range(4):
            for channel in range(8):
                column = trunk[row, :, channel].tolist()
                total = 0.0
                for weight, value in zip(mix.pre[row].tolist(), column, strict=True):
                    total = fused(weight, value, total)
                assert got_x[row, channel].item() == total
                for j in range(4):
                    total = float(np.float32(mix.post[row, j]) * np.float32(out[row, channel]))
                    for weight, value in zip(mix.comb[row, :, j].tolist(), column, strict=True):
                        total = fused(weight, value, total)
                    assert got[row, j, channel].item() == total

    def test_fused_multiply_add(self) -> None:
        """``(1 + e)(1 - e) - 1`` is ``-e^2``; with a rounded product it would be 0."""
        e = 2.0**-13
        got = fused_multiply_add(torch.tensor([1 + e]), torch.tensor([1 - e]), torch.tensor([-1.0]))
        assert got.item() == -(e**2)
        a, b, c = (normal((500,), seed, torch.float32) for seed in (11, 12, 13))
        triples = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
        assert fused_multiply_add(a, b, c).tolist() == [fused(*triple) for triple in triples]

    def test_rows_do_not_matter_to_each_other(self) -> None:
        out, trunk, mix = normal((9, 32), 14), normal((9, 4, 32), 15), self.a_mix(9, 16)
        for row in range(9):
            part = slice(row, row + 1)
            alone = Mix(*(x[part] for x in mix))
            got = expand(out[part], trunk[part], alone, FIXED)
            assert same_bits(got, expand(out, trunk, mix, FIXED)[part])


def test_mean_of_the_streams() -> None:
    """Exact sums, one rounding."""
    x = torch.tensor([[[1.0, 256.0], [2.0, 1.0], [3.0, 1.0], [4.0, 0.0]]], dtype=torch.bfloat16)
    assert stream_mean(x, FREE).tolist() == [[2.5, 64.5]]


def test_the_mean_leaves_its_input_alone() -> None:
    for streams in (1, 4):
        x = normal((3, streams, 8), 1)
        before = x.clone()
        mean = stream_mean(x, FREE)
        assert same_bits(x, before)
        if streams == 1:
            assert same_bits(mean, x[:, 0])

"""RMS norm: fp32 with one rounding, after the weight."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_neuron.ops.arithmetic import Arithmetic, fixed_arithmetic, free_arithmetic
from deepinfer_neuron.ops.norm import inverse_rms, rms_norm
from tests.ops.number_formats import Floats, bf16, normal, same_bits, wide

EPS = 1e-20
BOTH = pytest.mark.parametrize("arithmetic", [fixed_arithmetic(), free_arithmetic()])
FIXED = fixed_arithmetic()


def exact(x: Tensor, weight: Tensor) -> Floats:
    """The norm in fp64, nothing rounded."""
    values = wide(x)
    return values / np.sqrt((values**2).mean(axis=-1, keepdims=True) + EPS) * wide(weight)


def steps(got: Tensor, want: Floats) -> Floats:
    """Distance in bf16 steps at ``want``."""
    size = np.exp2(np.floor(np.log2(np.maximum(np.abs(want), 1e-30))) - 7)
    return np.abs(wide(got) - want) / size


@BOTH
@pytest.mark.parametrize("width", [32, 100, 512])
def test_one_rounding(arithmetic: Arithmetic, width: int) -> None:
    """Nearly every element is the fp64 value rounded once; a few lie at a tie of fp32 noise."""
    x, weight = normal((60, width), 1), normal((width,), 2)
    want = exact(x, weight)
    got = rms_norm(x, weight, EPS, arithmetic)
    assert got.dtype == torch.bfloat16
    assert (wide(got) == bf16(want)).mean() > 0.999
    assert steps(got, want).max() < 0.501


def test_rounding_before_the_weight_is_something_else() -> None:
    """The variant that rounds twice is off by up to a whole step in many elements."""
    x, weight = normal((60, 512), 1), normal((512,), 2)
    want = exact(x, weight)
    normed = exact(x, torch.ones(512))
    twice = torch.from_numpy(bf16(bf16(normed) * weight.float().numpy()))
    assert steps(twice, want).max() > 0.9
    got = rms_norm(x, weight, EPS, FIXED)
    assert (wide(got) != wide(twice)).mean() > 0.1


@BOTH
def test_a_row_of_zeros_gives_zeros(arithmetic: Arithmetic) -> None:
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    assert not rms_norm(x, normal((64,), 3), EPS, arithmetic).any()
    assert inverse_rms(x.float(), EPS, arithmetic).tolist() == pytest.approx([1e10, 1e10])


@BOTH
@pytest.mark.parametrize(("size", "scaled"), [(1e-12, 0.01), (1e-10, 2**-0.5), (1e-8, 1.0)])
def test_the_epsilon_reaches_the_square_root(
    arithmetic: Arithmetic, size: float, scaled: float
) -> None:
    """With 1e-20, a row of 1e-12 becomes 0.01; with a flushed or larger epsilon 1 or 1e-9."""
    x = torch.full((1, 64), size, dtype=torch.float32).to(torch.bfloat16)
    got = rms_norm(x, torch.ones(64, dtype=torch.bfloat16), EPS, arithmetic)
    assert wide(got)[0].tolist() == pytest.approx([scaled] * 64, rel=0.01)


@BOTH
def test_one_huge_element(arithmetic: Arithmetic) -> None:
    """Its square is within fp32; the row scales to ``sqrt(d)`` in that channel."""
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    x[0, 5] = 2.0**60
    got = rms_norm(x, torch.ones(64, dtype=torch.bfloat16), EPS, arithmetic)
    assert got[0, 5].item() == 8.0
    assert got.count_nonzero() == 1


@BOTH
def test_leading_axes(arithmetic: Arithmetic) -> None:
    x, weight = normal((4, 6, 64), 4), normal((64,), 5)
    flat = rms_norm(x.flatten(0, 1), weight, EPS, arithmetic)
    assert same_bits(rms_norm(x, weight, EPS, arithmetic), flat.view(4, 6, 64))


@pytest.mark.parametrize("size", [1, 3, 24])
def test_rows_do_not_matter_to_each_other(size: int) -> None:
    x, weight = normal((25, 160), 6), normal((160,), 7)
    parts = [rms_norm(part, weight, EPS, FIXED) for part in x.split(size)]
    assert same_bits(torch.cat(parts), rms_norm(x, weight, EPS, FIXED))


def test_a_weight_in_fp32_means_the_same() -> None:
    x, weight = normal((5, 64), 8), normal((64,), 9)
    assert same_bits(rms_norm(x, weight.float(), EPS, FIXED), rms_norm(x, weight, EPS, FIXED))

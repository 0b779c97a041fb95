"""Pooling of two tokens: a softmax over the pair, channel by channel."""

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
)
from deepinfer_neuron.ops.compress import pool_pairs
from tests.ops.number_formats import Floats, bf16, normal, same_bits, wide

FIXED, FREE = fixed_arithmetic(), free_arithmetic()
BOTH = pytest.mark.parametrize("arithmetic", [FIXED, FREE])


def tokens(entries: int, seed: int, width: int = 48) -> Tensor:
    """fp32 ``[entries, 2, width]``: scores of a few units, then values."""
    return normal((entries, 2, width), seed, torch.float32) * torch.tensor([[3.0], [1.0]])


def pooled(first: Tensor, second: Tensor) -> Floats:
    """The weight of the first token is the logistic function of the scores' difference."""
    share = 1 / (1 + np.exp(wide(second)[:, 0] - wide(first)[:, 0]))
    return wide(first)[:, 1] * share + wide(second)[:, 1] * (1 - share)


@BOTH
def test_value(arithmetic: Arithmetic) -> None:
    first, second = tokens(40, 1), tokens(40, 2)
    got = pool_pairs(first, second, arithmetic)
    want = pooled(first, second)
    assert got.dtype == torch.bfloat16
    assert (wide(got) == bf16(want)).mean() > 0.999
    np.testing.assert_allclose(wide(got), want, rtol=2.0**-8, atol=1e-6)


def test_without_rounding() -> None:
    first, second = tokens(40, 3), tokens(40, 4)
    got = pool_pairs(first, second, Arithmetic(FixedOrder(), rounding=False))
    assert got.dtype == torch.float32
    np.testing.assert_allclose(wide(got), pooled(first, second), rtol=1e-5, atol=1e-6)


@BOTH
def test_equal_scores_give_the_mean(arithmetic: Arithmetic) -> None:
    first = torch.tensor([[[5.0, -3.0], [1.0, 2.0]]])
    second = torch.tensor([[[5.0, -3.0], [3.0, -2.0]]])
    assert pool_pairs(first, second, arithmetic).tolist() == [[2.0, 0.0]]


@BOTH
def test_far_scores_pick_one_token(arithmetic: Arithmetic) -> None:
    """Channel by channel, and without overflow."""
    first = torch.tensor([[[1e30, -1000.0], [1.0, 2.0]]])
    second = torch.tensor([[[0.0, 1000.0], [3.0, 4.0]]])
    assert pool_pairs(first, second, arithmetic).tolist() == [[1.0, 4.0]]


def test_entries_do_not_matter_to_each_other() -> None:
    first, second = tokens(19, 5), tokens(19, 6)
    pairs = zip(first.split(1), second.split(1), strict=True)
    assert same_bits(
        torch.cat([pool_pairs(a, b, FIXED) for a, b in pairs]), pool_pairs(first, second, FIXED)
    )


@BOTH
def test_no_entries(arithmetic: Arithmetic) -> None:
    assert pool_pairs(tokens(0, 7), tokens(0, 8), arithmetic).shape == (0, 48)

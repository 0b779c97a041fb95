"""Mean over streams."""

from __future__ import annotations

import torch

from deepinfer_neuron.ops.streams import stream_mean
from tests.ops.number_formats import normal, same_bits


def test_mean() -> None:
    """Exact sums, one rounding."""
    x = torch.tensor([[[1.0, 256.0], [2.0, 1.0], [3.0, 1.0], [4.0, 0.0]]], dtype=torch.bfloat16)
    assert stream_mean(x).tolist() == [[2.5, 64.5]]


def test_the_input_stays() -> None:
    x = normal((3, 4, 8), 1)
    before = x.clone()
    stream_mean(x)
    assert same_bits(x, before)

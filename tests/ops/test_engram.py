"""The gated memory update."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_neuron.checkpoint.reader import Checkpoint
from deepinfer_neuron.model.blocks import Engram
from deepinfer_neuron.model.matrix import WeightSource
from deepinfer_neuron.ops.arithmetic import (
    Arithmetic,
    FixedOrder,
    FreeOrder,
    fixed_arithmetic,
    free_arithmetic,
)
from deepinfer_neuron.ops.engram import engram_update
from tests.ops.number_formats import Floats, bf16, normal, same_bits, wide

EPS = 1e-20
FIXED, FREE = fixed_arithmetic(), free_arithmetic()
BOTH = pytest.mark.parametrize("arithmetic", [FIXED, FREE])
UNROUNDED = pytest.mark.parametrize(
    "arithmetic", [Arithmetic(FixedOrder(), False), Arithmetic(FreeOrder(), False)]
)


def updated(trunk: Tensor, kv: Tensor, weight: Tensor) -> Floats:
    """Stream by stream in fp64: cosine of weighted query and key, square root, logistic gate."""
    streams, width = weight.shape
    out, memory, w = wide(trunk), wide(kv), wide(weight)
    for row in range(len(out)):
        for stream in range(streams):
            query, key = out[row, stream], memory[row, stream]
            sizes = [math.sqrt(np.mean(v * v) + EPS) for v in (query, key)]
            d = float(np.dot(query * w[stream], key)) / sizes[0] / sizes[1] / math.sqrt(width)
            root = math.copysign(math.sqrt(max(abs(d), 1e-6)), d)
            out[row, stream] = query + memory[row, streams] / (1 + math.exp(-root))
    return out


def operands(rows: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Trunk of 4 streams, keys and value, weights."""
    trunk, kv = normal((rows, 4, 64), seed, dtype), normal((rows, 5, 64), seed + 1, dtype)
    return trunk, kv, normal((4, 64), seed + 2, torch.float32)


@BOTH
def test_one_rounding(arithmetic: Arithmetic) -> None:
    trunk, kv, weight = operands(40, 1, torch.bfloat16)
    got = engram_update(trunk, kv, weight, EPS, arithmetic)
    want = updated(trunk, kv, weight)
    assert got.dtype == torch.bfloat16
    assert (wide(got) == bf16(want)).mean() > 0.998
    np.testing.assert_allclose(wide(got), want, rtol=2.0**-8, atol=1e-6)


@UNROUNDED
def test_without_rounding(arithmetic: Arithmetic) -> None:
    trunk, kv, weight = operands(20, 4, torch.float32)
    got = engram_update(trunk, kv, weight, EPS, arithmetic)
    np.testing.assert_allclose(wide(got), updated(trunk, kv, weight), rtol=1e-5, atol=1e-5)


@UNROUNDED
def test_a_zero_product_opens_the_gate_a_little_more_than_half(arithmetic: Arithmetic) -> None:
    """The floor 1e-6 keeps the sign of +0: sigmoid(0.001), not 0.5."""
    trunk, kv, weight = operands(3, 7, torch.float32)
    kv[:, :4] = 0
    got = engram_update(trunk, kv, weight, EPS, arithmetic)
    gate = (wide(got) - wide(trunk)) / wide(kv)[:, 4:]
    assert np.median(gate) == pytest.approx(1 / (1 + math.exp(-0.001)), abs=1e-6)


@UNROUNDED
def test_a_negative_zero_closes_it_a_little(arithmetic: Arithmetic) -> None:
    """A product that underflows from below is -0 and counts as negative."""
    trunk, kv = torch.zeros(1, 1, 64), torch.zeros(1, 2, 64)
    trunk[0, 0, :2] = torch.tensor([100.0, 1e-22])
    kv[0, 0, 1:3] = torch.tensor([-1e-22, 100.0])
    kv[0, 1] = 1.0
    got = engram_update(trunk, kv, torch.ones(1, 64), EPS, arithmetic)
    assert got[0, 0, 5].item() == pytest.approx(1 / (1 + math.exp(0.001)), abs=1e-7)


@UNROUNDED
@pytest.mark.parametrize("sign", [1, -1])
def test_aligned_and_opposed_keys(arithmetic: Arithmetic, sign: int) -> None:
    """A key equal to the query gives ``d = sqrt(D)``, here 8."""
    trunk = torch.ones(1, 1, 64)
    kv = torch.stack((sign * torch.ones(64), torch.full((64,), 2.0)))[None]
    got = engram_update(trunk, kv, torch.ones(1, 64), EPS, arithmetic)
    want = 1 + 2 / (1 + math.exp(-sign * math.sqrt(8)))
    assert got.flatten().tolist() == pytest.approx([want] * 64, rel=1e-6)


@UNROUNDED
def test_each_stream_has_its_key_and_all_share_the_value(arithmetic: Arithmetic) -> None:
    trunk, kv, weight = operands(2, 8, torch.float32)
    before = engram_update(trunk, kv, weight, EPS, arithmetic)
    kv[:, 1] *= -1
    after = engram_update(trunk, kv, weight, EPS, arithmetic)
    assert [torch.equal(before[:, m], after[:, m]) for m in range(4)] == [True, False, True, True]
    kv[:, 4] = 0
    assert torch.equal(engram_update(trunk, kv, weight, EPS, arithmetic), trunk)


@BOTH
def test_a_trunk_of_zeros_is_finite(arithmetic: Arithmetic) -> None:
    trunk, kv, weight = operands(2, 9, torch.bfloat16)
    got = engram_update(torch.zeros_like(trunk), kv, weight, EPS, arithmetic)
    assert torch.isfinite(got).all()


def test_rows_do_not_matter_to_each_other() -> None:
    trunk, kv, weight = operands(17, 10, torch.bfloat16)
    parts = zip(trunk.split(3), kv.split(3), strict=True)
    whole = engram_update(trunk, kv, weight, EPS, FIXED)
    assert same_bits(torch.cat([engram_update(t, k, weight, EPS, FIXED) for t, k in parts]), whole)


@BOTH
def test_image_rows_stay_as_they_are(
    arithmetic: Arithmetic, open_checkpoint: Callable[[str], Checkpoint]
) -> None:
    """The module leaves tokens whose table rows are -1 alone, negative zeros included."""
    checkpoint = open_checkpoint("nano")
    config = checkpoint.config
    assert config.engram is not None
    layer = config.engram.layer_ids[0]
    engram = Engram(config, layer, WeightSource(checkpoint, expanded=False, arithmetic=arithmetic))
    trunk = normal((4, config.hc_mult, config.hidden_size), 11)
    trunk[1, 0, :3] = -0.0
    rows = torch.arange(4)[:, None].repeat(1, config.engram.num_columns)
    rows[[1, 3]] = -1
    got = engram(trunk, rows)
    assert same_bits(got[[1, 3]], trunk[[1, 3]])
    assert (got[[0, 2]] != trunk[[0, 2]]).flatten(1).any(dim=1).all()

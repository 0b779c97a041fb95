"""Sink attention over gathered keys, against a plain loop in fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_neuron.ops.arithmetic import (
    Arithmetic,
    FixedOrder,
    FreeOrder,
    fixed_arithmetic,
    free_arithmetic,
)
from deepinfer_neuron.ops.attention import sink_attention
from tests.ops.number_formats import Floats, bf16, normal, random_bytes, same_bits, wide

FIXED, FREE = fixed_arithmetic(), free_arithmetic()
BOTH = pytest.mark.parametrize("arithmetic", [FIXED, FREE])
UNROUNDED = pytest.mark.parametrize(
    "arithmetic", [Arithmetic(FixedOrder(), False), Arithmetic(FreeOrder(), False)]
)
SCALE = 64**-0.5
NO_FAR = (torch.empty(0, 64, dtype=torch.bfloat16), torch.empty(30, 0, dtype=torch.int64))

Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def operands(rows: int = 30, near_keys: int = 50, far_keys: int = 40) -> Operands:
    """Query of 3 heads, window keys with 8 slots, far keys with 6, sinks; some slots empty."""
    near_index = random_bytes((rows, 8), 1, 0, near_keys).to(torch.int64)
    far_index = random_bytes((rows, 6), 2, 0, far_keys).to(torch.int64)
    for row in range(rows):
        near_index[row, 1 + row % 8 :] = -1
        far_index[row, row % 7 :] = -1
    return (
        normal((rows, 3, 64), 3) * 3,
        normal((near_keys, 64), 4),
        near_index,
        normal((far_keys, 64), 5),
        far_index,
        normal((3,), 6, torch.float32),
    )


def attended(
    query: Tensor, near: Tensor, near_index: Tensor, far: Tensor, far_index: Tensor, sink: Tensor
) -> Floats:
    """Softmax over the keys and the sink, which has no value; one row and head at a time."""
    q, s = wide(query), wide(sink)
    out = np.zeros(q.shape)
    for row in range(len(q)):
        keys = [wide(near)[i] for i in near_index[row].tolist() if i >= 0]
        keys += [wide(far)[i] for i in far_index[row].tolist() if i >= 0]
        for head in range(q.shape[1]):
            logits = [float(np.dot(q[row, head], key)) * SCALE for key in keys]
            top = max([*logits, s[head]])
            weights = np.exp(np.array([*logits, s[head]]) - top)
            for weight, key in zip(weights / weights.sum(), keys, strict=False):
                out[row, head] += weight * key
    return out


def attend(given: Operands, arithmetic: Arithmetic) -> Tensor:
    return sink_attention(*given, SCALE, arithmetic)


@BOTH
def test_value(arithmetic: Arithmetic) -> None:
    got = attend(operands(), arithmetic)
    want = attended(*operands())
    assert got.dtype == torch.bfloat16
    assert (wide(got) == bf16(want)).mean() > 0.998
    np.testing.assert_allclose(wide(got), want, rtol=2.0**-8, atol=1e-5)


@UNROUNDED
def test_without_rounding(arithmetic: Arithmetic) -> None:
    given: Operands = tuple(  # type: ignore[assignment]
        x.float() if x.is_floating_point() else x for x in operands()
    )
    got = attend(given, arithmetic)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(wide(got), attended(*given), rtol=1e-5, atol=2e-6)


@BOTH
def test_window_only(arithmetic: Arithmetic) -> None:
    """No slots for far keys at all."""
    query, near, near_index, _, _, sink = operands()
    got = sink_attention(query, near, near_index, *NO_FAR, sink, SCALE, arithmetic)
    want = attended(query, near, near_index, *NO_FAR, sink)
    np.testing.assert_allclose(wide(got), want, rtol=2.0**-8, atol=1e-5)


@BOTH
@pytest.mark.parametrize("strength", [100.0, 1e4, 1e30])
def test_a_huge_sink_takes_everything(arithmetic: Arithmetic, strength: float) -> None:
    given = operands()
    got = attend((*given[:5], torch.full((3,), strength)), arithmetic)
    assert got.abs().max() < 1e-15


@BOTH
@pytest.mark.parametrize("strength", [-1e4, -1e30])
def test_a_very_low_sink_leaves_a_plain_softmax(arithmetic: Arithmetic, strength: float) -> None:
    query, near, near_index, far, far_index, _ = operands()
    got = sink_attention(
        query, near, near_index, far, far_index, torch.full((3,), strength), SCALE, arithmetic
    )
    keys = torch.cat((near, far)).double()
    index = torch.cat((near_index, torch.where(far_index < 0, -1, far_index + len(near))), dim=1)
    mask = torch.zeros(30, len(keys) + 1, dtype=torch.double)
    mask.scatter_add_(1, index % (len(keys) + 1), torch.ones(index.shape, dtype=torch.double))
    logits = query.double() @ keys.T * SCALE
    # Duplicated slots count as often as they occur.
    weights = F.softmax(logits + mask[:, None, :-1].log(), dim=-1)
    np.testing.assert_allclose(wide(got), wide(weights @ keys), rtol=2.0**-8, atol=1e-5)


@BOTH
@pytest.mark.parametrize("strength", [-1e30, 0.0, 50.0])
def test_a_row_without_keys_gives_zeros(arithmetic: Arithmetic, strength: float) -> None:
    query, near, near_index, far, far_index, _ = operands()
    near_index[4], far_index[4] = -1, -1
    sink = torch.full((3,), strength)
    got = sink_attention(query, near, near_index, far, far_index, sink, SCALE, arithmetic)
    assert not got[4].any()
    assert not got.isnan().any()
    nothing = near[:0], torch.full((30, 8), -1)
    assert not sink_attention(query, *nothing, *NO_FAR, sink, SCALE, arithmetic).any()


@BOTH
def test_the_sink_is_not_scaled(arithmetic: Arithmetic) -> None:
    """A zero query: each of two keys and a sink of ln 2 weigh 1, 1 and 2."""
    keys = torch.stack((torch.ones(64), torch.full((64,), 3.0))).to(torch.bfloat16)
    query = torch.zeros(1, 1, 64, dtype=torch.bfloat16)
    sink = torch.tensor([float(np.log(2))])
    far = keys[:0], torch.empty(1, 0, dtype=torch.int64)
    got = sink_attention(query, keys, torch.tensor([[0, 1]]), *far, sink, SCALE, arithmetic)
    assert got.unique().tolist() == [1.0]


@BOTH
def test_a_key_in_both_lists_counts_twice(arithmetic: Arithmetic) -> None:
    query = torch.zeros(1, 1, 64, dtype=torch.bfloat16)
    keys = torch.stack((torch.zeros(64), torch.full((64,), 3.0))).to(torch.bfloat16)
    sink = torch.full((1,), -1e30)
    got = sink_attention(
        query, keys, torch.tensor([[0, 1]]), keys[1:], torch.tensor([[0]]), sink, SCALE, arithmetic
    )
    assert got.unique().tolist() == [2.0]


@BOTH
def test_large_logits_do_not_overflow(arithmetic: Arithmetic) -> None:
    query, near, near_index, far, far_index, sink = operands()
    got = attend((query * 1000, near, near_index, far, far_index, sink), arithmetic)
    assert torch.isfinite(got).all()


@BOTH
def test_no_rows(arithmetic: Arithmetic) -> None:
    query, near, near_index, far, far_index, sink = operands()
    got = attend((query[:0], near, near_index[:0], far, far_index[:0], sink), arithmetic)
    assert got.shape == (0, 3, 64)


class TestFixedOrder:
    """What must not change a bit."""

    @pytest.mark.parametrize("size", [1, 7, 29])
    def test_rows_in_chunks(self, size: int) -> None:
        query, near, near_index, far, far_index, sink = operands()
        parts = zip(query.split(size), near_index.split(size), far_index.split(size), strict=True)
        got = [attend((q, near, n, far, f, sink), FIXED) for q, n, f in parts]
        assert same_bits(torch.cat(got), attend(operands(), FIXED))

    @pytest.mark.parametrize("rows", [1, 4])
    def test_bounded_workspace(self, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = attend(operands(), FIXED)
        monkeypatch.setattr("deepinfer_neuron.ops.attention._WORKSPACE_ELEMENTS", rows * 14 * 64)
        assert same_bits(attend(operands(), FIXED), whole)

    @pytest.mark.parametrize(("near_slots", "far_slots"), [(1, 0), (5, 1), (120, 30)])
    def test_empty_slots_behind(self, near_slots: int, far_slots: int) -> None:
        query, near, near_index, far, far_index, sink = operands()
        near_index = F.pad(near_index, (0, near_slots), value=-1)
        far_index = F.pad(far_index, (0, far_slots), value=-1)
        got = attend((query, near, near_index, far, far_index, sink), FIXED)
        assert same_bits(got, attend(operands(), FIXED))

    def test_a_list_of_empty_slots_equals_no_list(self) -> None:
        query, near, near_index, far, far_index, sink = operands()
        got = attend((query, near, near_index, far, torch.full_like(far_index, -1), sink), FIXED)
        want = sink_attention(query, near, near_index, *NO_FAR, sink, SCALE, FIXED)
        assert same_bits(got, want)

    def test_where_the_keys_lie(self) -> None:
        """Only the listed values and their order matter, not their places in the tables."""
        query, near, near_index, far, far_index, sink = operands()
        order = torch.randperm(50, generator=torch.Generator().manual_seed(7))
        moved = torch.where(near_index < 0, -1, order.argsort()[near_index])
        got = attend((query, near[order], moved, far, far_index, sink), FIXED)
        assert same_bits(got, attend(operands(), FIXED))

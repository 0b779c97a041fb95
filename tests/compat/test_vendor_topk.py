"""Selection: limits per row, ties, offsets, outputs, and the plain form."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer_neuron.compat.vendor.deep_select.interface import topk
from deepinfer_neuron.errors import ConfigError
from tests.ops.number_formats import normal


def _plain(scores: torch.Tensor, k: int, end: int) -> list[int]:
    """The largest of the first ``end``, lowest index first among equals, ascending."""
    ranked = sorted(range(end), key=lambda i: (-float(scores[i]), i))
    return sorted(ranked[:k])


def _indexer(scores, k, end, **options):
    values, indices = topk(
        scores,
        k,
        sorted=False,
        end=end,
        indices_type=torch.int32,
        sorted_index=True,
        return_value=False,
        **options,
    )
    assert values is None
    assert indices.dtype == torch.int32
    return indices


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("k", [0, 1, 5, 40, 60])
@pytest.mark.parametrize("levels", [1, 3, 1000])
def test_limits_and_ties(dtype: torch.dtype, k: int, levels: int) -> None:
    buffer = (normal((6, 64), 1, torch.float32) * levels).round().to(dtype)
    scores = buffer[:, 7:47]
    end = torch.tensor([0, 1, 3, 17, 39, 40], dtype=torch.int32)
    expected = [_plain(scores[row], k, int(end[row])) for row in range(6)]
    for row in range(6):
        scores[row, int(end[row]) :: 2] = math.nan
        scores[row, int(end[row]) + 1 :: 2] = math.inf
    found = _indexer(scores, k, end)
    assert found.shape == (6, k)
    for row in range(6):
        assert found[row].tolist() == expected[row] + [-1] * (k - len(expected[row]))


def test_minus_infinity_and_zeros_count() -> None:
    scores = torch.tensor([[-math.inf, 0.0, -0.0, -math.inf, 5.0]])
    assert _indexer(scores, 2, torch.tensor([4])).tolist() == [[1, 2]]
    assert _indexer(scores, 4, torch.tensor([4])).tolist() == [[0, 1, 2, 3]]
    assert _indexer(scores, 1, torch.tensor([3])).tolist() == [[1]]


def test_offsets_fill_value_and_strided_output() -> None:
    scores = normal((3, 20), 2)
    end = torch.tensor([20, 2, 0], dtype=torch.int32)
    offset = torch.tensor([100, 200, 300], dtype=torch.int32)
    buffer = torch.full((3, 9), 77, dtype=torch.int32)
    out = buffer[:, 2:6]
    found = _indexer(
        scores, 4, end, output_idx=out, output_idx_offset=offset, idx_oob_fill_value=-5
    )
    plain = _indexer(scores, 4, end)
    expected = torch.where(plain < 0, -5, plain + offset[:, None])
    assert torch.equal(found, expected)
    assert torch.equal(out, expected)
    assert bool((buffer[:, [0, 1, 6, 7, 8]] == 77).all())


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_nothing_to_choose_from(shape: tuple[int, int]) -> None:
    found = _indexer(torch.zeros(shape), 2, torch.zeros(shape[0], dtype=torch.int32))
    assert found.tolist() == [[-1, -1]] * shape[0]


@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_plain_form(descending: bool, dtype: torch.dtype) -> None:
    logits = normal((4, 100), 3, dtype)
    values, indices = topk(logits, 7, descending, indices_type=torch.int32)
    assert indices.dtype == torch.int32
    assert torch.equal(values, logits.gather(1, indices.long()))
    assert torch.equal(values.sort(1, descending=True).values, logits.topk(7, 1).values)
    if descending:
        assert torch.equal(values, logits.topk(7, 1).values)
    _, one_row = topk(logits[:1], 100, True)
    assert sorted(one_row[0].tolist()) == list(range(100))


def test_plain_form_prefers_low_indices() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0], [0.0, -0.0, 0.0, -1.0, 0.0]])
    values, indices = topk(logits, 3, True)
    assert indices.tolist() == [[1, 2, 4], [0, 1, 2]]
    assert values[0].tolist() == [2.0, 2.0, 2.0]
    assert topk(torch.zeros(2, 3), 0, True)[1].shape == (2, 0)


def test_sorted_indices_with_values() -> None:
    scores = torch.tensor([[3.0, 9.0, 5.0]])
    values, indices = topk(scores, 4, end=torch.tensor([2]), sorted_index=True)
    assert indices.tolist() == [[0, 1, -1, -1]]
    assert values.tolist() == [[3.0, 9.0, -math.inf, -math.inf]]
    assert topk(scores, 4, sorted_index=True)[1].tolist() == [[0, 1, 2, -1]]
    assert topk(torch.zeros(1, 0), 1, sorted_index=True)[0].tolist() == [[-math.inf]]


def test_bad_input_is_named() -> None:
    scores = torch.zeros(2, 5)
    with pytest.raises(ConfigError, match="k=6 of 5 columns"):
        topk(scores, 6)
    with pytest.raises(ConfigError, match="each of 2 rows"):
        topk(scores, 2, end=torch.zeros(3))
    with pytest.raises(ConfigError, match=r"int64 \[2, 5\]"):
        topk(scores.long(), 2)
    with pytest.raises(ConfigError, match="k is -1"):
        topk(scores, -1)

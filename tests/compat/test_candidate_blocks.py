"""Candidate blocks against loops over entries."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer_neuron.compat.tilelang_ops import (
    candidate_block_max_tl,
    get_candidate_compact_lens_tl,
    restore_candidate_indices_inplace_tl,
)
from deepinfer_neuron.errors import ConfigError
from tests.compat.guards import Guarded, guarded_rows, integers, strided
from tests.ops.number_formats import normal

BF16, I32 = torch.bfloat16, torch.int32


@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("length", [5, 64, 133])
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_block_max(size: int, length: int, rows: int) -> None:
    """Garbage behind the valid length, lengths at block boundaries, infinities, length 0."""
    logits = strided(normal((rows, length), 1) * 1e30)
    lengths = integers((rows,), 0, length + 1, 2)
    if rows > 5:
        lengths[:6] = torch.tensor([0, 1, min(size, length), min(size + 1, length), length, 3])
    for row, valid in enumerate(lengths.tolist()):
        logits[row, valid:] = math.inf if row % 2 else math.nan
        logits[row, :valid:5] = math.inf if row % 3 else -math.inf
    blocks = -(-length // size)
    scores, count = guarded_rows(rows, blocks, BF16), Guarded((rows + 3,), (1,), I32)
    candidate_block_max_tl(length, size)(logits, lengths, scores.view, count.view)
    assert scores.intact()
    top = torch.finfo(BF16).max
    for row, valid in enumerate(lengths.tolist()):
        used = -(-valid // size)
        assert count.view[row] == used
        expected = [
            min(logits[row, b * size : min((b + 1) * size, valid)].max().item(), top)
            for b in range(used)
        ]
        if used:
            expected[-1] = math.inf
        assert scores.view[row, :used].tolist() == expected


def test_block_max_in_several_parts() -> None:
    logits, lengths = normal((70, 70000), 3), torch.full((70,), 70000, dtype=I32)
    scores, count = torch.empty(70, 8750, dtype=BF16), torch.empty(72, dtype=I32)
    candidate_block_max_tl(70000, 8)(logits, lengths, scores, count)
    expected = logits.view(70, 8750, 8).float().amax(2)
    expected[:, -1] = math.inf
    assert torch.equal(scores.float(), expected)
    assert (count[:70] == 8750).all()


@pytest.mark.parametrize(("rows", "topk"), [(0, 8), (1, 1), (67, 8), (5, 100)])
@pytest.mark.parametrize("size", [8, 16])
def test_compact_lengths(rows: int, topk: int, size: int) -> None:
    blocks = strided(integers((rows, topk), -1, 2 * topk, 1))
    lengths = integers((rows,), 0, 2 * topk * size, 2)
    out = Guarded((rows,), (1,), I32, 4)
    get_candidate_compact_lens_tl(topk, size)(blocks, lengths, out.view)
    expected = [
        sum(min(max(length - b * size, 0), size) for b in ids if b >= 0)
        for ids, length in zip(blocks.tolist(), lengths.tolist(), strict=True)
    ]
    assert out.view.tolist() == expected
    assert out.intact()


@pytest.mark.parametrize("has_offset", [False, True])
@pytest.mark.parametrize(("rows", "tokens", "topk"), [(0, 3, 2), (1, 1, 1), (7, 103, 9), (2, 5, 0)])
def test_restore(has_offset: bool, rows: int, tokens: int, topk: int) -> None:
    """Negative indices, the index right behind the blocks, far ones, and absent blocks."""
    size = 8
    compact = guarded_rows(rows, tokens, I32)
    compact.view.copy_(integers((rows, tokens), -2, topk * size + 3, 1))
    if tokens > 4:
        compact.view[:, :4] = torch.tensor([topk * size, topk * size - 1, -1, 2**31 - 1])
    blocks = strided(integers((rows, topk), -1, 1000, 2))
    offset = integers((rows,), -5, 10**6, 3)
    expected = []
    for row, ids in enumerate(compact.view.tolist()):
        expected.append([])
        for x in ids:
            block = int(blocks[row, x // size]) if 0 <= x < topk * size else -1
            moved = block * size + x % size + (int(offset[row]) if has_offset else 0)
            expected[-1].append(moved if block >= 0 else -1)
    restore_candidate_indices_inplace_tl(tokens, topk, size, has_offset)(
        compact.view, blocks, offset
    )
    assert compact.view.tolist() == expected
    assert compact.intact()


def test_bad_static_arguments() -> None:
    for call in (
        lambda: candidate_block_max_tl(64, 0),
        lambda: get_candidate_compact_lens_tl(4, 0),
        lambda: restore_candidate_indices_inplace_tl(4, 4, -1, False),
    ):
        with pytest.raises(ConfigError):
            call()

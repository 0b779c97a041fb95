"""Candidate blocks on worked examples, and against the model's own choice of blocks."""

from __future__ import annotations

import math

import torch

from deepinfer_neuron.ops.candidates import block_scores, candidate_entries, expand_candidates
from deepinfer_neuron.ops.index import candidate_blocks
from tests.ops.number_formats import normal


def test_scores() -> None:
    logits = torch.tensor([[1.0, 5.0, 2.0, math.inf, 9.0, 9.0, 9.0]] * 3, dtype=torch.bfloat16)
    best, count = block_scores(logits, torch.tensor([5, 7, 0], dtype=torch.int32), 2)
    top = torch.finfo(torch.bfloat16).max
    assert count.tolist() == [3, 4, 0]
    assert best[0, :3].tolist() == [5, top, math.inf]
    assert best[1].tolist() == [5, top, 9, math.inf]


def test_the_same_blocks_as_the_model() -> None:
    """The largest block scores are the blocks that the model keeps."""
    logits, visible = normal((9, 150), 1), torch.arange(1, 151, 17)
    masked = logits.float().masked_fill(torch.arange(150) >= visible[:, None], -math.inf)
    kept = candidate_blocks(masked, visible, 8, 4)
    best, count = block_scores(logits, visible.int(), 8)
    for row in range(9):
        used = best[row, : count[row]].float().tolist()
        order = sorted(range(len(used)), key=lambda block: (-used[block], block))[:4]
        assert kept[row][kept[row] >= 0].tolist() == sorted(order)


def test_entries() -> None:
    blocks = torch.tensor([[0, 2, -1, 9]], dtype=torch.int32)
    assert candidate_entries(blocks, torch.tensor([19], dtype=torch.int32), 8).tolist() == [11]


def test_expansion() -> None:
    blocks = torch.tensor([[3, -1]], dtype=torch.int32)
    compact = torch.tensor([[0, 7, 8, 15, 16, -1]], dtype=torch.int32)
    assert expand_candidates(compact, blocks, 8).tolist() == [[24, 31, -1, -1, -1, -1]]

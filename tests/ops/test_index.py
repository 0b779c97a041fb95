"""Index scores, the selection of entries, and candidate blocks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer_neuron.ops.arithmetic import (
    Arithmetic,
    FixedOrder,
    fixed_arithmetic,
    free_arithmetic,
)
from deepinfer_neuron.ops.index import (
    candidate_blocks,
    candidate_mask,
    first_entries,
    index_scores,
    top_entries,
)
from deepinfer_neuron.ops.quant import q4_index
from tests.ops.number_formats import Floats, bf16, normal, same_bits, wide

FIXED, FREE = fixed_arithmetic(), free_arithmetic()
TOP_BF16 = float(torch.finfo(torch.bfloat16).max)

few_scores = st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 0.5, 2.0])
"""So few distinct scores that nearly every row has ties at the cut."""


def score_rows(width: int) -> st.SearchStrategy[list[float]]:
    return st.lists(few_scores | st.floats(width=16, allow_nan=False), min_size=1, max_size=width)


def chosen_entries(row: list[float], limit: int) -> list[int]:
    """The largest finite-or-infinite scores by a stable sort; -inf is never chosen."""
    allowed = [j for j, score in enumerate(row) if score != -math.inf]
    return sorted(sorted(allowed, key=lambda j: (-row[j], j))[:limit])


def filled(entries: list[int], width: int) -> list[int]:
    return entries + [-1] * (width - len(entries))


class TestScores:
    """``sum_h relu(q . k) w`` with its rounding recipe."""

    @staticmethod
    def operands(heads: int, rows: int = 9, keys: int = 40) -> tuple[Tensor, Tensor, Tensor]:
        query = q4_index(normal((rows, heads, 64), heads), FIXED)
        key = q4_index(normal((keys, 64), 100 + heads), FIXED)
        return query, key, normal((rows, heads), 200 + heads)

    @staticmethod
    def slow(query: Tensor, keys: Tensor, weight: Tensor) -> Floats:
        """Head by head; e2m1 products are exact in fp64."""
        q, k, w = wide(query), wide(keys), weight.float().numpy()
        out = np.zeros((len(q), len(k)))
        for row in range(len(q)):
            for entry in range(len(k)):
                lanes = [np.float32(0)] * 4
                for head in range(q.shape[1]):
                    dot = bf16(np.float32(max(0.0, float(np.dot(q[row, head], k[entry])))))
                    lanes[head % 4] = bf16(lanes[head % 4] + dot * w[row, head])
                even, odd = bf16(lanes[0] + lanes[2]), bf16(lanes[1] + lanes[3])
                out[row, entry] = bf16(even + odd)
        return out

    @pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 7, 8, 12, 32])
    def test_recipe(self, heads: int) -> None:
        """Heads not a multiple of four leave their lanes as they are."""
        query, keys, weight = self.operands(heads)
        got = index_scores(query, keys, weight, FIXED)
        assert got.dtype == torch.float32
        assert np.array_equal(wide(got), self.slow(query, keys, weight))

    def test_the_recipe_is_not_one_rounding(self) -> None:
        query, keys, weight = self.operands(32)
        plain = np.einsum(
            "nhm,nh->nm",
            np.maximum(np.einsum("nhd,md->nhm", wide(query), wide(keys)), 0),
            wide(weight),
        )
        got = wide(index_scores(query, keys, weight, FIXED))
        assert (got != bf16(plain)).mean() > 0.3
        np.testing.assert_allclose(got, plain, atol=0.02 * np.abs(plain).max())

    def test_negative_scores_and_exact_zeros(self) -> None:
        """Weights are signed, and an entry that no head likes scores exactly 0."""
        query = torch.full((1, 2, 32), 0.5, dtype=torch.bfloat16)
        keys = torch.stack((torch.ones(32), -torch.ones(32), torch.zeros(32))).to(torch.bfloat16)
        weight = torch.tensor([[-1.0, 0.5]], dtype=torch.bfloat16)
        assert index_scores(query, keys, weight, FIXED).tolist() == [[-8.0, 0.0, 0.0]]

    def test_free_order_agrees_where_sums_are_exact(self) -> None:
        query, keys, weight = self.operands(4)
        query, keys = (x.clamp(-4, 4).mul(2).round() / 2 for x in (query, keys))
        fixed, free = (index_scores(query, keys, weight, a) for a in (FIXED, FREE))
        assert same_bits(fixed, free)

    @pytest.mark.parametrize("size", [1, 4])
    def test_rows_and_keys_do_not_matter_to_each_other(self, size: int) -> None:
        query, keys, weight = self.operands(6)
        whole = index_scores(query, keys, weight, FIXED)
        rows = zip(query.split(size), weight.split(size), strict=True)
        assert same_bits(torch.cat([index_scores(q, keys, w, FIXED) for q, w in rows]), whole)
        columns = [index_scores(query, part, weight, FIXED) for part in keys.split(7 * size)]
        assert same_bits(torch.cat(columns, dim=1), whole)

    def test_bounded_workspace(self, monkeypatch: pytest.MonkeyPatch) -> None:
        query, keys, weight = self.operands(5)
        whole = index_scores(query, keys, weight, FIXED)
        monkeypatch.setattr("deepinfer_neuron.ops.index._WORKSPACE_ELEMENTS", 2 * 5 * 40)
        assert same_bits(index_scores(query, keys, weight, FIXED), whole)

    def test_no_keys(self) -> None:
        query, keys, weight = self.operands(4)
        assert index_scores(query, keys[:0], weight, FIXED).shape == (9, 0)

    def test_without_rounding(self) -> None:
        query, keys, weight = (x.float() for x in self.operands(5))
        got = index_scores(query, keys, weight, Arithmetic(FixedOrder(), rounding=False))
        dots = np.maximum(np.einsum("nhd,md->nhm", wide(query), wide(keys)), 0)
        np.testing.assert_allclose(
            wide(got), np.einsum("nhm,nh->nm", dots, wide(weight)), rtol=1e-5, atol=1e-4
        )


class TestTopEntries:
    """The largest scores, lower indices first among equals, ascending."""

    @given(score_rows(24), st.integers(1, 30))
    @settings(deadline=None, derandomize=True, max_examples=300)
    def test_any_row(self, row: list[float], limit: int) -> None:
        width = min(limit, len(row))
        got = top_entries(torch.tensor([row]), limit)
        assert got.tolist() == [filled(chosen_entries(row, limit), width)]

    @pytest.mark.parametrize("limit", [1, 7, 64, 200, 300])
    def test_many_rows(self, limit: int) -> None:
        """bf16 scores, so that ties are common, and a different visible length per row."""
        scores = (normal((50, 200), 1) * 3).to(torch.float32)
        visible = torch.arange(50) * 4
        scores = scores.masked_fill(torch.arange(200) >= visible[:, None], -math.inf)
        got = top_entries(scores, limit)
        assert got.dtype == torch.int64
        want = [filled(chosen_entries(row, limit), min(limit, 200)) for row in scores.tolist()]
        assert got.tolist() == want

    def test_equal_scores_at_the_cut(self) -> None:
        scores = torch.tensor([[1.0, 3.0, 1.0, 2.0, 1.0, 1.0], [0.0] * 6, [-5.0] * 6])
        assert top_entries(scores, 4).tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]

    def test_zeros_of_both_signs_are_equal(self) -> None:
        scores = torch.tensor([[-0.0, 0.0, -0.0, 0.0, -1.0], [0.0, -0.0, 0.0, -0.0, 1e-40]])
        assert top_entries(scores, 2).tolist() == [[0, 1], [0, 4]]

    def test_negative_scores_keep_their_order(self) -> None:
        scores = torch.tensor([[-3.0, -1.0, -2.0, -1e30, -1e-30]])
        assert top_entries(scores, 3).tolist() == [[1, 2, 4]]

    def test_masked_entries(self) -> None:
        """-inf is never chosen: fewer than the limit, or none at all."""
        low = -math.inf
        scores = torch.tensor([[low, 1.0, low, -1e38], [low] * 4])
        assert top_entries(scores, 3).tolist() == [[1, 3, -1], [-1, -1, -1]]

    def test_infinite_scores_come_first(self) -> None:
        scores = torch.tensor([[1.0, math.inf, TOP_BF16, math.inf]])
        assert top_entries(scores, 2).tolist() == [[1, 3]]

    def test_no_entries(self) -> None:
        assert top_entries(torch.empty(3, 0), 5).shape == (3, 0)
        assert top_entries(torch.empty(0, 7), 5).shape == (0, 5)

    def test_first_entries(self) -> None:
        got = first_entries(torch.tensor([0, 2, 4, 9]), 4)
        assert got.tolist() == [[-1] * 4, [0, 1, -1, -1], [0, 1, 2, 3], [0, 1, 2, 3]]


def masked(scores: Tensor, visible: Tensor) -> Tensor:
    """-inf behind each row's visible entries."""
    return scores.masked_fill(torch.arange(scores.shape[1]) >= visible[:, None], -math.inf)


def kept_blocks(row: list[float], visible: int, size: int, limit: int) -> list[int]:
    """Blocks ranked by their best visible score; the last visible one always stays."""
    count = -(-visible // size)
    best = [min(TOP_BF16, max(row[b * size : min(visible, (b + 1) * size)])) for b in range(count)]
    if best:
        best[-1] = math.inf
    return sorted(sorted(range(count), key=lambda b: (-best[b], b))[:limit])


def compact_selection(
    row: list[float], blocks: list[int], visible: int, size: int, topk: int
) -> list[int]:
    """Top-k among the kept blocks laid side by side, mapped back to entries."""
    length = sum(min(size, max(0, visible - size * b)) for b in blocks)
    entry = [blocks[c // size] * size + c % size for c in range(len(blocks) * size)]
    ranked = sorted(range(length), key=lambda c: (-row[entry[c]], c))
    return [entry[c] for c in sorted(ranked[:topk])]


class TestCandidateBlocks:
    """The blocks inside which later layers select."""

    @given(
        st.lists(few_scores.filter(math.isfinite) | st.floats(-9, 9, width=16), max_size=40),
        st.integers(0, 40),
        st.sampled_from([2, 4, 8]),
        st.integers(1, 8),
    )
    @settings(deadline=None, derandomize=True, max_examples=300)
    def test_any_row(self, row: list[float], visible: int, size: int, limit: int) -> None:
        visible = min(visible, len(row))
        scores = masked(torch.tensor([row]).view(1, -1), torch.tensor([visible]))
        got = candidate_blocks(scores, torch.tensor([visible]), size, limit)
        width = min(limit, -(-len(row) // size))
        assert got.tolist() == [filled(kept_blocks(row, visible, size, limit), width)]

    @given(
        st.lists(few_scores.filter(math.isfinite), min_size=1, max_size=60),
        st.integers(1, 60),
        st.integers(1, 6),
        st.integers(1, 20),
    )
    @settings(deadline=None, derandomize=True, max_examples=300)
    def test_masking_equals_a_compact_layout(
        self, row: list[float], visible: int, limit: int, topk: int
    ) -> None:
        """Selecting among masked scores is selecting among the kept blocks alone."""
        visible, size = min(visible, len(row)), 4
        scores = masked(torch.tensor([row]), torch.tensor([visible]))
        blocks = candidate_blocks(scores, torch.tensor([visible]), size, limit)
        inside = candidate_mask(blocks, size, len(row))
        got = top_entries(scores.masked_fill(~inside, -math.inf), topk)[0].tolist()
        kept = [b for b in blocks[0].tolist() if b >= 0]
        want = compact_selection(row, kept, visible, size, topk)
        assert got == filled(want, len(got))

    @pytest.mark.parametrize("visible", [16, 17, 23, 24])
    def test_the_last_visible_block_stays(self, visible: int) -> None:
        """Complete or not, even with the lowest scores."""
        scores = torch.linspace(5, -5, 40)[None]
        counts = torch.tensor([visible])
        got = candidate_blocks(masked(scores, counts), counts, 8, 2)
        assert got.tolist() == [[0, (visible - 1) // 8]]

    @pytest.mark.parametrize("visible", [1, 8, 31, 32])
    @pytest.mark.parametrize("limit", [4, 5, 100])
    def test_enough_room_keeps_everything(self, visible: int, limit: int) -> None:
        counts = torch.tensor([visible])
        scores = masked(normal((1, 32), 3, torch.float32), counts)
        blocks = candidate_blocks(scores, counts, 8, limit)
        used = -(-visible // 8)
        assert blocks.tolist() == [filled(list(range(used)), 4)]
        inside = candidate_mask(blocks, 8, 32)
        assert same_bits(scores.masked_fill(~inside, -math.inf), scores)

    def test_infinite_scores_do_not_outrank_the_last_block(self) -> None:
        """A block's score is at most the largest finite bf16."""
        scores = torch.tensor([[math.inf, 0.0, math.inf, 0.0, -1.0, -1.0]])
        assert candidate_blocks(scores, torch.tensor([6]), 2, 2).tolist() == [[0, 2]]

    def test_rows_choose_for_themselves(self) -> None:
        scores = torch.tensor([[9.0, 0, 0, 0, 0, 0, 1, 1], [0.0, 0, 9, 0, 0, 0, 1, 1]])
        counts = torch.tensor([8, 5])
        got = candidate_blocks(masked(scores, counts), counts, 2, 2)
        assert got.tolist() == [[0, 3], [1, 2]]

    def test_nothing_visible(self) -> None:
        counts = torch.tensor([0, 0])
        scores = masked(torch.zeros(2, 8), counts)
        assert candidate_blocks(scores, counts, 8, 3).tolist() == [[-1], [-1]]

    def test_mask(self) -> None:
        """Absent ids keep nothing; a last partial block ends with the entries."""
        blocks = torch.tensor([[0, 2], [1, -1], [-1, -1]])
        got = candidate_mask(blocks, 2, 5)
        assert got.int().tolist() == [[1, 1, 0, 0, 1], [0, 0, 1, 1, 0], [0] * 5]
        assert candidate_mask(blocks[:0], 2, 5).shape == (0, 5)

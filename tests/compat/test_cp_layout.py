"""The mirror layout against loops over sequences, halves and places."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer_neuron.compat.tilelang_ops import prepare_cp_mirror_tl, yoco_cp_boundary_fused_tl
from deepinfer_neuron.errors import ConfigError
from tests.compat.guards import integers, prefix

I32 = torch.int32
LISTS = [[1, 0, 7, 129, 0], [], [0], [0, 0], [1], [64], list(range(20)), [3, 250, 16, 17]]


def walk(lengths: list[int], ranks: int, rank: int) -> list[tuple[int, int, int, int]]:
    """(row, sequence, place in the sequence, its limit) of every local row of a rank."""
    rows, row = [], 0
    for sequence, length in enumerate(lengths):
        block = -(-length // (2 * ranks))
        for number in (rank, 2 * ranks - 1 - rank):
            for j in range(block):
                rows.append((row, sequence, block * number + j, length))
                row += 1
    return rows


def mirror(
    lengths: list[int], keys: list[int], ranks: int, rank: int, ratios: tuple[int, ...], extra: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = len(walk(lengths, ranks, rank)) + extra
    index, ks, ke = (
        torch.full(shape, 55, dtype=I32)
        for shape in ((out,), (len(ratios), out), (len(ratios), out))
    )
    reverse = torch.full((sum(lengths),), 55, dtype=I32)
    scratch = torch.empty(len(ratios) + 1, len(lengths) + 1, dtype=I32)
    kernel = prepare_cp_mirror_tl(cp_size=ranks, compress_ratios=ratios)
    kernel(prefix(lengths), prefix(keys), scratch, reverse, index, ks, ke, rank)
    return index, reverse, ks, ke


@pytest.mark.parametrize("lengths", LISTS, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("ratios", [(1,), (2,), (1, 2)])
def test_mirror(lengths: list[int], ranks: int, ratios: tuple[int, ...]) -> None:
    """Every rank, sequences of length zero, old tokens before the new ones."""
    keys = [n + extra for n, extra in zip(lengths, [0, 5, 0, 130, 1] * 4, strict=False)]
    flat, total = prefix(lengths).tolist(), len(walk(lengths, ranks, 0))
    expected_reverse = {}
    for rank in range(ranks):
        for row, sequence, local, length in walk(lengths, ranks, rank):
            if local < length:
                expected_reverse[flat[sequence] + local] = rank * total + row
    for rank in range(ranks):
        index, reverse, ks, ke = mirror(lengths, keys, ranks, rank, ratios, extra=3)
        assert reverse.tolist() == [expected_reverse[token] for token in range(sum(lengths))]
        assert (index[total:] == -1).all()
        for row, sequence, local, length in walk(lengths, ranks, rank):
            inside = local < length
            assert index[row] == (flat[sequence] + local if inside else -1)
            for number, ratio in enumerate(ratios):
                first = sum(max(1, n // ratio) for n in keys[:sequence])
                seen = (keys[sequence] - length + local + 1) // ratio if inside else 0
                assert ks[number, row] == first
                assert ke[number, row] == first + seen
        owned = index[index >= 0].long()
        assert torch.equal(reverse[owned] - rank * total, (index >= 0).nonzero()[:, 0].int())


def test_all_tokens_have_one_owner() -> None:
    lengths = integers((200,), 0, 90, 1).tolist()
    indices = [mirror(lengths, lengths, 4, rank, (1, 2), 0)[0] for rank in range(4)]
    owned = torch.cat(indices)
    assert torch.equal(owned[owned >= 0].sort().values, torch.arange(sum(lengths), dtype=I32))


KEPT = [
    ([40], [13]),
    ([50, 3, 40, 20, 13], [3, 3, 13, 1, 13]),
    ([128, 1], [128, 1]),
    ([41, 100], [41, 51]),
    ([2] * 30, [1] * 30),
    ([5, 0, 9], [0, 0, 9]),
    ([], []),
]


@pytest.mark.parametrize(("lengths", "kept"), KEPT)
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("spare", [0, 5])
def test_boundary(lengths: list[int], kept: list[int], ranks: int, spare: int) -> None:
    flat = prefix(kept).tolist()
    lists = []
    for rank in range(ranks):
        lists.append([])
        for row, sequence, local, length in walk(lengths, ranks, rank):
            if length - kept[sequence] <= local < length:
                lists[rank].append((row, flat[sequence] + local - (length - kept[sequence])))
    pad = max(map(len, lists)) + spare
    expected = {}
    for rank, rows in enumerate(lists):
        for ordinal, (_, token) in enumerate(rows):
            expected[token] = rank * pad + ordinal
    kernel = yoco_cp_boundary_fused_tl(cp_size=ranks)
    for rank in range(ranks):
        contrib = torch.full((pad,), 55, dtype=I32)
        reverse = torch.full((sum(kept),), 55, dtype=I32)
        scratch = torch.empty(ranks + 1, len(lengths) + 1, dtype=I32)
        kernel(prefix(lengths), prefix(kept), scratch, contrib, reverse, rank)
        rows = [row for row, _ in lists[rank]]
        assert contrib.tolist() == rows + [-1] * (pad - len(rows))
        assert reverse.tolist() == [expected[token] for token in range(sum(kept))]


def test_bad_static_arguments() -> None:
    for call in (
        lambda: prepare_cp_mirror_tl(0, (1,)),
        lambda: prepare_cp_mirror_tl(2, (1, 0)),
        lambda: yoco_cp_boundary_fused_tl(0),
    ):
        with pytest.raises(ConfigError):
            call()

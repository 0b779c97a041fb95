"""Compression against loops over entries in fp64, and against itself in other chunks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from deepinfer_neuron.compat.tilelang_ops import (
    compress_and_update_state_decode_tl,
    compress_and_update_state_prefill_tl,
)
from deepinfer_neuron.errors import ConfigError
from tests.compat.guards import Guarded, prefix
from tests.ops.number_formats import normal, same_bits
from tests.ops.plain_casts import one_rounding

DIM = 16
SENTINEL = -999.0


def ring(slots: int, size: int) -> Guarded:
    """A state whose slots lie 8 elements apart."""
    shape = (slots, size, 2, DIM)
    guarded = Guarded(shape, (size * 2 * DIM + 8, 2 * DIM, DIM, 1), torch.float32)
    guarded.view.fill_(SENTINEL)
    return guarded


def projected(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Score and value: two halves of one row."""
    both = normal((rows, 2 * DIM), seed, torch.float32)
    both[:, :DIM] *= 4
    return both[:, :DIM], both[:, DIM:]


def plain_entry(pairs: list[tuple[Tensor, Tensor]]) -> list[float]:
    out = []
    for channel in range(DIM):
        scores = [score[channel].item() for score, _ in pairs]
        weights = [math.exp(score - max(scores)) for score in scores]
        values = [value[channel].item() * w for (_, value), w in zip(pairs, weights, strict=True)]
        out.append(sum(values) / sum(weights))
    return out


def close(got: Tensor, expected: list[list[float]]) -> bool:
    """Within one rounding to bf16."""
    return one_rounding(got, torch.tensor(expected, dtype=torch.float64).view(-1, DIM), 2e-6)


def prefill(
    ratio: int,
    score: Tensor,
    value: Tensor,
    state: Tensor,
    slots: list[int],
    new: list[int],
    total: list[int],
    rows: Tensor | None = None,
) -> Tensor:
    old = [t - n for t, n in zip(total, new, strict=True)]
    entries = [max(1, t // ratio - o // ratio) for t, o in zip(total, old, strict=True)]
    mapping = [n for n, count in enumerate(entries) for _ in range(count)]
    out = torch.full((len(mapping), DIM), 5.0, dtype=torch.bfloat16)
    kernel = compress_and_update_state_prefill_tl(
        DIM=DIM, COMPRESS_RATIO=ratio, HAS_INDEX=rows is not None
    )
    kernel(
        score,
        value,
        state,
        torch.tensor(slots, dtype=torch.int32),
        torch.tensor(mapping, dtype=torch.int32),
        prefix(new),
        prefix(total),
        prefix(entries),
        rows,
        out,
    )
    return out


NEW, TOTAL, SLOTS = [5, 1, 0, 12, 2, 30], [5, 4, 7, 15, 2, 31], [3, 1, 6, 2, 5, 4]


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("mirrored", [False, True])
def test_prefill(ratio: int, mirrored: bool) -> None:
    """Whole and continued sequences, odd boundaries, an empty sequence, rings that are lapped."""
    size, count = 9, sum(NEW)
    score, value = projected(count + 4, 1)
    rows = torch.randperm(count + 4, generator=torch.Generator().manual_seed(2))[:count].int()
    state = ring(8, size)
    state.view[:, :, 1] = normal((8, size, DIM), 3, torch.float32)
    before = state.view.clone()
    expected, after, flat = [], before.clone(), 0
    for slot, new, total in zip(SLOTS, NEW, TOTAL, strict=True):
        old = total - new
        pairs = {}
        for p in range(max(0, old - size), old):
            pairs[p] = (before[slot, p % size, 0], before[slot, p % size, 1])
        for p in range(old, total):
            row = int(rows[flat + p - old]) if mirrored else flat + p - old
            pairs[p] = (score[row], value[row])
        blocks = range(old // ratio, total // ratio)
        expected += [plain_entry([pairs[b * ratio + i] for i in range(ratio)]) for b in blocks]
        if not blocks:
            expected.append([0.0] * DIM)
        for p in range(max(old, total - size), total):
            after[slot, p % size] = torch.stack(pairs[p])
        flat += new
    out = prefill(ratio, score, value, state.view, SLOTS, NEW, TOTAL, rows if mirrored else None)
    assert close(out, expected)
    assert same_bits(state.view, after)
    assert state.intact()


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("new", [1, 2, 9, 15])
def test_prefill_writes_only_the_last_tokens(ratio: int, new: int) -> None:
    """Places of the ring that no new token reaches keep their content."""
    score, value = projected(new, 4)
    state = ring(2, 9 + 5)
    prefill(ratio, score, value, state.view, [1], [new], [new])
    written = {p % 14 for p in range(max(0, new - 14), new)}
    assert {p for p in range(14) if (state.view[1, p] != SENTINEL).any()} == written
    assert (state.view[0] == SENTINEL).all()
    assert state.intact()


def test_no_sequences() -> None:
    score, value = projected(0, 1)
    assert prefill(2, score, value, ring(2, 9).view, [], [], []).shape == (0, DIM)


@pytest.mark.parametrize("cuts", [[20], [1, 20], [7, 8, 15, 20], list(range(1, 21))])
def test_chunks_make_no_difference(cuts: list[int]) -> None:
    score, value = projected(20, 5)
    whole = prefill(2, score, value, ring(1, 9).view, [0], [20], [20])
    state, entries, old = ring(1, 9).view, [], 0
    for cut in cuts:
        out = prefill(2, score[old:cut], value[old:cut], state, [0], [cut - old], [cut])
        entries.append(out[: cut // 2 - old // 2])
        old = cut
    assert same_bits(torch.cat(entries), whole)


@pytest.mark.parametrize("start", [6, 7])
def test_decode_continues_prefill(start: int) -> None:
    score, value = projected(20, 6)
    whole = prefill(2, score, value, ring(1, 9).view, [0], [20], [20])
    state = ring(1, 9).view
    entries = [prefill(2, score[:start], value[:start], state, [0], [start], [start])]
    for p in range(start, 20):
        out = decode(2, score[p : p + 1], value[p : p + 1], state, [0], [p + 1])
        assert (p + 1) % 2 == 0 or not out.any()
        entries.append(out[: (p + 1) // 2 - p // 2])
    assert same_bits(torch.cat(entries), whole)


def decode(
    ratio: int, score: Tensor, value: Tensor, state: Tensor, slots: list[int], lengths: list[int]
) -> Tensor:
    out = torch.full((len(slots), DIM), 5.0, dtype=torch.bfloat16)
    compress_and_update_state_decode_tl(DIM=DIM, COMPRESS_RATIO=ratio)(
        score,
        value,
        state,
        torch.tensor(slots, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        out,
    )
    return out


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("chain", [1, 2, 6])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_decode(ratio: int, chain: int, rows: int) -> None:
    """Chains of tokens share a slot; all are stored before any block is reduced."""
    size, starts = ratio + chain - 1, [3, 10, 1, 8, 21][:rows]
    slots = [slot for slot in (4, 0, 3, 1, 6)[:rows] for _ in range(chain)]
    lengths = [start + n + 1 for start in starts for n in range(chain)]
    score, value = projected(len(slots), 7)
    state = ring(8, size)
    state.view[:, :, 1] = normal((8, size, DIM), 8, torch.float32)
    after = state.view.clone()
    for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        after[slot, (length - 1) % size] = torch.stack((score[row], value[row]))
    expected = []
    for slot, length in zip(slots, lengths, strict=True):
        pairs = [tuple(after[slot, p % size]) for p in range(length - ratio, length)]
        expected.append(plain_entry(pairs) if length % ratio == 0 else [0.0] * DIM)
    out = decode(ratio, score, value, state.view, slots, lengths)
    assert close(out, expected)
    assert same_bits(state.view, after)
    assert state.intact()


@pytest.mark.parametrize("size", [5, 8, 138])
def test_padding_rows_stay_in_their_slot(size: int) -> None:
    """Length 0 wraps to position 2^32 - 1 of the row's own slot."""
    score, value = projected(2, 9)
    state = ring(3, size)
    decode(2, score, value, state.view, [0, 2], [0, 6])
    touched = (state.view != SENTINEL).flatten(2).any(2)
    assert touched[0].nonzero().flatten().tolist() == [(2**32 - 1) % size]
    assert not touched[1].any()
    assert touched[2].nonzero().flatten().tolist() == [5 % size]


def test_bad_static_arguments() -> None:
    with pytest.raises(ConfigError):
        compress_and_update_state_prefill_tl(DIM, 4, False)
    with pytest.raises(ConfigError):
        compress_and_update_state_decode_tl(DIM, 0)

"""Compression of token blocks with a ring of the last tokens per request.

A ring holds (score, value) pairs; position ``p`` of a sequence is row ``p % S`` of its slot. A
block of one token keeps its value; a block of two is pooled by
:func:`deepinfer_neuron.ops.compress.pool_pairs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_neuron.ops.arithmetic import free_arithmetic
from deepinfer_neuron.ops.compress import pool_pairs

_WORKSPACE_ELEMENTS = 1 << 19
"""Channels of gathered pairs alive at once."""


@dataclass(frozen=True)
class Chunk:
    """Where the tokens of a prefill chunk lie; ``n`` sequences, int32 each.

    Attributes:
        slots: ``[n]`` ring of each sequence.
        owner: ``[C]`` sequence of each compressed entry.
        starts: ``[n + 1]`` prefix sums of new tokens.
        ends: ``[n + 1]`` prefix sums of all tokens, new ones included.
        entries: ``[n + 1]`` prefix sums of compressed entries; at least one per sequence.
        rows: ``[Q]`` row of each new token, or ``None`` if tokens are rows.
    """

    slots: Tensor
    owner: Tensor
    starts: Tensor
    ends: Tensor
    entries: Tensor
    rows: Tensor | None


def pool_block(tokens: Sequence[Tensor]) -> Tensor:
    """Compress blocks of one or two tokens: fp32 ``[e, 2, D]`` per token to bf16 ``[e, D]``."""
    if len(tokens) == 1:
        return tokens[0][:, 1].to(torch.bfloat16)
    return pool_pairs(tokens[0], tokens[1], free_arithmetic())


def compress_chunk(score: Tensor, value: Tensor, ring: Tensor, chunk: Chunk, ratio: int) -> Tensor:
    """Compressed entries whose last token lies in the chunk; earlier tokens come from the ring.

    Args:
        score: fp32 ``[R, D]``, any row stride.
        value: fp32 ``[R, D]``, any row stride.
        ring: fp32 ``[slots, S, 2, D]`` as the previous chunk left it.
        chunk: the sequences.
        ratio: tokens per entry, 1 or 2.

    Returns:
        bf16 ``[C, D]``; entries that a sequence reserves but does not complete are zero.
    """
    count = chunk.owner.shape[0]
    out = torch.zeros(count, score.shape[1], dtype=torch.bfloat16, device=score.device)
    owner = chunk.owner.to(torch.int64)
    new = chunk.starts.diff()
    old = chunk.ends.diff() - new
    entry = torch.arange(count, device=score.device) - chunk.entries[owner]
    last = torch.div(old + new, ratio, rounding_mode="floor")
    first = torch.div(old, ratio, rounding_mode="floor")
    complete = ((entry >= 0) & (entry < (last - first)[owner])).nonzero()[:, 0]
    for part in complete.split(max(1, _WORKSPACE_ELEMENTS // max(1, score.shape[1]))):
        sequence = owner[part]
        block = (first[sequence] + entry[part]) * ratio
        tokens = [
            _pairs(score, value, ring, chunk, sequence, block + step, old) for step in range(ratio)
        ]
        out[part] = pool_block(tokens)
    return out


def _pairs(
    score: Tensor,
    value: Tensor,
    ring: Tensor,
    chunk: Chunk,
    sequence: Tensor,
    position: Tensor,
    old: Tensor,
) -> Tensor:
    """(score, value) of positions of sequences: ``[e, 2, D]``."""
    ahead = position - old[sequence]
    row = (chunk.starts[sequence] + ahead).clamp(min=0)
    if chunk.rows is not None:
        row = chunk.rows[row]
    pairs = torch.stack((score.index_select(0, row), value.index_select(0, row)), dim=1)
    past = (ahead < 0).nonzero()[:, 0]
    slot = chunk.slots[sequence[past]].to(torch.int64)
    pairs[past] = ring[slot, position[past].remainder(ring.shape[1]).to(torch.int64)]
    return pairs


def remember_chunk(score: Tensor, value: Tensor, ring: Tensor, chunk: Chunk) -> None:
    """Write the last ``min(S, new)`` tokens of every sequence to its ring, in place.

    Arguments as in :func:`compress_chunk`.
    """
    size = ring.shape[1]
    new = chunk.starts.diff().to(torch.int64)
    kept = new.clamp(max=size)
    sequence = torch.repeat_interleave(kept)
    step = torch.arange(sequence.shape[0], device=score.device)
    step = step - (kept.cumsum(0) - kept)[sequence] + (new - kept)[sequence]
    row = chunk.starts[sequence] + step
    if chunk.rows is not None:
        row = chunk.rows[row]
    position = (chunk.ends.diff() - new)[sequence] + step
    write_pairs(
        ring, chunk.slots[sequence].to(torch.int64), position.remainder(size), score, value, row
    )


def write_pairs(
    ring: Tensor, slot: Tensor, place: Tensor, score: Tensor, value: Tensor, row: Tensor
) -> None:
    """``ring[slot, place] = (score[row], value[row])``; int64 ``[n]`` each, in place."""
    ring[slot, place, 0] = score.index_select(0, row)
    ring[slot, place, 1] = value.index_select(0, row)


def compress_step(
    score: Tensor, value: Tensor, ring: Tensor, slots: Tensor, lengths: Tensor, ratio: int
) -> Tensor:
    """Write one token per row to its ring (in place), then compress the blocks that it completes.

    All rows are written before any is read, so rows that share a ring see each other.

    Args:
        score: fp32 ``[n, D]``, any row stride.
        value: fp32 ``[n, D]``, any row stride.
        ring: fp32 ``[slots, S, 2, D]``.
        slots: int32 ``[n]``.
        lengths: int32 ``[n]`` tokens including this one. Rows of length 0 are padding: they touch
            only their own slot, and their result means nothing.
        ratio: tokens per entry, 1 or 2.

    Returns:
        bf16 ``[n, D]``, zero in rows that complete no block.
    """
    size, slot, length = ring.shape[1], slots.to(torch.int64), lengths.to(torch.int64)

    def place(back: int) -> Tensor:
        # As a 32-bit unsigned position, so that padding rows stay inside the ring.
        return ((length - back) & 0xFFFFFFFF).remainder(size)

    rows = torch.arange(length.shape[0], device=score.device)
    write_pairs(ring, slot, place(1), score, value, rows)
    out = torch.zeros(score.shape, dtype=torch.bfloat16, device=score.device)
    done = (length.remainder(ratio) == 0).nonzero()[:, 0]
    tokens = [ring[slot[done], place(back)[done]] for back in range(ratio, 0, -1)]
    out[done] = pool_block(tokens)
    return out

"""Compression of token blocks with a ring of the last tokens per request.

A ring holds (score, value) pairs; position ``p`` of a sequence is row ``p % S`` of its slot. A
block of one token keeps its value; a block of two is pooled by
:func:`deepinfer_neuron.ops.compress.pool_pairs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

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

    @cached_property
    def new(self) -> Tensor:
        """int32 ``[n]`` new tokens of each sequence."""
        return self.starts.diff()

    @cached_property
    def old(self) -> Tensor:
        """int32 ``[n]`` tokens of each sequence before them."""
        return self.ends.diff() - self.new


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
    owner, count = chunk.owner, chunk.owner.shape[0]
    out = torch.zeros(count, score.shape[1], dtype=torch.bfloat16, device=score.device)
    first = chunk.old.div(ratio, rounding_mode="floor")
    number = (chunk.old + chunk.new).div(ratio, rounding_mode="floor") - first
    entry = torch.arange(count, dtype=torch.int32, device=score.device) - chunk.entries[owner]
    complete = ((entry >= 0) & (entry < number[owner])).nonzero()[:, 0]
    step = torch.arange(ratio, dtype=torch.int32, device=score.device)
    for part in complete.split(max(1, _WORKSPACE_ELEMENTS // max(1, score.shape[1]))):
        # All tokens of all blocks in one gather.
        sequence = owner.index_select(0, part)
        block = first.index_select(0, sequence) + entry.index_select(0, part)
        position = ((block * ratio)[:, None] + step).flatten()
        pairs = _pairs(score, value, ring, chunk, sequence.repeat_interleave(ratio), position)
        pooled = pool_block(pairs.unflatten(0, (-1, ratio)).unbind(1))
        out.index_copy_(0, part, pooled)
    return out


def _pairs(
    score: Tensor,
    value: Tensor,
    ring: Tensor,
    chunk: Chunk,
    sequence: Tensor,
    position: Tensor,
) -> Tensor:
    """(score, value) of positions of sequences, int32 ``[e]`` each: ``[e, 2, D]``."""
    ahead = position - chunk.old.index_select(0, sequence)
    row = (chunk.starts.index_select(0, sequence) + ahead).clamp_(min=0)
    if chunk.rows is not None:
        row = chunk.rows.index_select(0, row)
    pairs = torch.stack((score.index_select(0, row), value.index_select(0, row)), dim=1)
    past = (ahead < 0).nonzero()[:, 0]
    if past.shape[0]:
        slot = chunk.slots.index_select(0, sequence.index_select(0, past))
        place = position.index_select(0, past).remainder(ring.shape[1])
        pairs.index_copy_(0, past, ring[slot, place])
    return pairs


def remember_chunk(score: Tensor, value: Tensor, ring: Tensor, chunk: Chunk) -> None:
    """Write the last ``min(S, new)`` tokens of every sequence to its ring, in place.

    Arguments as in :func:`compress_chunk`.
    """
    size = ring.shape[1]
    kept = chunk.new.clamp(max=size)
    sequence = torch.repeat_interleave(kept)
    # A token's number among the kept ones gives that among all new ones, and its position.
    behind = chunk.starts[1:] - kept.cumsum(0)
    row = torch.arange(sequence.shape[0], device=score.device) + behind.index_select(0, sequence)
    position = row + (chunk.old - chunk.starts[:-1]).index_select(0, sequence)
    if chunk.rows is not None:
        row = chunk.rows.index_select(0, row)
    pairs = torch.stack((score.index_select(0, row), value.index_select(0, row)), dim=1)
    ring[chunk.slots.index_select(0, sequence), position.remainder(size)] = pairs


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
    back = torch.arange(ratio, 0, -1, device=score.device)
    # As 32-bit unsigned positions, so that padding rows stay inside the ring.
    places = ((lengths[:, None] - back) & 0xFFFFFFFF).remainder(ring.shape[1])
    ring[slots, places[:, -1]] = torch.stack((score, value), dim=1)
    out = torch.zeros(score.shape, dtype=torch.bfloat16, device=score.device)
    done = (lengths.remainder(ratio) == 0).nonzero()[:, 0]
    blocks = ring[slots.index_select(0, done)[:, None], places.index_select(0, done)]
    return out.index_copy_(0, done, pool_block(blocks.unbind(1)))

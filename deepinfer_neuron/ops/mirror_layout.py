"""The mirror layout: how the tokens of sequences are dealt out to ranks.

A sequence of ``s`` tokens is cut into ``2 R`` blocks of ``b = ceil(s / 2R)``; rank ``r`` owns
blocks ``r`` and ``2R - 1 - r``, so that every rank sees the same amount of causal work. A rank
lists its rows by sequence, then half (the earlier block first), then place in the block: ``2 b``
rows per sequence, of which some hold no token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Places:
    """Where tokens live; int64 ``[tokens]`` each.

    Attributes:
        sequence: number of the token's sequence.
        local: place of the token in its sequence.
        owner: rank that owns it.
        row: its row on that rank.
    """

    sequence: Tensor
    local: Tensor
    owner: Tensor
    row: Tensor


def block_lengths(lengths: Tensor, ranks: int) -> Tensor:
    """Tokens per block: int64 ``[n]`` sequence lengths to int64 ``[n]``."""
    return (lengths + (2 * ranks - 1)).div(2 * ranks, rounding_mode="floor")


def mirror_places(lengths: Tensor, kept: Tensor, ranks: int) -> Places:
    """Owners and rows of the last ``kept`` tokens of every sequence, in order.

    Args:
        lengths: int64 ``[n]`` tokens per sequence.
        kept: int64 ``[n]``, at most ``lengths``.
        ranks: number of ranks.
    """
    block = block_lengths(lengths, ranks)
    sequence = torch.repeat_interleave(kept)
    shift = lengths - kept - (kept.cumsum(0) - kept)
    local = torch.arange(sequence.shape[0], device=lengths.device) + shift[sequence]
    size = block[sequence]
    number = local.div(size, rounding_mode="floor")
    late = number >= ranks
    start = (2 * block).cumsum(0) - block  # of the later half
    row = torch.where(late, start[sequence], start[sequence] - size) + local - number * size
    return Places(sequence, local, torch.where(late, 2 * ranks - 1 - number, number), row)


def mirror_rows(lengths: Tensor, ranks: int) -> Tensor:
    """Rows per rank, filled or not: int64 scalar tensor."""
    return 2 * block_lengths(lengths, ranks).sum()


def mirror_index(places: Places, rank: int, rows: int) -> Tensor:
    """Token of every row of a rank, -1 where there is none: int64 ``[rows]``."""
    index = torch.full((rows,), -1, dtype=torch.int64, device=places.row.device)
    mine = (places.owner == rank).nonzero()[:, 0]
    index[places.row[mine]] = mine
    return index


def key_ranges(
    places: Places,
    index: Tensor,
    lengths: Tensor,
    key_lengths: Tensor,
    ranks: int,
    ratios: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Range of compressed keys that every row of a rank may see.

    A sequence holds ``max(1, keys // ratio)`` compressed keys, sequences one behind the other. A
    row sees those whose last token is its own or an earlier one; a row without a token sees none.

    Args:
        places: of all tokens.
        index: int64 ``[rows]`` from :func:`mirror_index`.
        lengths: int64 ``[n]`` new tokens per sequence.
        key_lengths: int64 ``[n]`` tokens per sequence, old ones included.
        ranks: number of ranks.
        ratios: tokens per compressed key.

    Returns:
        int64 ``[len(ratios), rows]`` twice: first key, and the one behind the last.
    """
    owned = torch.repeat_interleave(2 * block_lengths(lengths, ranks))
    filled = (index >= 0).nonzero()[:, 0]
    token = index[filled]
    seen = (key_lengths - lengths)[places.sequence[token]] + places.local[token] + 1
    first = torch.zeros(len(ratios), index.shape[0], dtype=torch.int64, device=index.device)
    behind = first.clone()
    for number, ratio in enumerate(ratios):
        keys = key_lengths.div(ratio, rounding_mode="floor").clamp(min=1)
        first[number, : owned.shape[0]] = (keys.cumsum(0) - keys)[owned]
        behind[number] = first[number]
        behind[number, filled] += seen.div(ratio, rounding_mode="floor")
    return first, behind


def boundary_ordinals(places: Places, ranks: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Order of tokens within the list that each rank makes of its own, by row.

    Args:
        places: of the listed tokens.
        ranks: number of ranks.
        rows: rows per rank, from :func:`mirror_rows`.

    Returns:
        int64 ``[tokens]``: place in the owner's list; and int64 ``[tokens]``: the tokens, sorted
        by owner and place.
    """
    order = (places.owner * rows + places.row).argsort()
    owner = places.owner[order]
    counts = torch.bincount(owner, minlength=ranks)
    ordinal = torch.empty_like(order)
    ordinal[order] = (
        torch.arange(order.shape[0], device=order.device) - ((counts.cumsum(0) - counts)[owner])
    )
    return ordinal, order

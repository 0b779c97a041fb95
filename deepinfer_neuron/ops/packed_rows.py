"""Rows of sequences packed one behind the other, and what a step carries over from the last one.

A step may start before the host has seen the results of the one before it. Its tokens then come
from the device: ``remap[i]`` is the place of sequence ``i`` in the last step's batch, -1 if it was
not there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class PackedRows:
    """Owner of each row.

    Attributes:
        sequences: int64 ``[Q]``; any valid number where ``used`` is false.
        steps: int32 ``[Q]``, place in the sequence; 0 where ``used`` is false.
        used: bool ``[Q]``, false for rows that belong to no sequence.
    """

    sequences: Tensor
    steps: Tensor
    used: Tensor


def packed_rows(lengths: Tensor, ends: Tensor, total: int) -> PackedRows:
    """Assign rows to sequences.

    Args:
        lengths: int32 ``[n]``, rows of each sequence; at least one sequence.
        ends: int32 ``[n]``, the inclusive prefix sums of ``lengths``.
        total: number of rows, at least ``ends[-1]``.
    """
    row = torch.arange(total, dtype=torch.int32, device=lengths.device)
    # Rows behind the last sequence count as its own here, and have too large a step.
    sequences = torch.searchsorted(ends, row, right=True).clamp_max_(ends.shape[0] - 1)
    length = lengths.index_select(0, sequences)
    steps = row - ends.index_select(0, sequences) + length
    used = (steps >= 0) & (steps < length)
    return PackedRows(sequences, steps.where(used, 0), used)


def carried_tokens(fresh: Tensor, sampled: Tensor, predicted: Tensor, remap: Tensor) -> Tensor:
    """Tokens of each sequence in this step.

    A sequence of the last step continues with the token sampled there and the drafts behind it.

    Args:
        fresh: int32 ``[n, m]``, tokens of sequences that were not in the last step.
        sampled: int32 ``[p]``, last step's tokens.
        predicted: int32 ``[p, d]``, last step's drafts.
        remap: int32 ``[n]``.

    Returns:
        int32 ``[n, m]``; columns behind the drafts are 0.
    """
    if sampled.shape[0] == 0:
        return fresh
    width = fresh.shape[1]
    table = torch.cat((sampled[:, None], predicted), 1)[:, :width]
    carried = F.pad(table, (0, width - table.shape[1])).index_select(0, remap.clamp_min(0))
    return torch.where(remap[:, None] < 0, fresh, carried)


def carried_rejections(remap: Tensor, accepted: Tensor, drafts: int, fresh: int = 0) -> Tensor:
    """Drafts of the last step that were rejected.

    Args:
        remap: int32 ``[n]``.
        accepted: int32 ``[p]``, accepted drafts.
        drafts: how many there were of each sequence.
        fresh: what counts for a sequence that was not in the last step.

    Returns:
        int32 ``[n]``.
    """
    if accepted.shape[0] == 0:
        return torch.full_like(remap, fresh)
    return (drafts - accepted.index_select(0, remap.clamp_min(0))).where(remap >= 0, fresh)


def token_history(
    window: Tensor, current: Tensor, rejected: Tensor, rows: PackedRows, count: int
) -> Tensor:
    """Each row's token and those before it.

    Args:
        window: int32 ``[n, w]``, tokens before this step and behind them those that may have been
            rejected.
        current: int32 ``[n, m]``, tokens of this step.
        rejected: int32 ``[n]``, how many at the end of the window do not count.
        rows: the ``Q`` rows of this step.
        count: tokens per row.

    Returns:
        int32 ``[Q, count]``, column ``r`` is the token ``r`` places before the row's.
    """
    place = rows.steps[:, None] - torch.arange(count, dtype=torch.int32, device=window.device)
    width, sequence = window.shape[1], rows.sequences
    back = rejected.index_select(0, sequence)[:, None]
    column = width + place - back.where(place < 0, 0)
    tokens = torch.cat((window, current), 1)
    flat = sequence[:, None] * tokens.shape[1] + column.clamp_(0, max(0, tokens.shape[1] - 1))
    return tokens.flatten().index_select(0, flat.flatten()).view(-1, count)


def cut_history(history: Tensor, sentinel: int, pad: int) -> Tensor:
    """Replace the first ``sentinel`` of a row, and all that is older, by ``pad``.

    Args:
        history: int32 ``[Q, count]``, newest first.
        sentinel: marks the end of what may be seen.
        pad: the replacement.

    Returns:
        int32 ``[Q, count]``.
    """
    hidden = (history == sentinel).cumsum(1) > 0
    return history.masked_fill(hidden, pad)

"""Distributions over a short list of tokens: look-ups, and drafts seen from the target's list."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def value_at(values: Tensor, columns: Tensor) -> Tensor:
    """Entries by column.

    Args:
        values: fp32 or int32 ``[n, k]``.
        columns: int32 ``[n]``.

    Returns:
        dtype of the values, ``[n]``; for a column outside the list ``-inf``, or -1 for integers.
    """
    absent = -math.inf if values.is_floating_point() else -1
    if values.shape[1] == 0:
        return values.new_full(columns.shape, absent)
    inside = (columns >= 0) & (columns < values.shape[1])
    index = columns.to(torch.int64).where(inside, 0)[:, None]
    return values.gather(1, index)[:, 0].where(inside, absent)


def value_of(keys: Tensor, values: Tensor, wanted: Tensor) -> Tensor:
    """Entries by key.

    Args:
        keys: int32 ``[n, k]``.
        values: fp32 ``[n, k]``.
        wanted: int32 ``[n]``.

    Returns:
        fp32 ``[n]``, the largest value with that key, ``-inf`` if there is none.
    """
    if keys.shape[1] == 0:
        return values.new_full(wanted.shape, -math.inf)
    return values.where(keys == wanted[:, None], -math.inf).amax(1)


def column_of(keys: Tensor, wanted: Tensor) -> Tensor:
    """First column with a key: int32 ``[n, k]`` and ``[n]`` to int32 ``[n]``, -1 for none."""
    count = keys.shape[1]
    if count == 0:
        return torch.full_like(wanted, -1)
    column = torch.arange(count, dtype=torch.int32, device=keys.device)
    first = column.where(keys == wanted[:, None], count).amin(1)
    return first.where(first < count, -1)


def aligned_values(keys: Tensor, values: Tensor, wanted: Tensor) -> Tensor:
    """Entries of one list in the order of another.

    Args:
        keys: int32 ``[n, k]``, distinct in a row.
        values: fp32 ``[n, k]``.
        wanted: int32 ``[n, w]``.

    Returns:
        fp32 ``[n, w]``, ``-inf`` for a key that the row does not have.
    """
    if keys.shape[1] == 0:
        return values.new_full(wanted.shape, -math.inf)
    ordered, columns = keys.sort(1)
    place = torch.searchsorted(ordered, wanted.contiguous()).clamp_max_(keys.shape[1] - 1)
    found = ordered.gather(1, place) == wanted
    return values.gather(1, columns.gather(1, place)).where(found, -math.inf)

"""Proposals kept from one step to the next, and rows filled up with padding.

A pool holds the drafts of every request: slot ``s`` owns ``K`` rows from ``s * K`` on. Slot 0 is
the dummy that requests without drafts read; it is never written.
"""

from __future__ import annotations

import torch
from torch import Tensor


def store_in_slots(pool: Tensor, values: Tensor, slots: Tensor) -> None:
    """Write the drafts of a step into a pool, in place.

    Args:
        pool: any dtype ``[slots * K, ...]``.
        values: same dtype ``[R, K, ...]``.
        slots: integer ``[R]``, one slot per request; rows for slot 0 are dropped.
    """
    drafts = values.shape[1]
    step = torch.arange(drafts, device=slots.device)
    rows = (slots.to(torch.int64)[:, None] * drafts + step).flatten()
    # Shapes must not depend on how many requests have slot 0, so it is written and put back.
    dummy = pool[:drafts].clone()
    pool.index_copy_(0, rows, values.flatten(0, 1))
    pool[:drafts].copy_(dummy)


def fill_rows(out: Tensor, rows: Tensor, padding: Tensor) -> None:
    """Rows, then padding up to the end of the buffer, in place.

    Args:
        out: ``[m, ...]``; what neither rows nor padding reach keeps its values.
        rows: ``[n, ...]``, ``n <= m``.
        padding: ``[p, ...]``, its first ``m - n`` entries are used.
    """
    count = rows.shape[0]
    out[:count].copy_(rows)
    rest = padding[: out.shape[0] - count]
    out[count : count + rest.shape[0]].copy_(rest)

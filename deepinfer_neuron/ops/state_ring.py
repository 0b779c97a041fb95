"""Copies between rings of different sizes."""

from __future__ import annotations

import torch
from torch import Tensor


def copy_between_rings(source: Tensor, target: Tensor, end: int, count: int) -> None:
    """Copy the ``count`` positions before ``end``; position ``p`` of a ring is row ``p % size``.

    Args:
        source: ``[L, size, F]``, any layer stride.
        target: ``[L, size, F]``, written in place at those rows only.
        end: first position that is not copied.
        count: positions, of which the last ones win if the target holds fewer.
    """
    position = torch.arange(end - min(count, target.shape[1]), end, device=source.device)
    rows = source.index_select(1, position.remainder(source.shape[1]))
    target.index_copy_(1, position.remainder(target.shape[1]), rows)

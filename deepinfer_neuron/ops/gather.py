"""Row gathers that tolerate -1."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    """Rows of a table; an index outside it gives zeros.

    Args:
        table: any dtype ``[rows, width]``.
        index: int64, any shape.

    Returns:
        dtype of the table, ``[*index.shape, width]``.
    """
    valid = (index >= 0) & (index < table.shape[0])
    if table.shape[0] == 0:
        return table.new_zeros(*index.shape, table.shape[1])
    rows = F.embedding(index.where(valid, 0), table)
    return rows.masked_fill(~valid[..., None], 0)

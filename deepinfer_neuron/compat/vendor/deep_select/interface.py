"""Selection of the largest entries; the lowest index wins among equals."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer_neuron.compat.vendor.operands import require, shape
from deepinfer_neuron.ops.select_largest import largest, largest_before


def topk(
    scores: Tensor,
    k: int,
    sorted: bool = True,
    end: Tensor | None = None,
    indices_type: torch.dtype = torch.int32,
    sorted_index: bool = False,
    output_idx: Tensor | None = None,
    output_idx_offset: Tensor | None = None,
    idx_oob_fill_value: int = -1,
    return_value: bool = True,
) -> tuple[Tensor | None, Tensor]:
    """The ``k`` largest entries of every row; values and indices as from ``torch.topk``.

    With ``end`` or ``sorted_index``: row ``r`` is searched in its first ``end[r]`` columns only,
    whatever the others hold; the indices found come in ascending order, ``idx_oob_fill_value``
    behind them (and -inf among the values).

    Args:
        scores: bf16 or fp32 ``[r, L]``, rows of any stride.
        k: entries per row; may exceed ``L`` in the second form.
        sorted: descending values; ``False`` leaves the order open (it is descending here).
        end: integers ``[r]``; ``None`` for all columns.
        indices_type: of the indices.
        sorted_index: indices in ascending order.
        output_idx: ``[r, k]``, rows of any stride, receives the indices too.
        output_idx_offset: integers ``[r]``, added to every index found.
        idx_oob_fill_value: stands where fewer than ``k`` entries exist.
        return_value: whether values are wanted.

    Returns:
        values ``[r, k]`` or ``None``, and indices ``[r, k]``.
    """
    require(
        scores.dim() == 2 and scores.dtype in (torch.bfloat16, torch.float32) and k >= 0,
        f"topk: scores are {shape(scores)} and k is {k}; give a bfloat16 or float32 matrix.",
    )
    rows, width = scores.shape
    require(
        end is None or end.shape == (rows,),
        f"topk: end does not hold one entry for each of {rows} rows; give a vector.",
    )
    plain = end is None and not sorted_index
    require(
        k <= width or not plain,
        f"topk: k={k} of {width} columns; give `end` or sorted_index=True to ask for more.",
    )
    if plain:
        found = largest(scores, k)
    else:
        ends = torch.full((rows,), width, device=scores.device) if end is None else end
        found = largest_before(scores, ends, k)
    absent = found < 0
    values = _values(scores, found) if return_value else None
    if output_idx_offset is not None:
        found = found + output_idx_offset.to(torch.int64)[:, None]
    indices = found.masked_fill(absent, idx_oob_fill_value).to(indices_type)
    if output_idx is not None:
        output_idx.copy_(indices)
    return values, indices


def _values(scores: Tensor, index: Tensor) -> Tensor:
    """Entries at ``index``, -inf where that is negative."""
    if scores.shape[1] == 0:
        return scores.new_full(index.shape, -math.inf)
    return scores.gather(1, index.clamp(min=0)).masked_fill(index < 0, -math.inf)

"""Rotary embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_neuron.compat.vendor.operands import require, shape
from deepinfer_neuron.ops.rotate import rotate_

__all__ = ["apply_rotary"]


def apply_rotary(
    query: Tensor,
    cos_sin_cache: Tensor,
    key: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    conjugate: bool = False,
    seqlen_offset: int = 0,
) -> None:
    """Rotate queries, and keys, in place.

    Args:
        query: bf16 or fp32 ``[T, heads, R]`` or ``[batch, tokens, heads, R]``, any strides.
        cos_sin_cache: fp32 ``[positions, R]``: cosines, then sines.
        key: like ``query`` with its own number of heads, or ``None``.
        positions: integers ``[T]`` or ``[batch, tokens]``; ``None`` for the number of the token.
        interleaved: pairs are neighbours; else an element of each half.
        conjugate: rotate back.
        seqlen_offset: added to every position.
    """
    width = cos_sin_cache.shape[-1]
    for x in (query, key):
        if x is None:
            continue
        require(
            x.dim() in (3, 4) and x.shape[-1] == width,
            f"apply_rotary: an input is {shape(x)} for a table {shape(cos_sin_cache)}; give "
            "[tokens, heads, R] or [batch, tokens, heads, R] with the table's width.",
        )
        lead = x.shape[:-2]
        if positions is None:
            place = torch.arange(lead[-1], device=x.device).expand(lead)
        else:
            place = positions.to(torch.int64)
        require(
            place.shape == lead,
            f"apply_rotary: positions are {shape(place)} for an input {shape(x)}; give one per "
            "token.",
        )
        turns = cos_sin_cache[place + seqlen_offset]
        # A batch of any strides cannot be flattened without a copy.
        parts = zip(x, turns, strict=True) if x.dim() == 4 else [(x, turns)]
        for rows, angles in parts:
            rotate_(rows, angles, interleaved=interleaved, inverse=conjugate)

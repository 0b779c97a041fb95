"""Hashes of token n-grams into rows of a table."""

from __future__ import annotations

import torch
from torch import Tensor


def table_offsets(sizes: Tensor) -> Tensor:
    """Where each part of a layer's table starts.

    Args:
        sizes: int32 ``[L, g-1, t]``, rows of each part.

    Returns:
        int32 ``[L, (g-1) t]``, the sum of the sizes before.
    """
    flat = sizes.flatten(1)
    return (flat.cumsum(1) - flat).to(torch.int32)


def ngram_rows(tokens: Tensor, multipliers: Tensor, sizes: Tensor, offsets: Tensor) -> Tensor:
    """Rows of every n-gram that ends at a token.

    ``h_0 = id_0 m_0``, ``h_i = h_{i-1} xor id_i m_i`` in wrapping 64-bit arithmetic; n-gram ``i``
    reads row ``h_i mod size`` (not negative) of each of its parts.

    Args:
        tokens: int32 ``[T, g]``, the token and those before it.
        multipliers: int64 ``[L, g]``.
        sizes: int32 ``[L, g-1, t]``.
        offsets: int32 ``[L, (g-1) t]``.

    Returns:
        int32 ``[L, T, (g-1) t]``.
    """
    mixed = tokens.to(torch.int64)[None] * multipliers[:, None]
    hashed = mixed[..., 0]
    columns = []
    for n in range(1, tokens.shape[1]):
        hashed = hashed ^ mixed[..., n]
        size = sizes[:, None, n - 1].to(torch.int64)
        columns.append(torch.remainder(hashed[..., None], size))
    rows = torch.cat(columns, dim=-1) + offsets[:, None].to(torch.int64)
    return rows.to(torch.int32)

"""Multi-query attention over listed keys that are their own values, with statistics and a sink."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deepinfer_neuron.checkpoint.formats import dequantize_fp8_rows
from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops.arithmetic import Arithmetic
from deepinfer_neuron.ops.quant import q4_cache_values

Keys = Callable[[Tensor], Tensor]
"""int64 indices ``[n, w]``, all of them valid, to keys ``[n, w, D]``."""

_WORKSPACE_ELEMENTS = 1 << 22
"""Gathered keys alive at once: 16 MiB of fp32."""

_WIDTH = 512
_FP8_RECORD = _WIDTH + _WIDTH // 32
_FP4_RECORD = _WIDTH // 2 + _WIDTH // 16


def slot_attention(
    query: Tensor,
    sources: Sequence[tuple[Keys, Tensor]],
    sink: Tensor | None,
    scale: float,
    arithmetic: Arithmetic,
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax attention of every row over the keys of all its sources.

    With ``s = scale q.k``: ``lse = log sum e^s`` (natural), ``out = sum softmax(s) k``. A sink
    multiplies ``out`` by ``e^lse / (e^lse + e^sink)``. A row without keys gives ``out`` 0, ``lse``
    +inf and maximum -inf. A key that is listed twice counts twice.

    Args:
        query: bf16 ``[n, H, D]``.
        sources: keys, and int64 indices ``[n, w]`` into them; negative ones are absent.
        sink: fp32 ``[H]`` or ``None``; -inf has no effect, +inf gives 0.
        scale: of the scores.
        arithmetic: order of the sums.

    Returns:
        bf16 ``[n, H, D]``, fp32 maxima ``[n, H]``, fp32 ``lse`` ``[n, H]``.
    """
    width = sum(index.shape[1] for _, index in sources)
    step = max(1, _WORKSPACE_ELEMENTS // max(1, width * query.shape[2]))
    if query.shape[0] > step:
        results = []
        for start in range(0, query.shape[0], step):
            rows = slice(start, start + step)
            part = [(keys, index[rows]) for keys, index in sources]
            results.append(slot_attention(query[rows], part, sink, scale, arithmetic))
        out, top, lse = (torch.cat(column) for column in zip(*results, strict=True))
        return out, top, lse
    order = arithmetic.order
    gathered = [keys(index.clamp(min=0)).to(torch.float32) for keys, index in sources]
    values = torch.cat(gathered, dim=1)
    absent = torch.cat([index < 0 for _, index in sources], dim=1)
    # What stands in for an absent key may be anything; times a share of zero it must stay zero.
    values = values.masked_fill(absent[..., None], 0.0)
    scores = (order.matmul(query, values) * scale).masked_fill(absent[:, None], -math.inf)
    nothing = scores.new_full((*scores.shape[:2], 1), -math.inf)
    top = torch.cat((scores, nothing), dim=2).amax(dim=2)
    share = order.exp(scores - top.clamp(min=torch.finfo(torch.float32).min)[..., None])
    total = order.sum(share)
    none = total == 0
    lse = (top + total.log()).masked_fill(none, math.inf)
    weight = total.masked_fill(none, 1.0).reciprocal()
    if sink is not None:
        weight = weight / (1.0 + order.exp(sink.to(torch.float32) - lse))
    out = order.weighted_sum(share, values) * weight[..., None]
    return out.masked_fill(none[..., None], 0.0).to(torch.bfloat16), top, lse


def row_keys(table: Tensor) -> Keys:
    """Keys that lie in a matrix ``[K, D]``."""

    def keys(index: Tensor) -> Tensor:
        if table.shape[0] == 0:
            return table.new_zeros(*index.shape, table.shape[1])
        return table[index]

    return keys


def record_keys(cache: Tensor) -> Keys:
    """Keys of a paged cache, by slot ``page * size + offset``, decoded to bf16.

    Args:
        cache: uint8 ``[pages, size, 1, 528]`` (e4m3, a ue8m0 scale per 32) or ``[..., 288]``
            (e2m1, an e4m3 scale per 16); the record of a token is its data, then its scales.
            Any strides but that of the last axis.

    Raises:
        ConfigError: records of another size.
    """
    pages, size, _, record = cache.shape
    if record not in (_FP8_RECORD, _FP4_RECORD):
        raise ConfigError(
            f"a key cache of {record} bytes per token is not known; use {_FP8_RECORD} (e4m3) or "
            f"{_FP4_RECORD} (e2m1)."
        )

    def keys(index: Tensor) -> Tensor:
        if pages * size == 0:
            return cache.new_zeros(*index.shape, _WIDTH, dtype=torch.bfloat16)
        rows = cache[index // size, index % size, 0]
        if record == _FP8_RECORD:
            return dequantize_fp8_rows(rows[..., :_WIDTH], rows[..., _WIDTH:])
        return q4_cache_values(rows[..., : _WIDTH // 2], rows[..., _WIDTH // 2 :])

    return keys


def present(index: Tensor, lengths: Tensor | None, limit: int) -> Tensor:
    """Indices with everything that does not count turned into -1.

    Args:
        index: integers ``[n, w]``.
        lengths: only the first ``lengths[r]`` entries of row ``r`` count, or ``None`` for all.
        limit: indices must lie in ``[0, limit)``.

    Returns:
        int64 ``[n, w]``.
    """
    wide = index.to(torch.int64)
    absent = (wide < 0) | (wide >= limit)
    if lengths is not None:
        column = torch.arange(index.shape[1], device=index.device)
        absent = absent | (column >= lengths[:, None])
    return wide.masked_fill(absent, -1)

"""Scores of index keys: dense, paged, and restricted to candidate blocks.

All forms compute in fixed order, so the same query and key score the same bits in each of them.
Columns without a key hold 0; callers must not use them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_neuron.compat.vendor.operands import Scaled, require, shape
from deepinfer_neuron.ops.arithmetic import fixed_arithmetic
from deepinfer_neuron.ops.index_logits import head_scores, index_values, paged_keys

_GATHERED_ELEMENTS = 1 << 22
"""Numbers of gathered keys alive at once: 16 MiB of fp32."""

_ORDER = fixed_arithmetic()


@dataclass(frozen=True)
class DenseSchedule:
    """What the dense paged form is given back; it needs no plan.

    Attributes:
        lengths: keys of every row.
    """

    lengths: Tensor


@dataclass(frozen=True)
class SparseSchedule:
    """Candidate blocks of keys that lie in one matrix.

    Attributes:
        starts: int64 ``[Q]``, first key of a row.
        ends: int64 ``[Q]``, end of its keys.
        blocks: int64 ``[Q, NB]``, numbers of blocks counted from key 0.
    """

    starts: Tensor
    ends: Tensor
    blocks: Tensor


@dataclass(frozen=True)
class PagedSparseSchedule:
    """Candidate blocks of keys behind a block table.

    Attributes:
        lengths: int64 ``[Q]``, keys of a row.
        tables: integers ``[Q, pages]``.
        blocks: int64 ``[Q, NB]``, numbers of blocks counted from the row's key 0.
    """

    lengths: Tensor
    tables: Tensor
    blocks: Tensor


def _query(q: Scaled, weights: Tensor) -> Tensor:
    """fp32 ``[Q, H, 128]`` of a query with or without an axis of length 1 behind the first."""
    codes, scale = q
    if codes.dim() == 4:
        codes, scale = codes[:, 0], scale[:, 0]
    require(
        weights.shape == codes.shape[:2],
        f"index weights are {shape(weights)} for queries {shape(codes)}; give one per query and "
        "head.",
    )
    return index_values(codes, scale)


def fp8_fp4_mqa_logits(
    q: Scaled, kv: Scaled, weights: Tensor, ks: Tensor, ke: Tensor, max_seqlen_k: int
) -> Tensor:
    """Scores of every query with the keys ``ks <= n < ke``.

    Args:
        q: int8 ``[Q, H, 64]`` or e4m3 ``[Q, H, 128]``, and scales int32 ``[Q, H]`` or int16
            ``[Q, H, 2]``.
        kv: int8 ``[K, 64]`` or e4m3 ``[K, 128]``, and scales int32 ``[K]`` or int16 ``[K, 2]``.
        weights: bf16 ``[Q, H]``, rows of any stride.
        ks: int32 ``[Q]``.
        ke: int32 ``[Q]``.
        max_seqlen_k: ``M``, columns of the result.

    Returns:
        bf16 ``[Q, M]``; column ``j`` is key ``ks + j``.
    """
    query, keys = _query(q, weights), index_values(*kv)
    out = torch.zeros(query.shape[0], max_seqlen_k, dtype=torch.bfloat16, device=query.device)
    widths = (ke - ks).clamp(min=0, max=max_seqlen_k)
    for start in torch.unique(ks).tolist():
        rows = torch.nonzero(ks == start)[:, 0]
        width = min(int(widths[rows].max()), max(0, keys.shape[0] - start))
        if width > 0:
            scores = head_scores(query[rows], keys[start : start + width], weights[rows], _ORDER)
            out[rows, :width] = scores
    column = torch.arange(max_seqlen_k, device=out.device)
    return out.masked_fill_(column >= widths[:, None], 0.0)


def get_paged_mqa_logits_metadata(
    klen: Tensor, *plan: int, indices: Tensor | None = None
) -> DenseSchedule:
    """A schedule for :func:`fp8_fp4_paged_mqa_logits`; only the lengths are kept."""
    return DenseSchedule(klen)


def fp8_fp4_paged_mqa_logits(
    q: Scaled,
    kv_cache: Tensor,
    weights: Tensor,
    klen: Tensor,
    block_tables: Tensor,
    metadata: object,
    max_kv_len: int,
    indices: Tensor | None = None,
    use_ascend_kv_layout: bool = False,
) -> Tensor:
    """Scores of every query with the first ``klen`` keys behind its block table.

    Args:
        q: as for :func:`fp8_fp4_mqa_logits`, with an axis of length 1 behind the first.
        kv_cache: uint8 ``[pages, page, 1, 68 or 132]``, any page stride.
        weights: bf16 ``[Q, H]``.
        klen: int32 ``[Q, 1]`` or ``[Q]``.
        block_tables: int32 ``[Q, pages of a row]``.
        metadata: has no effect.
        max_kv_len: ``M``, columns of the result.
        indices: which rows share a request; has no effect.
        use_ascend_kv_layout: only ``False``.

    Returns:
        bf16 ``[Q, M]``; column ``j`` is logical key ``j``.
    """
    require(
        not use_ascend_kv_layout,
        "fp8_fp4_paged_mqa_logits: use_ascend_kv_layout=True is not supported; keep the data of a "
        "page before its scales.",
    )
    query, lengths = _query(q, weights), klen.reshape(-1).to(torch.int64).clamp(max=max_kv_len)
    column = torch.arange(max_kv_len, device=query.device)
    tokens = torch.where(column < lengths[:, None], column, -1)
    return _paged_scores(query, kv_cache, weights, block_tables, tokens)


def _paged_scores(
    query: Tensor, cache: Tensor, weights: Tensor, tables: Tensor, tokens: Tensor
) -> Tensor:
    """Scores of listed logical keys ``[Q, M]``; 0 where the key is negative."""
    out = torch.zeros(tokens.shape, dtype=torch.bfloat16, device=query.device)
    step = max(1, _GATHERED_ELEMENTS // max(1, 128 * tokens.shape[1]))
    for start in range(0, query.shape[0], step):
        rows = slice(start, start + step)
        listed = tokens[rows]
        # Nothing behind the last listed column is gathered.
        used = (listed >= 0).any(0).nonzero()
        if used.numel() == 0:
            continue
        listed = listed[:, : int(used[-1]) + 1]
        keys = paged_keys(cache, tables[rows], listed)
        scores = head_scores(query[rows], keys, weights[rows], _ORDER)
        out[rows, : listed.shape[1]] = scores.masked_fill(listed < 0, 0.0)
    return out


def _listed(blocks: Tensor, block: int, lengths: Tensor) -> Tensor:
    """Keys of candidate blocks, -1 where there is none.

    Args:
        blocks: int64 ``[Q, NB]``, ascending where valid, counted from the row's key 0.
        block: keys per block.
        lengths: int64 ``[Q]``, keys of the row.

    Returns:
        int64 ``[Q, NB * block]``.
    """
    valid = -(-lengths // block)
    place = torch.arange(blocks.shape[1], device=blocks.device)
    offset = torch.arange(block, device=blocks.device)
    keys = blocks[..., None] * block + offset
    absent = (place >= valid[:, None])[..., None] | (keys < 0) | (keys >= lengths[:, None, None])
    return keys.masked_fill(absent, -1).flatten(1)


def _check_blocks(name: str, blocks: Tensor, count: int, block: int) -> None:
    require(
        blocks.dim() == 2 and blocks.shape[1] == count and block >= 1,
        f"{name}: candidate blocks are {shape(blocks)} for {count} blocks of {block} keys; give "
        "as many per row as the call names.",
    )


def get_sparse_mqa_logits_metadata(
    ks: Tensor,
    ke: Tensor,
    num_kv: int,
    absolute_blocks: Tensor,
    q_dtype: torch.dtype,
    block: int,
    use_unaligned_ks: bool = True,
) -> SparseSchedule:
    """A schedule for :func:`fp8_fp4_sparse_mqa_logits`.

    Args:
        ks: int32 ``[Q]``, first key of a row.
        ke: int32 ``[Q]``, end of its keys.
        num_kv: keys there are.
        absolute_blocks: int32 ``[Q, NB]``: candidate block plus ``ks // block``.
        q_dtype: of the queries' data.
        block: keys per block.
        use_unaligned_ks: has no effect: a block starts ``ks % block`` keys late in either case.
    """
    starts = ks.to(torch.int64)
    return SparseSchedule(starts, ke.to(torch.int64).clamp(max=num_kv), absolute_blocks)


def fp8_fp4_sparse_mqa_logits(
    q: Scaled,
    kv: Scaled,
    weights: Tensor,
    metadata: SparseSchedule,
    num_blocks: int,
    block: int,
    use_unaligned_ks: bool = True,
) -> Tensor:
    """Scores of every query with the keys of its candidate blocks.

    Args:
        q: see :func:`fp8_fp4_mqa_logits`.
        kv: see :func:`fp8_fp4_mqa_logits`.
        weights: bf16 ``[Q, H]``.
        metadata: of :func:`get_sparse_mqa_logits_metadata`.
        num_blocks: ``NB``.
        block: keys per block.
        use_unaligned_ks: has no effect.

    Returns:
        bf16 ``[Q, NB * block]``; column ``b * block + o`` is key ``blocks[b] * block + o +
        ks % block``.
    """
    _check_blocks("fp8_fp4_sparse_mqa_logits", metadata.blocks, num_blocks, block)
    query, (codes, scale) = _query(q, weights), kv
    starts = metadata.starts[:, None]
    blocks = metadata.blocks.to(torch.int64) - starts // block
    listed = _listed(blocks, block, metadata.ends - metadata.starts)
    out = torch.zeros(listed.shape, dtype=torch.bfloat16, device=query.device)
    keys = index_values(codes, scale)
    step = max(1, _GATHERED_ELEMENTS // max(1, 128 * listed.shape[1]))
    for start in range(0, query.shape[0] if keys.shape[0] else 0, step):
        rows = slice(start, start + step)
        absent = listed[rows] < 0
        chosen = keys[(listed[rows] + starts[rows]).masked_fill(absent, 0)]
        scores = head_scores(query[rows], chosen, weights[rows], _ORDER)
        out[rows] = scores.masked_fill(absent, 0.0)
    return out


def get_paged_sparse_mqa_logits_metadata(
    klen: Tensor,
    block_tables: Tensor,
    query_indices: Tensor | None,
    page: int,
    candidate_blocks: Tensor,
    q_dtype: torch.dtype,
    block: int,
) -> PagedSparseSchedule:
    """A schedule for :func:`fp8_fp4_paged_sparse_mqa_logits`.

    Args:
        klen: int32 ``[Q]`` or ``[Q, 1]``.
        block_tables: int32 ``[Q, pages of a row]``.
        query_indices: which rows share a request; has no effect.
        page: keys per page, a multiple of ``block``.
        candidate_blocks: int32 ``[Q, NB]``, counted from the row's key 0.
        q_dtype: of the queries' data.
        block: keys per block.
    """
    require(
        page % block == 0,
        f"pages of {page} keys do not hold whole blocks of {block}; use a divisor of the page.",
    )
    return PagedSparseSchedule(klen.reshape(-1).to(torch.int64), block_tables, candidate_blocks)


def fp8_fp4_paged_sparse_mqa_logits(
    q: Scaled,
    kv_cache: Tensor,
    weights: Tensor,
    metadata: PagedSparseSchedule,
    num_blocks: int,
    block: int,
) -> Tensor:
    """Scores of every query with the keys of its candidate blocks behind its block table.

    Args:
        q: see :func:`fp8_fp4_paged_mqa_logits`.
        kv_cache: see :func:`fp8_fp4_paged_mqa_logits`.
        weights: bf16 ``[Q, H]``.
        metadata: of :func:`get_paged_sparse_mqa_logits_metadata`.
        num_blocks: ``NB``.
        block: keys per block.

    Returns:
        bf16 ``[Q, NB * block]``; column ``b * block + o`` is logical key ``cand[b] * block + o``.
    """
    _check_blocks("fp8_fp4_paged_sparse_mqa_logits", metadata.blocks, num_blocks, block)
    tokens = _listed(metadata.blocks.to(torch.int64), block, metadata.lengths)
    return _paged_scores(_query(q, weights), kv_cache, weights, metadata.tables, tokens)

"""Attention over keys listed per row; the keys are the values."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deepinfer_neuron.compat.vendor.operands import arithmetic, require, shape
from deepinfer_neuron.ops.slot_attention import Keys, present, record_keys, row_keys, slot_attention

_WIDTH = 512


@dataclass
class FlashMLASchedMeta:
    """A schedule that callers keep between layers; it stays empty."""


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    d_v: int = _WIDTH,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of every token over the keys whose rows are listed for it.

    Args:
        q: bf16 ``[T, H, 512]``, any number of heads.
        kv: bf16 ``[K, 1, 512]``.
        indices: int32 ``[T, 1, topk]``; negative ones and those from ``K`` on are absent.
        sm_scale: of the scores.
        attn_sink: fp32 ``[H]`` or ``None``.
        topk_length: int32 ``[T]``: only so many leading indices count; ``None`` for all.
        d_v: width of the values, only 512.

    Returns:
        bf16 output ``[T, H, 512]``, fp32 largest scores ``[T, H]``, fp32 natural log-sum-exp
        ``[T, H]``. The sink acts on the output only. A row without keys gives 0, -inf and +inf.
    """
    _check("flash_mla_sparse_fwd", q, indices, d_v)
    require(
        kv.dim() == 3 and kv.shape[1] == 1 and kv.shape[2] == q.shape[2],
        f"flash_mla_sparse_fwd: kv is {shape(kv)}; give [K, 1, {q.shape[2]}].",
    )
    listed = present(indices[:, 0], topk_length, kv.shape[0])
    source = (row_keys(kv[:, 0]), listed)
    return slot_attention(q, [source], attn_sink, sm_scale, arithmetic())


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    head_dim_v: int = _WIDTH,
    tile_scheduler_metadata: FlashMLASchedMeta | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = True,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    enable_batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of one token per row over listed slots of one or two paged caches.

    Args:
        q: bf16 ``[T, 1, H, 512]``.
        k_cache: uint8 ``[pages, size, 1, 528 or 288]``, any strides but the last.
        block_table: has no effect, nor has ``cache_seqlens``.
        head_dim_v: only 512.
        tile_scheduler_metadata: has no effect; one may serve many layers.
        softmax_scale: of the scores; ``None`` is ``1 / sqrt(512)``.
        causal: only ``False``.
        is_fp8_kvcache: only ``True``.
        indices: int32 ``[T, 1, topk]``, slots ``page * size + offset``, -1 for none.
        attn_sink: fp32 ``[H]`` or ``None``.
        extra_k_cache: a second cache, ``None`` without one.
        extra_indices_in_kvcache: int32 ``[T, 1, etopk]``, slots of the second cache.
        topk_length: int32 ``[T]``: only so many leading indices count.
        extra_topk_length: the same for the second cache.
        enable_batch_invariant: has no effect; see ``DEEPINFER_BATCH_INVARIANT``.

    Returns:
        bf16 ``[T, 1, H, 512]`` and fp32 natural log-sum-exp ``[T, H, 1]``.
    """
    name = "flash_mla_with_kvcache"
    require(
        not causal and is_fp8_kvcache and indices is not None,
        f"{name}: causal={causal}, is_fp8_kvcache={is_fp8_kvcache} and "
        f"indices={'None' if indices is None else 'given'} is not supported; list slots of a "
        "quantized cache, without a causal mask.",
    )
    assert indices is not None
    require(q.dim() == 4 and q.shape[1] == 1, f"{name}: q is {shape(q)}; give [T, 1, H, 512].")
    require(
        (extra_k_cache is None) == (extra_indices_in_kvcache is None),
        f"{name}: extra_k_cache and extra_indices_in_kvcache belong together; give both or none.",
    )
    _check(name, q[:, 0], indices, head_dim_v)
    sources = [_slots(k_cache, indices, topk_length)]
    if extra_k_cache is not None and extra_indices_in_kvcache is not None:
        sources.append(_slots(extra_k_cache, extra_indices_in_kvcache, extra_topk_length))
    scale = _WIDTH**-0.5 if softmax_scale is None else softmax_scale
    out, _, lse = slot_attention(q[:, 0], sources, attn_sink, scale, arithmetic())
    return out[:, None], lse[..., None]


def _slots(cache: Tensor, indices: Tensor, lengths: Tensor | None) -> tuple[Keys, Tensor]:
    slots = cache.shape[0] * cache.shape[1]
    return record_keys(cache), present(indices[:, 0], lengths, slots)


def _check(name: str, q: Tensor, indices: Tensor, width: int) -> None:
    require(
        q.shape[-1] == width == _WIDTH,
        f"{name}: queries are {shape(q)} with values {width} wide; only 512 is supported.",
    )
    require(
        indices.dim() == 3 and indices.shape[:2] == (q.shape[0], 1),
        f"{name}: indices are {shape(indices)} for {q.shape[0]} rows; give [T, 1, topk].",
    )

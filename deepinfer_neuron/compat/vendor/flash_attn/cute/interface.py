"""Attention over segments of different lengths."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from deepinfer_neuron.compat.vendor.operands import require, shape
from deepinfer_neuron.ops.ragged_attention import ragged_attention

Lengths = Tensor | Sequence[int]
"""Prefix sums ``[n + 1]`` in a tensor, or a plain list of the ends without the leading 0."""


def _flash_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Lengths | None = None,
    cu_seqlens_k: Lengths | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int | None = -1,
    window_size_right: int | None = -1,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, None]:
    """Full attention inside each segment.

    Args:
        q: bf16 ``[T, h, d]``.
        k: bf16 ``[S, h, d]``.
        v: bf16 ``[S, h, d]``.
        cu_seqlens_q: where the segments of ``q`` lie; ``None`` for a single one.
        cu_seqlens_k: the same of ``k`` and ``v``.
        max_seqlen_q: has no effect.
        max_seqlen_k: has no effect.
        softmax_scale: ``None`` is ``1 / sqrt(d)``.
        causal: only ``False``.
        window_size_left: only no window, -1 or ``None``.
        window_size_right: only no window.
        num_splits: has no effect.
        pack_gqa: has no effect.
        return_lse: only ``False``.

    Returns:
        type of ``q`` ``[T, h, d]``, and ``None``.
    """
    windows = (window_size_left, window_size_right)
    require(
        not causal and not return_lse and all(size in (None, -1) for size in windows),
        f"_flash_attn_fwd: causal={causal}, window={windows}, return_lse={return_lse} is not "
        "supported; use full attention without statistics.",
    )
    require(
        q.dim() == 3 and k.shape == v.shape and k.shape[1:] == q.shape[1:],
        f"_flash_attn_fwd: q is {shape(q)}, k {shape(k)}, v {shape(v)}; give [tokens, heads, "
        "width] with equal heads and widths.",
    )
    ends_q, ends_k = _ends(cu_seqlens_q, q), _ends(cu_seqlens_k, k)
    return ragged_attention(q, k, v, ends_q, ends_k, softmax_scale), None


def _ends(lengths: Lengths | None, x: Tensor) -> list[int]:
    """Where each segment ends."""
    if lengths is None:
        return [x.shape[0]]
    if isinstance(lengths, Tensor):
        return [int(end) for end in lengths.tolist()[1:]]
    return list(lengths)

"""Hashes of n-grams and the gate of what they read."""

from __future__ import annotations

from torch import Tensor

from deepinfer_neuron.compat.vendor.operands import arithmetic, require, shape
from deepinfer_neuron.ops.engram import engram_update
from deepinfer_neuron.ops.ngram_hash import ngram_rows

__all__ = ["engram_gate_fwd", "engram_hash", "fused_weight"]


def engram_hash(
    ngram_token_ids: Tensor,
    multipliers: Tensor,
    vocab_sizes: Tensor,
    offsets: Tensor,
    image_token_mask: Tensor | None = None,
) -> Tensor:
    """Table rows of every n-gram that ends at a token.

    Args:
        ngram_token_ids: int32 ``[T, g]``.
        multipliers: int64 ``[L, g]``.
        vocab_sizes: int32 ``[L, g-1, t]``.
        offsets: int32 ``[L, (g-1) t]``.
        image_token_mask: bool ``[T]``; tokens that are true get -1.

    Returns:
        int32 ``[L, T, (g-1) t]``.
    """
    rows = ngram_rows(ngram_token_ids, multipliers, vocab_sizes, offsets)
    if image_token_mask is not None:
        rows.masked_fill_(image_token_mask[None, :, None], -1)
    return rows


def fused_weight(weight_hidden: Tensor, weight_embed: Tensor) -> Tensor:
    """fp32 product of two weights ``[hc, H]``."""
    return weight_hidden.float() * weight_embed.float()


def engram_gate_fwd(
    hidden_states: Tensor,
    kv: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    save_for_backward: bool = False,
    image_token_mask: Tensor | None = None,
    inplace: bool = True,
) -> tuple[Tensor, None, None, None, None]:
    """Add what was read to every stream, through a gate.

    Args:
        hidden_states: bf16 ``[T, hc, H]``.
        kv: bf16 ``[T, hc + 1, H]``: a key per stream, then the value.
        weight_fused: fp32 ``[hc, H]``.
        eps: of both norms.
        clamp_value: least magnitude under the root of the gate.
        save_for_backward: only ``False``.
        image_token_mask: bool ``[T]``; tokens that are true stay as they are.
        inplace: write the result into ``hidden_states``.

    Returns:
        bf16 ``[T, hc, H]``, and ``None`` for each of four intermediates.
    """
    require(
        not save_for_backward,
        "engram_gate_fwd: save_for_backward=True is not supported; leave it out.",
    )
    tokens, streams, width = hidden_states.shape
    require(
        kv.shape == (tokens, streams + 1, width) and weight_fused.shape == (streams, width),
        f"engram_gate_fwd: hidden states are {shape(hidden_states)}, kv {shape(kv)} and the weight "
        f"{shape(weight_fused)}; give [T, hc, H], [T, hc + 1, H] and [hc, H].",
    )
    out = engram_update(hidden_states, kv, weight_fused, eps, arithmetic(), clamp_value)
    if image_token_mask is not None:
        out = hidden_states.where(image_token_mask[:, None, None], out)
    if inplace:
        out = hidden_states.copy_(out)
    return out, None, None, None, None

"""The router with its matrix product, and the whole expert layer of one rank in one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer_neuron.compat.vendor.knobs import KNOBS
from deepinfer_neuron.compat.vendor.operands import (
    Scaled,
    arithmetic,
    check_product,
    operand,
    require,
    shape,
)
from deepinfer_neuron.compat.vendor.tile_kernels.moe import moe_topk_gate
from deepinfer_neuron.compat.vendor.tile_kernels.quant import swiglu_forward_and_per_token_cast
from deepinfer_neuron.errors import PlatformError
from deepinfer_neuron.ops.grouped_gemm import expert_rows, gemm, grouped_gemm
from deepinfer_neuron.ops.linear import linear_fp32
from deepinfer_neuron.ops.scale_layout import word_bytes

Weight = Tensor | Scaled
"""bf16 weights, or quantized ones with their scales."""

_MMA_TYPES = ("fp8xfp4", "fp8xfp8", "bf16xbf16")
_BLOCK_M = 128


def bf16_mega_gate(
    x: Tensor,
    weight: Tensor,
    num_topk: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    scoring_func: str = "sqrtsoftplus",
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    image_bias: Tensor | None = None,
    image_token_mask: Tensor | None = None,
    fix_routing_mask: Tensor | None = None,
    to_physical_map: Tensor | None = None,
    logical_count: Tensor | None = None,
    unmapped_topk_idx: Tensor | None = None,
    force_random: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """``tile_kernels.moe.moe_topk_gate`` of the fp32 logits ``x weight^T``.

    Args:
        x: bf16 ``[T, H]``.
        weight: bf16 or fp32 ``[E, H]``.

    The other arguments and the result are those of the gate.
    """
    logits = linear_fp32(x, weight, arithmetic())
    return moe_topk_gate(
        logits,
        num_topk,
        use_shared_as_routed,
        num_shared_experts,
        routed_scaling_factor,
        ep_rank,
        scoring_func,
        mask,
        bias,
        image_bias,
        image_token_mask,
        fix_routing_mask,
        to_physical_map,
        logical_count,
        unmapped_topk_idx,
        force_random,
        out,
    )


def transform_weights_for_mega_moe(l1: Weight, l2: Weight) -> tuple[Weight, Weight]:
    """The weights as they are: rows of ``l1`` are all gates, then all ups."""
    return l1, l2


def get_block_m_for_mega_moe(
    num_ranks: int,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_tokens: int,
    num_topk: int,
    mma_type: str,
) -> int:
    """Rows of a block in the shared scale layout; the same for every size."""
    return _BLOCK_M


class SymmBuffer:
    """Where the caller of the fused layer puts tokens and routing.

    Attributes:
        buffer: uint8, all of the storage.
        num_max_tokens_per_rank: rows of the views.
        x: e4m3 or bf16 ``[rows, hidden]``.
        x_sf: packed scales ``[rows, hidden / 32 / n]``, or ``None`` for bf16.
        topk_idx: int64 ``[rows, k]``.
        topk_weights: fp32 ``[rows, k]``.
        shared_l1_acts_sf: ``None``: the shared experts read ``x_sf``.
    """

    def __init__(
        self,
        group: Any,
        num_experts: int,
        num_max_tokens_per_rank: int,
        num_topk: int,
        hidden: int,
        intermediate_hidden: int,
        num_shared_experts: int = 0,
        mma_type: str = "fp8xfp4",
        activation: str = "swiglu",
        base: SymmBuffer | None = None,
    ) -> None:
        """Allocate the views, or lay them over the storage of ``base``.

        Raises:
            ConfigError: an unknown type or activation, or a ``base`` that is too small.
            PlatformError: the group has more than one rank.
        """
        require(
            mma_type in _MMA_TYPES and activation == "swiglu",
            f"SymmBuffer: mma_type={mma_type!r} with activation={activation!r} is not supported; "
            f"use one of {', '.join(_MMA_TYPES)} with 'swiglu'.",
        )
        if group is not None and group.size() != 1:
            raise PlatformError(
                f"the fused expert layer got a group of {group.size()} ranks; it runs on one, use "
                "dispatch and combine around the grouped products."
            )
        self.num_experts = num_experts
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        quantized = mma_type != "bf16xbf16"
        data = torch.float8_e4m3fn if quantized else torch.bfloat16
        words = hidden // 32 // KNOBS.per_word() if quantized else 0
        layout = [
            (data, hidden),
            (KNOBS.scale_word, words),
            (torch.int64, num_topk),
            (torch.float32, num_topk),
        ]
        sizes = [num_max_tokens_per_rank * width * kind.itemsize for kind, width in layout]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // 32) * 32)
        storage = torch.zeros(starts[-1], dtype=torch.uint8) if base is None else base.buffer
        require(
            storage.numel() >= starts[-1],
            f"SymmBuffer: {starts[-1]} bytes are needed and the base has {storage.numel()}; create "
            "the largest buffer first.",
        )
        self.buffer: Tensor = storage
        views = [
            storage[start : start + size].view(kind).view(num_max_tokens_per_rank, width)
            for start, size, (kind, width) in zip(starts, sizes, layout, strict=False)
        ]
        self.x, sf, self.topk_idx, self.topk_weights = views
        self.x_sf = sf if quantized else None
        self.shared_l1_acts_sf: Tensor | None = None

    def destroy(self) -> None:
        """Let go of the storage."""
        self.buffer = self.buffer.new_empty(0)
        self.x = self.topk_idx = self.topk_weights = self.buffer
        self.x_sf = None


@dataclass(frozen=True)
class _Layer:
    """Weights and activation: of all experts, or of the one that every token passes."""

    l1: Weight
    l2: Weight
    clamp: float | None

    def run(self, x: Weight, ends: Tensor | None, share: Tensor | None) -> Tensor:
        """Outputs bf16 ``[N, hidden]`` of rows sorted by expert, each times its ``share``."""
        plain = isinstance(x, Tensor)
        inner = swiglu_forward_and_per_token_cast(
            _multiply(x, self.l1, ends),
            "bf16" if plain else "e4m3",
            None if plain else 32,
            topk_weights=share,
            clamp_value=self.clamp,
            use_tma_aligned_col_major_sf=not plain,
            round_sf=not plain,
            use_packed_ue8m0=not plain,
        )
        return _multiply(inner, self.l2, ends)


def _multiply(x: Weight, weight: Weight, ends: Tensor | None) -> Tensor:
    """bf16 product of all rows, or of each expert's rows where ``ends`` says they end."""
    left, right = operand(x), operand(weight)
    out = torch.zeros(left.rows, right.rows, dtype=torch.bfloat16, device=left.codes.device)
    check_product("mega_moe", left, right, out)
    if ends is None:
        gemm(left, right, out, None, arithmetic())
    else:
        grouped_gemm(left, right, out, expert_rows(ends, 1, left.rows), arithmetic())
    return out


def _mega_moe(
    y: Tensor, layer: _Layer, shared: _Layer | None, buffer: SymmBuffer, stats: Tensor | None
) -> None:
    """Sort rows by expert, run the experts, add their outputs in slot order."""
    tokens, slots = y.shape[0], buffer.topk_idx.shape[1]
    flat = buffer.topk_idx[:tokens].reshape(-1)
    # Positions ``token * slots + slot`` that chose an expert, by expert, then by token.
    taken = torch.nonzero(flat >= 0)[:, 0]
    taken = taken[torch.sort(flat[taken], stable=True).indices]
    counts = torch.bincount(flat[taken], minlength=buffer.num_experts)
    x, sf = buffer.x[:tokens], None if buffer.x_sf is None else buffer.x_sf[:tokens]
    source = taken // slots
    chosen: Weight = _rows(x, source) if sf is None else (_rows(x, source), _rows(sf, source))
    share = buffer.topk_weights[:tokens].reshape(-1)[taken]
    results = layer.run(chosen, counts.cumsum(0), share)
    if stats is not None:
        stats += counts.to(stats.dtype)
    out = torch.zeros(y.shape, dtype=torch.float32, device=y.device)
    if shared is not None:
        out += shared.run(x if sf is None else (x, sf), None, None).to(torch.float32)
    row = torch.full_like(flat, -1)
    row[taken] = torch.arange(taken.numel(), device=flat.device)
    for column in row.view(tokens, slots).unbind(1):
        has = column >= 0
        out[has] += results[column[has]].to(torch.float32)
    y.copy_(out)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows of a matrix, moved as bytes: not every type of data can be indexed."""
    chosen = word_bytes(x)[index]
    return chosen.view(x.dtype)


def fp8_fp4_mega_moe(
    y: Tensor,
    l1: Weight,
    l2: Weight,
    sym_buffer: SymmBuffer,
    shared_l1_weights: Weight | None = None,
    shared_l2_weights: Weight | None = None,
    cumulative_local_expert_recv_stats: Tensor | None = None,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
) -> None:
    """The expert layer of one rank, equal bit for bit to its parts called one by one.

    Rows are sorted by expert; first product to bf16; SwiGLU times the routing weight, quantized;
    second product to bf16; per token the shared output plus the slots in order, in fp32, rounded
    once.

    Args:
        y: bf16 ``[T, hidden]``, written in place; the first ``T`` rows of the buffer are read.
        l1: e4m3 ``[E, 2F, hidden]`` or int8 ``[E, 2F, hidden/2]``, gates first, and scales.
        l2: e4m3 ``[E, hidden, F]`` or int8 ``[E, hidden, F/2]``, and scales.
        sym_buffer: tokens and routing; an index of -1 is skipped.
        shared_l1_weights: as ``l1`` without the first axis, or ``None``.
        shared_l2_weights: as ``l2`` without the first axis, or ``None``.
        cumulative_local_expert_recv_stats: int32 ``[E]``; tokens of each expert are added.
        activation: only ``"swiglu"``.
        activation_clamp: limit of gate (above) and up (both sides), or ``None``.
        fast_math: has no effect.
    """
    require(
        activation == "swiglu",
        f"fp8_fp4_mega_moe: activation={activation!r} is not supported; use 'swiglu'.",
    )
    require(
        y.dim() == 2 and y.shape[0] <= sym_buffer.num_max_tokens_per_rank,
        f"fp8_fp4_mega_moe: y is {shape(y)}, the buffer holds "
        f"{sym_buffer.num_max_tokens_per_rank} tokens; use a larger buffer.",
    )
    clamp = activation_clamp
    shared = None
    if shared_l1_weights is not None and shared_l2_weights is not None:
        shared = _Layer(shared_l1_weights, shared_l2_weights, clamp)
    layer = _Layer(l1, l2, clamp)
    _mega_moe(y, layer, shared, sym_buffer, cumulative_local_expert_recv_stats)


def bf16_mega_moe(
    y: Tensor,
    l1: Tensor,
    l2: Tensor,
    sym_buffer: SymmBuffer,
    shared_l1_weights: Tensor | None = None,
    shared_l2_weights: Tensor | None = None,
    cumulative_local_expert_recv_stats: Tensor | None = None,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
) -> None:
    """:func:`fp8_fp4_mega_moe` with bf16 weights and a bf16 buffer; SwiGLU is rounded to bf16."""
    fp8_fp4_mega_moe(
        y,
        l1,
        l2,
        sym_buffer,
        shared_l1_weights,
        shared_l2_weights,
        cumulative_local_expert_recv_stats,
        activation,
        activation_clamp,
        fast_math,
    )

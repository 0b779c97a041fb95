"""The gated activation, alone or with the cast behind it."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_neuron.compat.vendor.knobs import KNOBS
from deepinfer_neuron.compat.vendor.operands import Scaled, arithmetic, require, shape
from deepinfer_neuron.compat.vendor.tile_kernels.quant.rows import per_token_cast
from deepinfer_neuron.compat.vendor.tile_kernels.torch.casting import checked_format
from deepinfer_neuron.ops.grouped_gemm import expert_rows
from deepinfer_neuron.ops.moe import gated


def swiglu_forward(x: Tensor, fmt: str) -> Tensor:
    """``silu(gate) * up`` in fp32, rounded once.

    Args:
        x: bf16 or fp32 ``[N, 2F]``, gates first.
        fmt: ``"bf16"`` or ``"fp32"``.

    Returns:
        ``[N, F]``.
    """
    checked_format(fmt, ("bf16", "fp32"))
    gate, up = x.chunk(2, dim=1)
    out = gated(gate, up, None, None, arithmetic())
    return out.to(torch.bfloat16) if fmt == "bf16" else out


def swiglu_forward_and_per_token_cast(
    x: Tensor,
    fmt: str,
    num_per_channels: int | None,
    psum_num_tokens_per_expert: Tensor | None = None,
    topk_weights: Tensor | None = None,
    clamp_value: float | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> Tensor | Scaled:
    """``silu(min(gate, c)) * clamp(up, -c, c) * weight`` in fp32, then the cast.

    Args:
        x: bf16 or fp32 ``[N, 2F]``, gates first.
        fmt: ``"e4m3"``, quantized from fp32; or ``"bf16"``.
        num_per_channels: columns that share a scale, ``None`` for bf16.
        psum_num_tokens_per_expert: int32 ``[E]``, ends of the experts' rows, starts being aligned
            to the token alignment; rows between are neither read nor written (they hold 0).
        topk_weights: fp32 ``[N]``, a factor per row.
        clamp_value: ``c``, or ``None``.
        use_tma_aligned_col_major_sf: lay scales out by columns.
        round_sf: round scales up to powers of two.
        use_packed_ue8m0: pack the scales' exponents into words.

    Returns:
        e4m3 ``[N, F]`` and scales, or bf16 ``[N, F]``.
    """
    checked_format(fmt, ("e4m3", "bf16"))
    require(
        x.dim() == 2 and x.shape[1] % 2 == 0 and (fmt == "bf16") == (num_per_channels is None),
        f"swiglu_forward_and_per_token_cast: x is {shape(x)} with fmt={fmt!r} and "
        f"num_per_channels={num_per_channels}; give gates and ups side by side, and a group width "
        "for e4m3 alone.",
    )
    if psum_num_tokens_per_expert is None:
        rows = torch.arange(x.shape[0], device=x.device)
    else:
        parts = expert_rows(psum_num_tokens_per_expert, KNOBS.token_alignment, x.shape[0])
        spans = [torch.arange(part.start, part.stop) for part in parts]
        rows = torch.cat([*spans, torch.arange(0)]).to(x.device)
    share = None if topk_weights is None else topk_weights[rows, None]
    wide = torch.zeros(x.shape[0], x.shape[1] // 2, dtype=torch.float32, device=x.device)
    gate, up = x[rows].chunk(2, dim=1)
    wide[rows] = gated(gate, up, share, clamp_value, arithmetic())
    if num_per_channels is None:
        return wide.to(torch.bfloat16)
    return per_token_cast(
        wide,
        fmt,
        num_per_channels,
        use_tma_aligned_col_major_sf=use_tma_aligned_col_major_sf,
        round_sf=round_sf,
        use_packed_ue8m0=use_packed_ue8m0,
    )

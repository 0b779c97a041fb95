"""RMS norm with residual, scale and cast."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops.arithmetic import Arithmetic, FreeOrder
from deepinfer_neuron.ops.norm import rms_norm
from deepinfer_neuron.ops.record_cast import GroupFormat, encode_rows

_WORKSPACE_ELEMENTS = 1 << 19
"""Elements normalized at once, so that intermediates stay in cache."""


def normalized(z: Tensor, weight: Tensor, eps: float, out_scale: float = 1.0) -> Tensor:
    """Norm of bf16 or fp32 ``[..., N]``, rounded once, in the same dtype."""
    arithmetic = Arithmetic(FreeOrder(), rounding=z.dtype == torch.bfloat16)
    scaled = weight if out_scale == 1.0 else weight.to(torch.float32) * out_scale
    return rms_norm(z, scaled, eps, arithmetic)


def write_scales(out: Tensor, scale: Tensor) -> None:
    """Write scales ``[..., G]`` to fp32 ``[..., G]``, or to bytes of words with padding behind.

    ``out`` is ``[..., >= G]``, or ``[..., words, bytes]`` with strides that cannot be flattened.
    """
    if out.dim() == scale.dim():
        out[..., : scale.shape[-1]] = scale
        out[..., scale.shape[-1] :] = 0
    else:
        words, width = out.shape[-2:]
        padded = F.pad(scale, (0, words * width - scale.shape[-1]))
        out.copy_(padded.unflatten(-1, (words, width)))


@dataclass(frozen=True)
class _Norm:
    """The kernel of one variant."""

    eps: float
    out_scale: float
    has_residual: bool
    keeps_origin: bool
    cast: GroupFormat | None

    def __call__(
        self,
        x: Tensor,
        y: Tensor,
        weight: Tensor,
        residual: Tensor,
        residual_out: Tensor,
        sf: Tensor,
        extra_sf: Tensor,
        y_origin: Tensor,
    ) -> None:
        # A slice along the longer of the two row axes needs no copy, whatever the strides.
        axis = 0 if x.shape[0] > x.shape[1] else 1
        step = max(1, _WORKSPACE_ELEMENTS // max(1, x.shape[2] * x.shape[1 - axis]))
        for start in range(0, x.shape[axis], step):
            size = min(step, x.shape[axis] - start)
            z = x.narrow(axis, start, size)
            if self.has_residual:
                z = z + residual.narrow(axis, start, size)
                residual_out.narrow(axis, start, size).copy_(z)
            out = normalized(z, weight, self.eps, self.out_scale)
            if self.keeps_origin:
                y_origin.narrow(axis, start, size).copy_(out)
            if self.cast is None:
                y.narrow(axis, start, size).copy_(out)
            else:
                codes, scales = encode_rows(out, self.cast)
                y.narrow(axis, start, size).view(torch.uint8).copy_(codes)
                write_scales(sf.narrow(axis, start, size), scales)


@cache
def norm_tl(
    hidden_size: int,
    dtype: str,
    return_dtype: Hashable,
    reduce_dtype: str = "float",
    has_residual: bool = False,
    eps: float = 1e-6,
    out_scale: float = 1.0,
    do_fp8_cast: bool = False,
    num_per_channels: int = 0,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    return_origin_out: bool = False,
    xdim: int = 3,
    shared_sf_block_m: int = 0,
    x_stride_s: int = 0,
    y_stride_s: int = 0,
    residual_stride_s: int = 0,
    residual_out_stride_s: int = 0,
    y_origin_stride_s: int = 0,
    sf_stride_s: int = 0,
) -> Callable[..., None]:
    """``x * rsqrt(mean(x^2) + eps) * weight * out_scale``, after adding a residual if there is one.

    The sum with the residual is rounded to the dtype of ``x`` first; a cast works on the rounded
    result. Types, dimensions and strides describe the tensors for device kernels.

    Kernel: ``x [B, M, N]``, ``-> y [B, M, N]``, ``weight [N]``, ``residual``,
    ``-> residual_out``, ``-> sf``, ``-> extra_sf``, ``-> y_origin``; any tensor may stand in for
    one that the flags leave out. ``sf`` is fp32 ``[B, M, G]``, or packed bytes, u8 ``[B, M, G]`` or
    ``[B, M, words, bytes]``. There is no second scale buffer.
    """
    if reduce_dtype not in ("float", "float32") or dtype not in ("bfloat16", "float", "float32"):
        raise ConfigError(
            f"norm: {dtype} reduced in {reduce_dtype}; inputs are bfloat16 or float, sums float"
        )
    if shared_sf_block_m:
        raise ConfigError("norm: there is no shared scale buffer; give shared_sf_block_m=0")
    if do_fp8_cast and (num_per_channels < 1 or hidden_size % num_per_channels):
        raise ConfigError(
            f"norm: groups of {num_per_channels} do not divide a hidden size of {hidden_size}"
        )
    fmt = None
    if do_fp8_cast:
        scale = "ue8m0" if use_packed_ue8m0 else "fp32"
        fmt = GroupFormat("e4m3", num_per_channels, scale, round_sf or use_packed_ue8m0)
    return _Norm(eps, out_scale, has_residual, return_origin_out, fmt)

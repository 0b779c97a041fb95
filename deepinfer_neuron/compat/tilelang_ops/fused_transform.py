"""Norm, rotation, Hadamard transform, cast and cache store in one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from deepinfer_neuron.compat.tilelang_ops.cache_layout import CacheLayout, layout_format
from deepinfer_neuron.compat.tilelang_ops.kv_cache import store_codes, stored_rows
from deepinfer_neuron.compat.tilelang_ops.norm import normalized, write_scales
from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops.kv_pages import write_rows
from deepinfer_neuron.ops.record_cast import GroupFormat, decode_rows, encode_rows
from deepinfer_neuron.ops.transform import hadamard, rotate

_WORKSPACE_ELEMENTS = 1 << 19
"""Channels transformed at once, so that intermediates stay in cache."""


@dataclass(frozen=True)
class _Steps:
    """The steps of one variant; ``None`` leaves one out."""

    norm_eps: float | None
    rope_start: int | None
    halves: bool
    inverse: bool
    hadamard_scale: float | None
    cast: GroupFormat | None
    stage: str

    def __call__(
        self, x: Tensor, weight: Tensor | None, turns: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """The requested bf16 stage, the last bf16 values, and (codes, scales) of the cast."""
        y = x
        if self.norm_eps is not None:
            assert weight is not None
            y = normalized(y, weight, self.norm_eps)
        kept = y
        if self.rope_start is not None:
            assert turns is not None
            y = rotate(y, turns, start=self.rope_start, halves=self.halves, inverse=self.inverse)
        if self.hadamard_scale is not None:
            y = hadamard(y, self.hadamard_scale)
        quantized = None if self.cast is None else encode_rows(y, self.cast)
        if self.stage == "transform":
            kept = y
        elif self.stage == "cast_back":
            assert self.cast is not None
            assert quantized is not None
            kept = decode_rows(*quantized, self.cast)
        return kept, y, quantized


def _cast_format(fmt: str, group: int, round_sf: bool, sf_format: str) -> GroupFormat | None:
    if not fmt:
        return None
    if (sf_format == "ue8m0" and not round_sf) or (sf_format == "e4m3" and round_sf):
        raise ConfigError(f"fused transform: {sf_format} scales and round_sf={round_sf} disagree")
    return GroupFormat(fmt, group, sf_format, round_sf)


def _check(num_heads: int, head_dim: int, steps: _Steps, layout: CacheLayout | None) -> None:
    cast = steps.cast
    if steps.hadamard_scale is not None and head_dim & (head_dim - 1):
        raise ConfigError(f"fused transform: a Hadamard transform of {head_dim} channels")
    if cast is not None and head_dim % cast.group:
        raise ConfigError(f"fused transform: groups of {cast.group} in {head_dim} channels")
    if steps.stage not in ("norm", "transform", "cast_back"):
        raise ConfigError(f"fused transform: no stage {steps.stage!r}")
    if steps.stage == "cast_back" and cast is None:
        raise ConfigError("fused transform: stage cast_back without a cast")
    if layout is not None and (num_heads != 1 or layout_format(layout) != cast):
        raise ConfigError(
            f"fused transform: {num_heads} heads cast to {cast} do not fit a cache of one head "
            f"holding {layout_format(layout)}"
        )


def _scale_view(sf: Tensor) -> Tensor:
    return sf.view(torch.uint8) if sf.dtype == torch.float8_e4m3fn else sf


def _store(
    kv_cache: Tensor,
    slots: Tensor,
    values: Tensor,
    quantized: tuple[Tensor, Tensor] | None,
    layout: CacheLayout,
) -> None:
    rows, where = stored_rows(slots, kv_cache.shape[0] * kv_cache.shape[1])
    if quantized is None:
        write_rows(kv_cache, where, values[:, 0].index_select(0, rows))
    else:
        codes, scale = (part[:, 0].index_select(0, rows) for part in quantized)
        store_codes(kv_cache, where, codes, scale, interleaved=layout.token_interleaved)


@dataclass(frozen=True)
class _Kernel:
    """The kernel of one variant."""

    steps: _Steps
    rows_at_once: int
    return_bf16: bool
    return_quant: bool
    layout: CacheLayout | None

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | None,
        positions: Tensor | None,
        cos_sin: Tensor | None,
        unused: None,
        out_bf16: Tensor | None,
        out_quant: Tensor | None,
        out_sf: Tensor | None,
        kv_cache: Tensor | None,
        slot_mapping: Tensor | None,
    ) -> None:
        for start in range(0, x.shape[0], self.rows_at_once):
            rows = slice(start, start + self.rows_at_once)
            turns = None
            if self.steps.rope_start is not None:
                assert positions is not None
                assert cos_sin is not None
                turns = cos_sin.index_select(0, positions[rows])
            kept, last, quantized = self.steps(x[rows], weight, turns)
            if self.return_bf16:
                assert out_bf16 is not None
                out_bf16[rows] = kept
            if self.return_quant:
                assert out_quant is not None
                assert out_sf is not None
                assert quantized is not None
                out_quant[rows].view(torch.uint8).copy_(quantized[0])
                write_scales(_scale_view(out_sf[rows]), quantized[1])
            if self.layout is not None:
                assert kv_cache is not None
                assert slot_mapping is not None
                _store(kv_cache, slot_mapping[rows], last, quantized, self.layout)


@cache
def fused_norm_rope_hadamard_cast_store_kvcache_tl(
    num_heads: int,
    head_dim: int,
    *,
    do_norm: bool,
    norm_eps: float,
    do_rope: bool,
    rotary_dim: int,
    rope_offset: int,
    positions_dtype: str,
    is_neox: bool,
    conjugate: bool,
    do_hadamard: bool,
    hadamard_scale: float,
    cast_fmt: str,
    num_per_channels: int,
    round_sf: bool,
    sf_format: str,
    return_bf16: bool,
    bf16_stage: str,
    return_quant: bool,
    cache_layout: CacheLayout | None,
    block_size: int,
    small_batch: bool,
) -> Callable[..., None]:
    """Optional steps in this order, each rounding to bf16: norm, rotation, Hadamard, cast, store.

    ``bf16_stage`` says which values ``out_bf16`` gets: after the norm, before the cast, or the
    quantized ones. ``small_batch`` tunes device kernels and changes nothing here.

    Kernel: ``x [n, h, d] bf16``, ``weight [d] bf16``, ``positions [n] i32 | i64``,
    ``cos_sin [rows, rotary_dim] f32``, an unused argument, ``-> out_bf16 [n, h, d]``,
    ``-> out_quant [n, h, d] e4m3`` or ``[n, h, d/2] i8``, ``-> out_sf [n, h, groups]`` (bytes of
    packed words, e4m3 or f32), ``<-> kv_cache [blocks, block_size, bytes] u8``,
    ``slot_mapping [n] i32``. Tensors of steps that are left out may be ``None``.
    """
    steps = _Steps(
        norm_eps if do_norm else None,
        rope_offset if do_rope else None,
        is_neox,
        conjugate,
        hadamard_scale if do_hadamard else None,
        _cast_format(cast_fmt, num_per_channels, round_sf, sf_format),
        bf16_stage if return_bf16 else "transform",
    )
    _check(num_heads, head_dim, steps, cache_layout)
    rows_at_once = max(1, _WORKSPACE_ELEMENTS // (num_heads * head_dim))
    return _Kernel(steps, rows_at_once, return_bf16, return_quant, cache_layout)

"""Context-parallel layout of a prefill."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops.mirror_layout import (
    boundary_ordinals,
    key_ranges,
    mirror_index,
    mirror_places,
    mirror_rows,
)


def _check(name: str, cp_size: int, ratios: tuple[int, ...] = ()) -> None:
    if cp_size < 1 or any(ratio < 1 for ratio in ratios):
        raise ConfigError(f"{name}: cp_size {cp_size} and ratios {ratios} must be positive")


def _lengths(cumulative: Tensor) -> Tensor:
    return cumulative.to(torch.int64).diff()


@cache
def prepare_cp_mirror_tl(cp_size: int, compress_ratios: tuple[int, ...]) -> Callable[..., None]:
    """Token of every local row, gathered row of every token, and key ranges per ratio.

    Kernel, all i32: ``cu_seqlens_q [b+1]``, ``cu_seqlens_k [b+1]``, ``cu_lens`` (scratch, not
    used), ``-> mirror_cp_reverse_index [Q]``, ``-> mirror_cp_index [out]`` (-1 in rows without a
    token), ``-> ks [ratios, out]``, ``-> ke [ratios, out]``, ``cp_rank`` int.
    """
    _check("prepare_cp_mirror", cp_size, compress_ratios)

    def kernel(
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        cu_lens: Tensor,
        mirror_cp_reverse_index: Tensor,
        mirror_cp_index: Tensor,
        ks: Tensor,
        ke: Tensor,
        cp_rank: int,
    ) -> None:
        lengths, key_lengths = _lengths(cu_seqlens_q), _lengths(cu_seqlens_k)
        places = mirror_places(lengths, lengths, cp_size)
        reverse = places.owner * mirror_rows(lengths, cp_size) + places.row
        mirror_cp_reverse_index[: reverse.shape[0]] = reverse
        index = mirror_index(places, cp_rank, mirror_cp_index.shape[0])
        mirror_cp_index.copy_(index)
        first, behind = key_ranges(places, index, lengths, key_lengths, cp_size, compress_ratios)
        ks.copy_(first)
        ke.copy_(behind)

    return kernel


@cache
def yoco_cp_boundary_fused_tl(cp_size: int) -> Callable[..., None]:
    """Rows that a rank contributes of the last tokens of sequences, and where each one arrives.

    Kernel, all i32: ``cu_seqlens_q [b+1]``, ``cu_seqlens_q_c [b+1]`` (of the last tokens),
    ``cu_lens`` (scratch, not used), ``-> contrib_index [pad]`` (-1 behind the rank's rows),
    ``-> gathered_reverse_index [Qc]``, ``cp_rank`` int.
    """
    _check("yoco_cp_boundary_fused", cp_size)

    def kernel(
        cu_seqlens_q: Tensor,
        cu_seqlens_q_c: Tensor,
        cu_lens: Tensor,
        contrib_index: Tensor,
        gathered_reverse_index: Tensor,
        cp_rank: int,
    ) -> None:
        lengths = _lengths(cu_seqlens_q)
        places = mirror_places(lengths, _lengths(cu_seqlens_q_c), cp_size)
        ordinal, order = boundary_ordinals(places, cp_size, mirror_rows(lengths, cp_size))
        reverse = places.owner * contrib_index.shape[0] + ordinal
        gathered_reverse_index[: reverse.shape[0]] = reverse
        mine = order[places.owner[order] == cp_rank]
        contrib_index.fill_(-1)
        contrib_index[: mine.shape[0]] = places.row[mine]

    return kernel

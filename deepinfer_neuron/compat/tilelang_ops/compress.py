"""Compression of keys, with the state that carries unfinished blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from torch import Tensor

from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops.compress_state import (
    Chunk,
    compress_chunk,
    compress_step,
    remember_chunk,
)


def _check_ratio(ratio: int) -> None:
    if ratio not in (1, 2):
        raise ConfigError(f"COMPRESS_RATIO is {ratio}; blocks of 1 or 2 tokens are compressed")


@cache
def compress_and_update_state_prefill_tl(
    DIM: int, COMPRESS_RATIO: int, HAS_INDEX: bool
) -> Callable[..., None]:
    """Compress the blocks that a chunk completes, then keep its last tokens in the state.

    ``HAS_INDEX`` says that tokens are found in ``score`` and ``latent`` through an index.

    Kernel: ``score [R, DIM] f32``, ``latent [R, DIM] f32``,
    ``<-> state_cache [slots, S, 2, DIM] f32``, ``state_block_idx [n] i32``,
    ``compressed_batch_mapping [C] i32``, ``cu_seqlens_q [n+1] i32``, ``cu_seqlens_k [n+1] i32``,
    ``cu_compressed_seqlens_q [n+1] i32``, ``mirror_cp_reverse_index [Q] i32`` (ignored without
    ``HAS_INDEX``), ``-> kv_compressed [C, DIM] bf16``.
    """
    _check_ratio(COMPRESS_RATIO)

    def kernel(
        score: Tensor,
        latent: Tensor,
        state_cache: Tensor,
        state_block_idx: Tensor,
        compressed_batch_mapping: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        cu_compressed_seqlens_q: Tensor,
        mirror_cp_reverse_index: Tensor | None,
        kv_compressed: Tensor,
    ) -> None:
        chunk = Chunk(
            state_block_idx,
            compressed_batch_mapping,
            cu_seqlens_q,
            cu_seqlens_k,
            cu_compressed_seqlens_q,
            mirror_cp_reverse_index if HAS_INDEX else None,
        )
        kv_compressed.copy_(compress_chunk(score, latent, state_cache, chunk, COMPRESS_RATIO))
        remember_chunk(score, latent, state_cache, chunk)

    return kernel


@cache
def compress_and_update_state_decode_tl(DIM: int, COMPRESS_RATIO: int) -> Callable[..., None]:
    """Store one token per row in the state, then compress the blocks that they complete.

    Kernel: ``score [Q, DIM] f32``, ``latent [Q, DIM] f32``,
    ``<-> state_cache [slots, S, 2, DIM] f32``, ``state_block_idx [Q] i32``,
    ``context_lens [Q] i32``, ``-> kv_compressed [Q, DIM] bf16``.
    """
    _check_ratio(COMPRESS_RATIO)

    def kernel(
        score: Tensor,
        latent: Tensor,
        state_cache: Tensor,
        state_block_idx: Tensor,
        context_lens: Tensor,
        kv_compressed: Tensor,
    ) -> None:
        kv_compressed.copy_(
            compress_step(score, latent, state_cache, state_block_idx, context_lens, COMPRESS_RATIO)
        )

    return kernel

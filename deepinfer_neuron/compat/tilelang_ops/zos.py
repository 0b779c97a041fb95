"""Inputs of a step that starts before the host has seen the results of the last one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops.gather import gather_rows
from deepinfer_neuron.ops.packed_rows import (
    carried_rejections,
    carried_tokens,
    cut_history,
    packed_rows,
    token_history,
)

__all__ = ["compute_seqlens_k_zos_tl", "gather_engram_tokens_zos_tl", "gather_input_ids_zos_tl"]


@cache
def gather_input_ids_zos_tl(max_seqlen_q: int) -> Callable[..., None]:
    """Tokens of a step: fresh ones, or what the last step sampled and drafted.

    Kernel, all i32: ``fresh_tokens [ns, max_seqlen_q]``, ``prev_sampled [np]``,
    ``prev_predict [np, max_seqlen_q - 1]``, ``remap [ns]`` (-1 for fresh), ``seqlens_q [ns]``,
    ``cu_seqlens_q [ns]`` (inclusive sums), ``-> input_ids [Q]``.
    """
    _check("gather_input_ids_zos", max_seqlen_q=max_seqlen_q)

    def kernel(
        fresh_tokens: Tensor,
        prev_sampled: Tensor,
        prev_predict: Tensor,
        remap: Tensor,
        seqlens_q: Tensor,
        cu_seqlens_q: Tensor,
        input_ids: Tensor,
    ) -> None:
        if remap.shape[0] == 0:
            return
        tokens = carried_tokens(fresh_tokens, prev_sampled, prev_predict, remap)
        rows = packed_rows(seqlens_q, cu_seqlens_q, input_ids.shape[0])
        flat = rows.sequences * tokens.shape[1] + rows.steps
        input_ids.copy_(tokens.flatten().index_select(0, flat).where(rows.used, input_ids))

    return kernel


@cache
def gather_engram_tokens_zos_tl(
    max_seqlen_q: int, max_ngram_size: int, engram_compressed_pad_token: int, image_sentinel: int
) -> Callable[..., None]:
    """Compressed ids of each row's token and those before it, newest first.

    Kernel, all i32: ``win_compressed [ns, nextn + max_ngram_size - 1]``,
    ``curr_fresh [ns, max_seqlen_q]``, ``prev_sampled [np]``, ``prev_predict [np, nextn]``,
    ``prev_num_accepted [np]``, ``remap [ns]`` (-1 for fresh), ``lookup_table [vocab]``,
    ``seqlens_q [ns]``, ``cu_seqlens_q [ns]`` (inclusive sums), ``-> out [Q, max_ngram_size]``.
    """
    _check("gather_engram_tokens_zos", max_seqlen_q=max_seqlen_q, max_ngram_size=max_ngram_size)

    def kernel(
        win_compressed: Tensor,
        curr_fresh: Tensor,
        prev_sampled: Tensor,
        prev_predict: Tensor,
        prev_num_accepted: Tensor,
        remap: Tensor,
        lookup_table: Tensor,
        seqlens_q: Tensor,
        cu_seqlens_q: Tensor,
        out: Tensor,
    ) -> None:
        if remap.shape[0] == 0:
            return
        current = carried_tokens(
            curr_fresh,
            _compressed(lookup_table, prev_sampled),
            _compressed(lookup_table, prev_predict),
            remap,
        )
        # The window of a fresh sequence leaves the places of the drafts free.
        drafts = prev_predict.shape[1]
        rejected = carried_rejections(remap, prev_num_accepted, drafts, fresh=drafts)
        rows = packed_rows(seqlens_q, cu_seqlens_q, out.shape[0])
        history = token_history(win_compressed, current, rejected, rows, max_ngram_size)
        history = cut_history(history, image_sentinel, engram_compressed_pad_token)
        out.copy_(history.where(rows.used[:, None], out))

    return kernel


@cache
def compute_seqlens_k_zos_tl(nextn: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """Lengths of the sequences after this step, less what the last one rejected.

    Kernel, all i32: ``<-> seqlens_k [ns]``, ``seqlens_q [ns]``, ``remap [ns]`` (-1 for fresh),
    ``prev_num_accepted [np]``.
    """
    if nextn < 0:
        raise ConfigError(f"compute_seqlens_k_zos: nextn is {nextn}, it must not be negative")

    def kernel(
        seqlens_k: Tensor, seqlens_q: Tensor, remap: Tensor, prev_num_accepted: Tensor
    ) -> None:
        rejected = carried_rejections(remap, prev_num_accepted, nextn)
        seqlens_k.add_(seqlens_q - rejected)

    return kernel


def _compressed(table: Tensor, tokens: Tensor) -> Tensor:
    """Compressed ids; anything for ids outside the table, which no valid row refers to."""
    return gather_rows(table[:, None], tokens.to(torch.int64))[..., 0]


def _check(name: str, **sizes: int) -> None:
    for size, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name}: {size} is {value}, it must be positive")

"""Draft blocks, their confidence, and the pool that keeps proposals between steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops.arithmetic import FreeOrder
from deepinfer_neuron.ops.draft_input import (
    confidence,
    draft_blocks,
    split_rows_by_confidence,
    survival,
)
from deepinfer_neuron.ops.draft_pool import fill_rows, store_in_slots

__all__ = [
    "compute_seqlens_q_by_confidence_rates_tl",
    "confidence_head_fused_tl",
    "copy_dflash_decode_input_tl",
    "get_fused_dflash_get_input_tl",
    "store_mtp_info_tl",
]

_INPUT_ARRAYS = 9


@cache
def get_fused_dflash_get_input_tl(
    swa_block_size: int,
    padded_kv_len: int,
    has_valid_token_mask: bool,
    has_gate_force_random: bool,
) -> Callable[..., None]:
    """Positions, slots and keys of the next draft blocks; a negative ``ftp`` marks padding.

    Kernel: ``slot_mapping_swa [Q] i32``, ``positions [Q] i32``, ``ftp [R] i32``,
    ``last_valid_offset [R] i32``, ``-> new_slots [R, K] i32``, ``-> new_positions [R, K] i32``,
    ``-> input_ids [R, K]`` integer (zeros), ``-> valid_mask [R, K] bool`` and
    ``-> gate_force_random [R, K] bool`` (ignored unless announced),
    ``-> kv_index [R * K, padded_kv_len] i32``, ``kv_len`` int (window + K), ``window_size`` int.
    """
    if swa_block_size < 1 or padded_kv_len < 0:
        raise ConfigError(
            f"get_fused_dflash_get_input: swa_block_size {swa_block_size} must be positive and "
            f"padded_kv_len {padded_kv_len} not negative"
        )

    def kernel(
        slot_mapping_swa: Tensor,
        positions: Tensor,
        ftp: Tensor,
        last_valid_offset: Tensor,
        new_slots: Tensor,
        new_positions: Tensor,
        input_ids: Tensor,
        valid_mask: Tensor | None,
        gate_force_random: Tensor | None,
        kv_index: Tensor,
        kv_len: int,
        window_size: int,
    ) -> None:
        requests, block = new_slots.shape
        if requests == 0:
            return
        _check_keys(kv_len, window_size, block)
        blocks = draft_blocks(
            slot_mapping_swa,
            positions,
            ftp,
            last_valid_offset,
            block=block,
            ring=swa_block_size,
            window=window_size,
            width=padded_kv_len,
        )
        new_slots.copy_(blocks.slots)
        new_positions.copy_(blocks.positions)
        input_ids.zero_()
        if has_valid_token_mask and valid_mask is not None:
            valid_mask.copy_(blocks.valid)
        if has_gate_force_random and gate_force_random is not None:
            gate_force_random.zero_()
        kv_index.unflatten(0, (requests, block)).copy_(blocks.keys[:, None])

    return kernel


@cache
def confidence_head_fused_tl(
    n_embed: int, markov_rank: int, has_markov_emb: bool
) -> Callable[[Tensor, Tensor | None, Tensor, Tensor, float], None]:
    """Predicted acceptance probability of drafts.

    Kernel: ``hidden [n, n_embed] bf16``, ``markov [n, markov_rank] bf16`` (ignored without Markov
    embedding), ``weight [n_embed + markov_rank] bf16``, ``-> out [n] f32``, ``temp`` float.
    """
    if n_embed < 1 or (has_markov_emb and markov_rank < 1):
        raise ConfigError(
            f"confidence_head_fused: n_embed {n_embed} and, with a Markov embedding, markov_rank "
            f"{markov_rank} must be positive"
        )
    order = FreeOrder()

    def kernel(
        hidden: Tensor, markov: Tensor | None, weight: Tensor, out: Tensor, temp: float
    ) -> None:
        embedding = markov if has_markov_emb else None
        out.copy_(confidence(hidden, weight.flatten(), temp, order, embedding))

    return kernel


@cache
def copy_dflash_decode_input_tl(has_driver_inputs: bool) -> Callable[..., None]:
    """Draft inputs of a step, padded to the size of a captured graph.

    Kernel: 9 sources ``[n]``, 9 paddings and 9 destinations ``-> [m]``, each group in the order
    first_token_positions i32, last_valid_offset i32, golden_tokens i32, sample_positions i32,
    temperatures f32, top_ps f32, top_ks i32, seq_seeds u64, mtp_info_write_slots i32. Without
    driver inputs only the first of each is used.
    """
    used = _INPUT_ARRAYS if has_driver_inputs else 1

    def kernel(*arrays: Tensor) -> None:
        sources, paddings, targets = (
            arrays[first : first + used] for first in range(0, 3 * _INPUT_ARRAYS, _INPUT_ARRAYS)
        )
        for source, padding, target in zip(sources, paddings, targets, strict=True):
            fill_rows(target, source, padding)

    return kernel


@cache
def store_mtp_info_tl(
    nextn: int, vocab_size: int, has_index: bool, has_confidence: bool
) -> Callable[..., None]:
    """Put the drafts of a step into their pool slots; slot 0 is never written.

    Kernel: ``write_slots [r] i32``, ``token_ids [r, nextn] i32``, ``logprobs [r, nextn, V] f32``,
    ``logprobs_index [r, nextn, V] i32``, ``confidence [r, nextn] f32``,
    ``<-> token_ids_pool [P] i32``, ``<-> logprobs_pool [P, V] f32``,
    ``<-> logprobs_index_pool [P, V] i32``, ``<-> confidence_pool [P] f32``. Index and confidence
    arrays are ignored unless announced.
    """
    if nextn < 0 or vocab_size < 1:
        raise ConfigError(
            f"store_mtp_info: nextn {nextn} must not be negative and vocab_size {vocab_size} must "
            "be positive"
        )

    def kernel(
        write_slots: Tensor,
        token_ids: Tensor,
        logprobs: Tensor,
        logprobs_index: Tensor | None,
        confidence_rates: Tensor | None,
        token_ids_pool: Tensor,
        logprobs_pool: Tensor,
        logprobs_index_pool: Tensor | None,
        confidence_pool: Tensor | None,
    ) -> None:
        store_in_slots(token_ids_pool, token_ids, write_slots)
        store_in_slots(logprobs_pool, logprobs, write_slots)
        if has_index and logprobs_index is not None and logprobs_index_pool is not None:
            store_in_slots(logprobs_index_pool, logprobs_index, write_slots)
        if has_confidence and confidence_rates is not None and confidence_pool is not None:
            store_in_slots(confidence_pool, confidence_rates, write_slots)

    return kernel


@cache
def compute_seqlens_q_by_confidence_rates_tl(
    nextn: int,
) -> Callable[[Tensor, Tensor, Tensor, Tensor, int], None]:
    """Divide the rows of a step among sequences by the confidence of their drafts.

    Kernel: ``remap [ns] i32`` (-1 for no drafts), ``prev_confidence_rates [np, nextn] f32``,
    ``-> cum_rates [ns, nextn] f32``, ``-> seqlens_q [ns] i32``, ``total_q`` int.
    """
    if nextn < 1:
        raise ConfigError(f"compute_seqlens_q: nextn is {nextn}, it must be positive")

    def kernel(
        remap: Tensor,
        prev_confidence_rates: Tensor,
        cum_rates: Tensor,
        seqlens_q: Tensor,
        total_q: int,
    ) -> None:
        cum_rates.zero_()
        if prev_confidence_rates.shape[0]:
            known = prev_confidence_rates.index_select(0, remap.clamp_min(0))
            carried = (remap >= 0)[:, None]
            cum_rates.copy_(torch.where(carried, survival(known), 0.0))
        seqlens_q.copy_(split_rows_by_confidence(total_q, cum_rates))

    return kernel


def _check_keys(kv_len: int, window_size: int, block: int) -> None:
    if kv_len != window_size + block:
        raise ConfigError(
            f"get_fused_dflash_get_input: kv_len is {kv_len}, but a window of {window_size} and a "
            f"block of {block} make {window_size + block}"
        )

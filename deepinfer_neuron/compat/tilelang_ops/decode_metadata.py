"""Positions, ranges and slots of the rows of a decode step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops import decode_metadata as ops
from deepinfer_neuron.ops.packed_rows import PackedRows, packed_rows

__all__ = ["copy_block_tables_tl", "prepare_v4_decode_metadata_tl"]

_PLACEHOLDER_QUERY = 998244353


@dataclass(frozen=True)
class _Layout:
    """Static arguments of the first factory."""

    max_num_blocks: int
    window_size: int
    swa_block_size: int
    block_size: int
    force_load_balance: bool
    ca_ratios: tuple[int, ...]
    dense_ratios: tuple[int, ...]
    sparse_ratios: tuple[int, ...]


@dataclass(frozen=True)
class _Step:
    """Arguments of the first factory's kernel in their order."""

    seqlens_q: Tensor
    seqlens_k: Tensor
    cu_seqlens_q: Tensor
    block_tables_in: Tensor
    block_tables_offsets: Tensor
    state_block_idx_in: Tensor
    is_placeholder: Tensor
    positions: Tensor
    valid_token_mask: Tensor
    gate_force_random: Tensor
    fix_routing_mask: Tensor
    context_lens: Tensor
    klen: Tensor
    kv_ca_index_offset_len: Tensor
    kv_swa_index_offset_len: Tensor
    slot_mapping_store_swa: Tensor
    query_indices: Tensor
    state_block_idx_out: Tensor
    positions_c: Tensor
    slot_mapping_store_ca: Tensor


@cache
def prepare_v4_decode_metadata_tl(
    max_seqlen_q: int,
    max_num_blocks: int,
    window_size: int,
    swa_block_size: int,
    block_size: int,
    force_load_balance: bool,
    ca_ratios: tuple[int, ...],
    dense_ratios: tuple[int, ...],
    sparse_ratios: tuple[int, ...],
) -> Callable[..., None]:
    """Everything that follows from the lengths of the sequences.

    Kernel, i32 unless noted: ``seqlens_q [ns]``, ``seqlens_k [ns]``, ``cu_seqlens_q [ns]``
    (inclusive sums), ``block_tables_in [tb]``, ``block_tables_offsets [ns + 1]``,
    ``state_block_idx_in [ns]``, ``is_placeholder [ns] bool``; ``-> positions [Q]``,
    ``-> valid_token_mask [Q] bool``, ``-> gate_force_random [Q] bool``,
    ``-> fix_routing_mask [Q] bool``, ``-> context_lens [Q]``, ``-> klen [sparse, >= Q]``,
    ``-> kv_ca_index_offset_len [dense, >= Q, 2]``, ``-> kv_swa_index_offset_len [Q, 2]``,
    ``-> slot_mapping_store_swa [Q]``, ``-> query_indices [Q]``, ``-> state_block_idx_out [Q]``,
    ``-> positions_c [ca, >= Q]``, ``-> slot_mapping_store_ca [ca, >= Q]``. One row per ratio of
    the named kind; columns from ``Q`` on, and rows without a ratio, keep their values.
    """
    layout = _Layout(
        max_num_blocks,
        window_size,
        swa_block_size,
        block_size,
        force_load_balance,
        tuple(ca_ratios),
        tuple(dense_ratios),
        tuple(sparse_ratios),
    )
    _check(layout)

    def kernel(*arguments: Tensor) -> None:
        step = _Step(*arguments)
        if step.seqlens_q.shape[0] == 0:
            return
        rows = packed_rows(step.seqlens_q, step.cu_seqlens_q, step.positions.shape[0])
        positions = ops.decode_positions(step.seqlens_q, step.seqlens_k, rows)
        _write_rows(step, layout, rows, positions)
        _write_window(step, layout, rows, positions)
        _write_compressed(step, layout, rows, positions)

    return kernel


@cache
def copy_block_tables_tl(max_seqlen_q: int, max_num_blocks: int) -> Callable[..., None]:
    """Give every row the block table of its sequence; columns behind it keep their values.

    Kernel, all i32: ``seqlens_q [ns]``, ``cu_seqlens_q [ns]`` (inclusive sums),
    ``block_tables_in [tb]``, ``block_tables_offsets [ns + 1]``,
    ``-> block_tables_out [Q, max_num_blocks]``.
    """
    if max_num_blocks < 0:
        raise ConfigError(
            f"copy_block_tables: max_num_blocks is {max_num_blocks}, it must not be negative"
        )

    def kernel(
        seqlens_q: Tensor,
        cu_seqlens_q: Tensor,
        block_tables_in: Tensor,
        block_tables_offsets: Tensor,
        block_tables_out: Tensor,
    ) -> None:
        if seqlens_q.shape[0] == 0:
            return
        rows = packed_rows(seqlens_q, cu_seqlens_q, block_tables_out.shape[0])
        ops.copy_row_tables(block_tables_out, block_tables_in, block_tables_offsets, rows)

    return kernel


def _check(layout: _Layout) -> None:
    sizes = (layout.window_size, layout.swa_block_size, layout.block_size)
    ratios = layout.ca_ratios + layout.dense_ratios + layout.sparse_ratios
    if min(sizes) < 1 or any(r < 1 or layout.block_size % r for r in ratios):
        raise ConfigError(
            f"prepare_v4_decode_metadata: window, ring and block sizes are {sizes} and the ratios "
            f"{ratios}; sizes must be positive and ratios divide the block size"
        )


def _write_rows(step: _Step, layout: _Layout, rows: PackedRows, positions: Tensor) -> None:
    placeholder = step.is_placeholder.index_select(0, rows.sequences)
    queries = rows.sequences.where(~placeholder, _PLACEHOLDER_QUERY)
    _write(step.positions, positions, rows)
    _write(step.valid_token_mask, ~placeholder, rows)
    step.gate_force_random.masked_fill_(rows.used, layout.force_load_balance)
    step.fix_routing_mask.masked_fill_(rows.used, False)
    _write(step.context_lens, positions + 1, rows)
    _write(step.query_indices, queries.to(torch.int32), rows)


def _write_window(step: _Step, layout: _Layout, rows: PackedRows, positions: Tensor) -> None:
    ring = layout.swa_block_size
    state = step.state_block_idx_in.index_select(0, rows.sequences)
    ranges = ops.window_ranges(positions, state, layout.window_size, ring)
    _write(step.kv_swa_index_offset_len, ranges, rows)
    _write(step.slot_mapping_store_swa, ops.window_slots(positions, state, ring), rows)
    _write(step.state_block_idx_out, state, rows)


def _write_compressed(step: _Step, layout: _Layout, rows: PackedRows, positions: Tensor) -> None:
    total = positions.shape[0]
    for out, ratio in zip(step.klen, layout.sparse_ratios, strict=False):
        _write(out[:total], ops.compressed_length(positions, ratio), rows)
    for out, ratio in zip(step.kv_ca_index_offset_len, layout.dense_ratios, strict=False):
        tokens = layout.max_num_blocks * (layout.block_size // ratio)
        _write(out[:total], ops.compressed_ranges(positions, ratio, tokens), rows)
    offsets = step.block_tables_offsets[:-1].index_select(0, rows.sequences)
    for index, ratio in enumerate(layout.ca_ratios):
        page = layout.block_size // ratio
        stores = ops.compressed_stores(positions, ratio, page, step.block_tables_in, offsets)
        _write(step.positions_c[index, :total], stores[0], rows)
        _write(step.slot_mapping_store_ca[index, :total], stores[1], rows)


def _write(out: Tensor, values: Tensor, rows: PackedRows) -> None:
    """Write the rows that belong to a sequence, in place."""
    used = rows.used if out.dim() == 1 else rows.used[:, None]
    out.copy_(values.where(used, out))

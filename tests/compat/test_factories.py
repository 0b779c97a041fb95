"""The package of factories as a whole."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

from deepinfer_neuron.compat import tilelang_ops
from tests.compat.layouts import WINDOW

ARGUMENTS = {
    "load_kv_index_tl": "index_length block_size has_block_tables",
    "get_fused_dflash_get_input_tl": (
        "swa_block_size padded_kv_len has_valid_token_mask has_gate_force_random"
    ),
    "convert_kv_index_tl": "s k n block_size",
    "expand_swa_index_tl": "width",
    "kv_index_cat_tl": "dtype window_size topk_tokens out_stride",
    "store_kv_cache_tl": (
        "layout block_size tokens_per_tile num_stages contiguous_slots skip_invalid_tiles "
        "use_reciprocal_lut input_l2_cache_ctrl rows_per_step"
    ),
    "load_paged_kv_cache_tl": (
        "layout block_size fp4_value_block_stride fp4_value_stride fp4_scale_stride "
        "index_batch_size"
    ),
    "select_state_slice_tl": "block_size_kvstore block_size_inference num_layers feature_dim",
    "load_state_to_cache_tl": "block_size_kvstore block_size_inference num_layers feature_dim",
    "compress_and_update_state_prefill_tl": "DIM COMPRESS_RATIO HAS_INDEX",
    "compress_and_update_state_decode_tl": "DIM COMPRESS_RATIO",
    "fused_norm_rope_hadamard_cast_store_kvcache_tl": (
        "num_heads head_dim do_norm norm_eps do_rope rotary_dim rope_offset positions_dtype "
        "is_neox conjugate do_hadamard hadamard_scale cast_fmt num_per_channels round_sf "
        "sf_format return_bf16 bf16_stage return_quant cache_layout block_size small_batch"
    ),
    "norm_tl": (
        "hidden_size dtype return_dtype reduce_dtype has_residual eps out_scale do_fp8_cast "
        "num_per_channels use_tma_aligned_col_major_sf round_sf use_packed_ue8m0 "
        "return_origin_out xdim shared_sf_block_m x_stride_s y_stride_s residual_stride_s "
        "residual_out_stride_s y_origin_stride_s sf_stride_s"
    ),
    "candidate_block_max_tl": "max_model_len block_size",
    "get_candidate_compact_lens_tl": "topk_blocks block_size",
    "restore_candidate_indices_inplace_tl": "topk_tokens topk_blocks block_size has_offset",
    "gather_tl": "D dtype index_dtype x_stride",
    "confidence_head_fused_tl": "n_embed markov_rank has_markov_emb",
    "dflash_input_store_tl": "n_embed hc_mult",
    "copy_dflash_decode_input_tl": "has_driver_inputs",
    "store_mtp_info_tl": "nextn vocab_size has_index has_confidence",
    "compute_seqlens_q_by_confidence_rates_tl": "nextn",
    "random_sampling_tl": "vocab_size is_nextn_predict",
    "fused_sample_tl": "vocab_size do_sample do_reject_sampling",
    "sum_smaller_probs_tl": "vocab_size",
    "prepare_verification_metadata_tl": "num_steps",
    "expand_sampling_params_tl": "",
    "map_lookup_tl": "force_topk mode value_dtype",
    "remap_draft_topk_tl": "force_topk vocab_size",
    "get_accept_result_tl": "has_golden",
    "finalize_verification_tl": "has_sum_smaller_probs has_confidence num_steps num_stop_tokens",
    "gather_input_ids_zos_tl": "max_seqlen_q",
    "gather_engram_tokens_zos_tl": (
        "max_seqlen_q max_ngram_size engram_compressed_pad_token image_sentinel"
    ),
    "compute_seqlens_k_zos_tl": "nextn",
    "prepare_v4_decode_metadata_tl": (
        "max_seqlen_q max_num_blocks window_size swa_block_size block_size force_load_balance "
        "ca_ratios dense_ratios sparse_ratios"
    ),
    "copy_block_tables_tl": "max_seqlen_q max_num_blocks",
    "prepare_cp_mirror_tl": "cp_size compress_ratios",
    "yoco_cp_boundary_fused_tl": "cp_size",
    "rgb_pad_to_patches_tl": "patch_size",
    "replace_input_embeds_tl": "hidden",
    "batch_downsample_tl": "downsample_ratio dim do_downsample dtype",
    "apply_token_bitmask_by_step_inplace_tl": "vocab_size has_ftp",
}
"""All factories and their parameters, which callers address by name."""


def test_all_factories() -> None:
    assert len(ARGUMENTS) == 42
    assert sorted(ARGUMENTS) == sorted(tilelang_ops.__all__)
    exported = {name for name in dir(tilelang_ops) if name.endswith("_tl")}
    assert exported == ARGUMENTS.keys()


@pytest.mark.parametrize("name", ARGUMENTS)
def test_parameter_names(name: str) -> None:
    parameters = inspect.signature(getattr(tilelang_ops, name)).parameters
    assert list(parameters) == ARGUMENTS[name].split()


@pytest.mark.parametrize("name", ARGUMENTS)
def test_factories_are_memoised(name: str) -> None:
    assert hasattr(getattr(tilelang_ops, name), "cache_info")


def test_one_object_per_name() -> None:
    """A dispatcher that walks all modules finds one object under each name."""
    found: dict[str, object] = {}
    for module in {getattr(tilelang_ops, name).__module__ for name in ARGUMENTS}:
        for name, value in vars(importlib.import_module(module)).items():
            if name.endswith("_tl"):
                assert found.setdefault(name, value) is value
    assert found == {name: getattr(tilelang_ops, name) for name in ARGUMENTS}


def test_equal_arguments_give_the_same_kernel() -> None:
    first = tilelang_ops.store_kv_cache_tl(WINDOW, 64, rows_per_step=2)
    assert tilelang_ops.store_kv_cache_tl(WINDOW, 64, rows_per_step=2) is first
    gather = tilelang_ops.gather_tl(8, torch.int8, torch.int32, 8)
    assert tilelang_ops.gather_tl(8, torch.int8, torch.int32, 8) is gather
    assert tilelang_ops.gather_tl(8, torch.int8, torch.int32, 16) is not gather

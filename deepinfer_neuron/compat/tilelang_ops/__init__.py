"""The operator factories.

A factory ``<name>_tl(static arguments)`` returns a kernel; factories are memoised. A kernel takes
its tensors by position and writes its outputs in place, only where a logical element lies.
"""

from deepinfer_neuron.compat.tilelang_ops.candidate_blocks import (
    candidate_block_max_tl,
    get_candidate_compact_lens_tl,
    restore_candidate_indices_inplace_tl,
)
from deepinfer_neuron.compat.tilelang_ops.compress import (
    compress_and_update_state_decode_tl,
    compress_and_update_state_prefill_tl,
)
from deepinfer_neuron.compat.tilelang_ops.cp_layout import (
    prepare_cp_mirror_tl,
    yoco_cp_boundary_fused_tl,
)
from deepinfer_neuron.compat.tilelang_ops.decode_metadata import (
    copy_block_tables_tl,
    prepare_v4_decode_metadata_tl,
)
from deepinfer_neuron.compat.tilelang_ops.draft_features import dflash_input_store_tl
from deepinfer_neuron.compat.tilelang_ops.drafts import (
    compute_seqlens_q_by_confidence_rates_tl,
    confidence_head_fused_tl,
    copy_dflash_decode_input_tl,
    get_fused_dflash_get_input_tl,
    store_mtp_info_tl,
)
from deepinfer_neuron.compat.tilelang_ops.fused_transform import (
    fused_norm_rope_hadamard_cast_store_kvcache_tl,
)
from deepinfer_neuron.compat.tilelang_ops.gather import gather_tl
from deepinfer_neuron.compat.tilelang_ops.kv_cache import (
    load_paged_kv_cache_tl,
    store_kv_cache_tl,
)
from deepinfer_neuron.compat.tilelang_ops.kv_index import (
    convert_kv_index_tl,
    expand_swa_index_tl,
    kv_index_cat_tl,
    load_kv_index_tl,
)
from deepinfer_neuron.compat.tilelang_ops.norm import norm_tl
from deepinfer_neuron.compat.tilelang_ops.sampling import (
    fused_sample_tl,
    random_sampling_tl,
    sum_smaller_probs_tl,
)
from deepinfer_neuron.compat.tilelang_ops.state import (
    load_state_to_cache_tl,
    select_state_slice_tl,
)
from deepinfer_neuron.compat.tilelang_ops.structured_output import (
    apply_token_bitmask_by_step_inplace_tl,
)
from deepinfer_neuron.compat.tilelang_ops.verification import (
    expand_sampling_params_tl,
    finalize_verification_tl,
    get_accept_result_tl,
    map_lookup_tl,
    prepare_verification_metadata_tl,
    remap_draft_topk_tl,
)
from deepinfer_neuron.compat.tilelang_ops.vision import (
    batch_downsample_tl,
    replace_input_embeds_tl,
    rgb_pad_to_patches_tl,
)
from deepinfer_neuron.compat.tilelang_ops.zos import (
    compute_seqlens_k_zos_tl,
    gather_engram_tokens_zos_tl,
    gather_input_ids_zos_tl,
)

__all__ = [
    "apply_token_bitmask_by_step_inplace_tl",
    "batch_downsample_tl",
    "candidate_block_max_tl",
    "compress_and_update_state_decode_tl",
    "compress_and_update_state_prefill_tl",
    "compute_seqlens_k_zos_tl",
    "compute_seqlens_q_by_confidence_rates_tl",
    "confidence_head_fused_tl",
    "convert_kv_index_tl",
    "copy_block_tables_tl",
    "copy_dflash_decode_input_tl",
    "dflash_input_store_tl",
    "expand_sampling_params_tl",
    "expand_swa_index_tl",
    "finalize_verification_tl",
    "fused_norm_rope_hadamard_cast_store_kvcache_tl",
    "fused_sample_tl",
    "gather_engram_tokens_zos_tl",
    "gather_input_ids_zos_tl",
    "gather_tl",
    "get_accept_result_tl",
    "get_candidate_compact_lens_tl",
    "get_fused_dflash_get_input_tl",
    "kv_index_cat_tl",
    "load_kv_index_tl",
    "load_paged_kv_cache_tl",
    "load_state_to_cache_tl",
    "map_lookup_tl",
    "norm_tl",
    "prepare_cp_mirror_tl",
    "prepare_v4_decode_metadata_tl",
    "prepare_verification_metadata_tl",
    "random_sampling_tl",
    "remap_draft_topk_tl",
    "replace_input_embeds_tl",
    "restore_candidate_indices_inplace_tl",
    "rgb_pad_to_patches_tl",
    "select_state_slice_tl",
    "store_kv_cache_tl",
    "store_mtp_info_tl",
    "sum_smaller_probs_tl",
    "yoco_cp_boundary_fused_tl",
]

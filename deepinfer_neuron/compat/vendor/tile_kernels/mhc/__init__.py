"""Hyper-connections of four streams."""

from deepinfer_neuron.compat.vendor.tile_kernels.mhc.streams import (
    expand_to_mhc_fwd,
    mhc_fn_normw_merge_fwd,
    mhc_head_compute_mix_fwd,
    mhc_post_fwd,
    mhc_pre_apply_mix_fwd,
    mhc_pre_big_fuse_fwd,
    mhc_pre_split_mixes_fwd,
    mhc_reduce_partials_and_rmsnorm_fwd,
    mhc_sinkhorn_fwd,
)

__all__ = [
    "expand_to_mhc_fwd",
    "mhc_fn_normw_merge_fwd",
    "mhc_head_compute_mix_fwd",
    "mhc_post_fwd",
    "mhc_pre_apply_mix_fwd",
    "mhc_pre_big_fuse_fwd",
    "mhc_pre_split_mixes_fwd",
    "mhc_reduce_partials_and_rmsnorm_fwd",
    "mhc_sinkhorn_fwd",
]

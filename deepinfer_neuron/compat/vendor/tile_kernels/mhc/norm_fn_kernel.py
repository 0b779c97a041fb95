"""The module under which callers look for this."""

from deepinfer_neuron.compat.vendor.tile_kernels.mhc.streams import (
    mhc_fn_normw_merge_fwd,
    mhc_reduce_partials_and_rmsnorm_fwd,
)

__all__ = ["mhc_fn_normw_merge_fwd", "mhc_reduce_partials_and_rmsnorm_fwd"]

"""The module under which callers look for this."""

from deepinfer_neuron.compat.vendor.tile_kernels.mhc.streams import (
    mhc_pre_big_fuse_fwd,
)

__all__ = ["mhc_pre_big_fuse_fwd"]

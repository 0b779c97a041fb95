"""The module under which callers look for this."""

from deepinfer_neuron.compat.vendor.tile_kernels.mhc.streams import (
    mhc_sinkhorn_fwd,
)

__all__ = ["mhc_sinkhorn_fwd"]

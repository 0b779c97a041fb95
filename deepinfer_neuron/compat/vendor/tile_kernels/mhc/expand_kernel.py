"""The module under which callers look for this."""

from deepinfer_neuron.compat.vendor.tile_kernels.mhc.streams import (
    expand_to_mhc_fwd,
)

__all__ = ["expand_to_mhc_fwd"]

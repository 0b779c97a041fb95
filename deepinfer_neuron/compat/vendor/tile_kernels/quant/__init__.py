"""Casts per row, the gated activation, and scales of weights."""

from deepinfer_neuron.compat.vendor.tile_kernels.quant.rows import (
    batched_transpose_weight_sf,
    per_token_cast,
    per_token_cast_and_cast_back,
    per_token_cast_back,
)
from deepinfer_neuron.compat.vendor.tile_kernels.quant.swiglu import (
    swiglu_forward,
    swiglu_forward_and_per_token_cast,
)

__all__ = [
    "batched_transpose_weight_sf",
    "per_token_cast",
    "per_token_cast_and_cast_back",
    "per_token_cast_back",
    "swiglu_forward",
    "swiglu_forward_and_per_token_cast",
]

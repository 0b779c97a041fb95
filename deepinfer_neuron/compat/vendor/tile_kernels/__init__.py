"""Casts, gating, hashing, rotation and hyper-connection kernels."""

from deepinfer_neuron.compat.vendor.tile_kernels import (
    config,
    engram,
    mhc,
    moe,
    quant,
    torch,
    transform,
    utils,
)
from deepinfer_neuron.compat.vendor.tile_kernels.config import (
    get_num_sms,
    get_num_vec_cores,
    get_token_alignment,
    set_num_sms,
    set_pdl,
    set_token_alignment,
    use_deterministic_algorithms,
)

__all__ = [
    "config",
    "engram",
    "get_num_sms",
    "get_num_vec_cores",
    "get_token_alignment",
    "mhc",
    "moe",
    "quant",
    "set_num_sms",
    "set_pdl",
    "set_token_alignment",
    "torch",
    "transform",
    "use_deterministic_algorithms",
    "utils",
]

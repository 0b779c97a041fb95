"""Sparse attention over listed keys, for prompts and for single steps."""

from __future__ import annotations

from deepinfer_neuron.compat.vendor.flash_mla import (
    flash_mla_interface,
    fused_norm_rope_attn_rope_cast,
)
from deepinfer_neuron.compat.vendor.flash_mla.flash_mla_interface import (
    FlashMLASchedMeta,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
)

__all__ = [
    "FlashMLASchedMeta",
    "flash_mla_interface",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "fused_norm_rope_attn_rope_cast",
]

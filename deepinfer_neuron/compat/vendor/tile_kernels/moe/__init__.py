"""The router."""

from deepinfer_neuron.compat.vendor.tile_kernels.moe.gate import moe_topk_gate

__all__ = ["moe_topk_gate"]

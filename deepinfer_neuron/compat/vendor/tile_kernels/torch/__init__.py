"""The general casts and the offsets of tables."""

from deepinfer_neuron.compat.vendor.tile_kernels.torch import engram
from deepinfer_neuron.compat.vendor.tile_kernels.torch.casting import cast, cast_back
from deepinfer_neuron.compat.vendor.tile_kernels.torch.engram import make_offsets

__all__ = ["cast", "cast_back", "engram", "make_offsets"]

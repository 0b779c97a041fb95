"""Rings of recent states: a request's own ring, and the copy kept in the cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from torch import Tensor

from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops.state_ring import copy_between_rings

StateKernel = Callable[[Tensor, Tensor, int], None]


def _check(name: str, *sizes: int) -> None:
    if min(sizes) < 1:
        raise ConfigError(f"{name}: block sizes and layers are {sizes}, they must be positive")


@cache
def select_state_slice_tl(
    block_size_kvstore: int, block_size_inference: int, num_layers: int, feature_dim: int
) -> StateKernel:
    """Copy the states before a position from the cache's ring to the request's.

    Kernel: ``-> state_tensor [L, block_size_inference, F] u8``,
    ``state_cache [L, block_size_kvstore, F] u8``, ``last_hit_position`` int.
    """
    _check("select_state_slice", block_size_kvstore, block_size_inference, num_layers)

    def kernel(state_tensor: Tensor, state_cache: Tensor, last_hit_position: int) -> None:
        copy_between_rings(state_cache, state_tensor, last_hit_position, block_size_inference)

    return kernel


@cache
def load_state_to_cache_tl(
    block_size_kvstore: int, block_size_inference: int, num_layers: int, feature_dim: int
) -> StateKernel:
    """Copy the states before a position from the request's ring to the cache's.

    Kernel: ``state_tensor [L, block_size_inference, F] u8``,
    ``<-> state_cache [L, block_size_kvstore, F] u8``, ``last_hit_position`` int.
    """
    _check("load_state_to_cache", block_size_kvstore, block_size_inference, num_layers)

    def kernel(state_tensor: Tensor, state_cache: Tensor, last_hit_position: int) -> None:
        copy_between_rings(state_tensor, state_cache, last_hit_position, block_size_inference)

    return kernel

"""State rings against a loop over positions."""

from __future__ import annotations

import pytest
import torch

from deepinfer_neuron.compat.tilelang_ops import load_state_to_cache_tl, select_state_slice_tl
from deepinfer_neuron.errors import ConfigError
from tests.compat.guards import Guarded
from tests.ops.number_formats import random_bytes

LAYERS, WIDTH = 3, 24
SIZES = [(258, 130), (130, 130), (13, 5), (8, 8), (1, 1)]


def ring(size: int, seed: int) -> Guarded:
    guarded = Guarded((LAYERS, size, WIDTH), (size * WIDTH + 32, WIDTH, 1), torch.uint8, 8)
    guarded.view.copy_(random_bytes((LAYERS, size, WIDTH), seed))
    return guarded


@pytest.mark.parametrize(("large", "small"), SIZES)
@pytest.mark.parametrize("last", [0, 3, 130, 500, 2**31 - 1])
@pytest.mark.parametrize("store", [False, True])
def test_copies(large: int, small: int, last: int, store: bool) -> None:
    """The positions before ``last``, also negative ones; nothing else changes."""
    state, cache = ring(small, 1), ring(large, 2)
    expected_state, expected_cache = state.view.clone(), cache.view.clone()
    for t in range(small):
        position = last - small + t
        here, there = (position + small) % small, (position + large) % large
        if store:
            expected_cache[:, there] = state.view[:, here]
        else:
            expected_state[:, here] = cache.view[:, there]
    factory = load_state_to_cache_tl if store else select_state_slice_tl
    factory(large, small, LAYERS, WIDTH)(state.view, cache.view, last)
    assert torch.equal(state.view, expected_state)
    assert torch.equal(cache.view, expected_cache)
    assert state.intact()
    assert cache.intact()


def test_bad_static_arguments() -> None:
    for sizes in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        for factory in (load_state_to_cache_tl, select_state_slice_tl):
            with pytest.raises(ConfigError):
                factory(*sizes, 4)

"""Offsets of the parts of a table."""

from __future__ import annotations

from torch import Tensor

from deepinfer_neuron.ops.ngram_hash import table_offsets


def make_offsets(vocab_sizes: Tensor) -> Tensor:
    """Sums of the sizes before: int32 ``[L, g-1, t]`` to int32 ``[L, (g-1) t]``."""
    return table_offsets(vocab_sizes)

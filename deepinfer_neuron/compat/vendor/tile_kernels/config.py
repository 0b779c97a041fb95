"""Settings of this library."""

from __future__ import annotations

import torch

from deepinfer_neuron.compat.vendor.knobs import (
    KNOBS,
    checked_alignment,
    get_num_sms,
    set_num_sms,
    set_pdl,
    use_deterministic_algorithms,
)

__all__ = [
    "get_num_sms",
    "get_num_vec_cores",
    "get_token_alignment",
    "is_ascend",
    "set_num_sms",
    "set_pdl",
    "set_token_alignment",
    "use_deterministic_algorithms",
]


def is_ascend() -> bool:
    """Whether scale words hold two exponents and sums are not split, as on that platform."""
    return KNOBS.scale_word == torch.int16


def get_num_vec_cores() -> int:
    """Two per core."""
    return 2 * KNOBS.cores


def set_token_alignment(alignment: int) -> None:
    """Rows of expert ``e`` start at the end of expert ``e - 1`` rounded up to ``alignment``."""
    KNOBS.token_alignment = checked_alignment(alignment)


def get_token_alignment() -> int:
    """The alignment in force, 128 unless set."""
    return KNOBS.token_alignment

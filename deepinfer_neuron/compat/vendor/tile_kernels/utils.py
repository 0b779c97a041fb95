"""Small helpers."""

from __future__ import annotations

import torch

from deepinfer_neuron.errors import ConfigError

_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "e4m3",
    torch.int8: "e2m1",
}


def dtype_to_str(dtype: torch.dtype) -> str:
    """``fp32``, ``bf16``, ``e4m3`` or ``e2m1``; int8 holds packed e2m1.

    Raises :class:`ConfigError` for any other type.
    """
    if dtype not in _NAMES:
        raise ConfigError(f"{dtype} has no name; use one of {', '.join(map(str, _NAMES))}.")
    return _NAMES[dtype]


def ceil_div(x: int, y: int) -> int:
    """``x / y`` rounded up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """``x`` rounded up to a multiple of ``y``."""
    return ceil_div(x, y) * y

"""Checks and conversions that the stand-ins share."""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor

from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops.arithmetic import Arithmetic, fixed_arithmetic, free_arithmetic
from deepinfer_neuron.ops.grouped_gemm import Operand
from deepinfer_neuron.settings import Settings

Scaled = tuple[Tensor, Tensor]
"""Quantized data and their scales."""


@functools.lru_cache(maxsize=1)
def arithmetic() -> Arithmetic:
    """Fixed order if the environment asks for batch invariance, else torch's own order."""
    fixed = Settings.from_env(os.environ).batch_invariant
    return fixed_arithmetic() if fixed else free_arithmetic()


def require(condition: bool, message: str) -> None:
    """Raise :class:`ConfigError` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ConfigError(message)


def shape(x: Tensor) -> str:
    """Type and shape of a tensor for a message."""
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def operand(x: Tensor | Scaled, group: int = 32) -> Operand:
    """A tensor, or a pair of data and scales with ``group`` columns to a scale."""
    if isinstance(x, Tensor):
        return Operand(x)
    return Operand(x[0], x[1], group)


def check_product(
    name: str, a: Operand, b: Operand, out: Tensor, accumulator: Tensor | None = None
) -> None:
    """Raise :class:`ConfigError` unless ``out`` can take ``a b^T``.

    Args:
        name: of the called function, for the message.
        a: ``[..., M, K]``.
        b: ``[..., N, K]``.
        out: bf16 or fp32 ``[..., M, N]``, last axis contiguous.
        accumulator: shape and type of ``out``, or ``None``.
    """
    require(
        a.columns == b.columns,
        f"{name}: a is {shape(a.codes)} and b is {shape(b.codes)}, which contract {a.columns} with "
        f"{b.columns} columns; give equal numbers.",
    )
    require(
        out.dtype in (torch.bfloat16, torch.float32)
        and tuple(out.shape[-2:]) == (a.rows, b.rows)
        and (out.shape[-1] <= 1 or out.stride(-1) == 1),
        f"{name}: the output is {shape(out)}; give bfloat16 or float32 of {a.rows} rows and "
        f"{b.rows} columns with a contiguous last axis.",
    )
    require(
        accumulator is None or (accumulator.dtype == out.dtype and accumulator.shape == out.shape),
        f"{name}: the accumulator differs from the output, {shape(out)}; give the same type and "
        "shape.",
    )

"""Rules about single operators: the same for calls outside regions and for nodes of a graph.

Every check gets an operator, its arguments and its results; tensors may be fake ones, of which
only shapes and dtypes are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from deepinfer_neuron.platform.simulator.limits import Limits
from deepinfer_neuron.platform.simulator.operators import (
    DATA_DEPENDENT,
    E4M3,
    FOUR_BIT,
    GATHERS,
    INT32_MAX,
    MATMULS,
    RANDOM,
    SCATTER_SUMS,
    SHIFTS,
    SMALL_INTS,
    SORTS,
    SUMS,
    TRANSPOSES,
    base_name,
    is_integer,
    tensors_in,
)

_SHAPE_OPERATORS = frozenset({"slice", "slice_scatter", "narrow", "as_strided", "slice_copy"})


def broken_rules(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, limits: Limits
) -> Iterator[str]:
    """Ids of the rules that one call breaks."""
    name = base_name(func)
    inputs = list(tensors_in([args, kwargs]))
    yield from _dtype_rules(inputs + list(tensors_in(out)))
    yield from _integer_rules(name, args, kwargs, inputs)
    yield from _gather_rules(name, args, inputs, limits)
    yield from _form_rules(name, args, kwargs, inputs)


def _dtype_rules(tensors: list[Tensor]) -> Iterator[str]:
    dtypes = {tensor.dtype for tensor in tensors}
    if dtypes & E4M3:
        yield "D01"
    if dtypes & FOUR_BIT:
        yield "D03"
    if torch.float64 in dtypes:
        yield "D04"
    if any(dtype.is_complex for dtype in dtypes):
        yield "D16"


def _integer_rules(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor]
) -> Iterator[str]:
    if name not in _SHAPE_OPERATORS and any(map(_too_wide, [*args, *kwargs.values()])):
        yield "D04"
    if not inputs:
        return
    integers = is_integer(inputs[0].dtype)
    adds = name in SCATTER_SUMS or (name == "index_put" and _accumulates(args, kwargs))
    if (name in MATMULS or adds) and any(is_integer(inputs[at].dtype) for at in (0, -1)):
        yield "D05"
    floors = name == "floor_divide" or (name == "div" and kwargs.get("rounding_mode") == "floor")
    if floors and all(is_integer(tensor.dtype) for tensor in inputs):
        yield "D06"
    if name in SORTS and integers:
        yield "D07"
    if name in SHIFTS and inputs[0].dtype in SMALL_INTS:
        yield "D08"
    if name in SUMS and inputs[0].dtype == torch.bool:
        yield "D11"
    if name in ("exp2", "ldexp") or (name == "pow" and any(map(_is_whole_number, args))):
        yield "D15"


def _gather_rules(
    name: str, args: tuple[Any, ...], inputs: list[Tensor], limits: Limits
) -> Iterator[str]:
    if name not in GATHERS or not inputs:
        return
    table = inputs[0]
    if table.element_size() == 1 and table.numel() > limits.byte_gather:
        yield "D10"
    if name == "gather" and table.dim() and table.shape[args[1]] > limits.wide_gather:
        yield "D11"


def _form_rules(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor]
) -> Iterator[str]:
    if name in RANDOM:
        yield "D18"
    masked = name in ("index", "index_put") and any(
        tensor.dtype == torch.bool for tensor in tensors_in(args[1])
    )
    repeats = name == "repeat_interleave" and isinstance(args[-1], Tensor)
    if name in DATA_DEPENDENT or masked or repeats:
        yield "G01"
    if name == "slice" and len(args) > 4 and args[4] != 1:
        yield "G10"
    if name == "as_strided":
        yield "G10"
    if name == "slice_scatter" and len(args) > 5 and args[5] != 1:
        yield "L01"
    if kwargs.get("memory_format") in (torch.channels_last, torch.channels_last_3d):
        yield "L07"
    if name in MATMULS or name in TRANSPOSES:
        yield from ("G09" for tensor in inputs[-2:] if _has_odd_width(tensor))


def _has_odd_width(tensor: Tensor) -> bool:
    wide = tensor.dim() > 1 and tensor.shape[-1] > 1 and tensor.shape[-1] % 2 == 1
    return wide and tensor.element_size() == 2


def _too_wide(value: Any) -> bool:
    """Whether a Python number needs more than 32 bits."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole and not -INT32_MAX - 1 <= value <= INT32_MAX


def _accumulates(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(args[3] if len(args) > 3 else kwargs.get("accumulate", False))


def _is_whole_number(value: Any) -> bool:
    return isinstance(value, int | float) and float(value).is_integer()

"""Facts about torch's operators that the checks share."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

MATMULS = frozenset(
    {"mm", "bmm", "addmm", "baddbmm", "dot", "mv", "addmv", "convolution", "_int_mm"}
)
SCATTER_SUMS = frozenset({"scatter_add", "index_add", "scatter_reduce", "index_reduce"})
SORTS = frozenset({"topk", "sort", "argsort", "msort", "kthvalue", "median", "mode"})
SHIFTS = frozenset({"bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__"})
SUMS = frozenset({"sum", "mean", "cumsum", "prod", "cumprod", "nansum"})
TRANSPOSES = frozenset({"t", "transpose", "permute", "numpy_T", "mT"})
RANDOM = frozenset(
    {
        "bernoulli",
        "cauchy",
        "exponential",
        "geometric",
        "log_normal",
        "multinomial",
        "native_dropout",
        "normal",
        "poisson",
        "rand",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "random",
        "randperm",
        "uniform",
    }
)
DATA_DEPENDENT = frozenset(
    {
        "_unique2",
        "argwhere",
        "bincount",
        "masked_scatter",
        "masked_select",
        "nonzero",
        "unique_consecutive",
        "unique_dim",
    }
)
TO_HOST = frozenset({"_local_scalar_dense", "equal", "is_nonzero", "item"})
SMALL_INTS = frozenset({torch.int8, torch.int16, torch.uint8, torch.uint16})
FOUR_BIT = frozenset({torch.float4_e2m1fn_x2, torch.float8_e8m0fnu})
E4M3 = frozenset({torch.float8_e4m3fn, torch.float8_e4m3fnuz})
FLOAT8 = E4M3 | {torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu}
PACKED = frozenset({torch.uint8, torch.int8, torch.float8_e5m2, torch.float8_e4m3fn})
"""Formats of packed weights: the elements are codes."""
INT32_MAX = 2**31 - 1


@functools.cache
def base_name(func: OpOverload) -> str:
    """Name of an operator without namespace, overload and the mark of in-place forms."""
    name = func._schema.name.split("::", 1)[1]
    return name if name.endswith("__") else name.removesuffix("_")


@functools.cache
def namespace(func: OpOverload) -> str:
    """Such as ``aten``."""
    return func._schema.name.split("::", 1)[0]


@functools.cache
def is_view(func: OpOverload) -> bool:
    """Whether every result shares memory with an argument, and nothing is written."""
    returns = func._schema.returns
    shared = [item.alias_info is not None and not item.alias_info.is_write for item in returns]
    return bool(shared) and all(shared)


@functools.cache
def written(func: OpOverload) -> tuple[int | str | None, ...]:
    """For each result the argument that is written and returned: its position or its name."""
    places: dict[frozenset[str], int | str] = {}
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            key = frozenset(argument.alias_info.before_set)
            places[key] = argument.name if argument.kwarg_only else position
    return tuple(
        places.get(frozenset(item.alias_info.before_set)) if item.alias_info is not None else None
        for item in func._schema.returns
    )


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Every tensor among nested lists, tuples and dictionaries."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))


def is_integer(dtype: torch.dtype) -> bool:
    """Whether ``dtype`` is an integer or a boolean."""
    return not dtype.is_floating_point and not dtype.is_complex


def describe(func: object, args: Any) -> str:
    """An operator with the shapes and dtypes of its tensors."""
    shapes = ", ".join(describe_tensor(tensor) for tensor in tensors_in(args))
    return f"{func}({shapes})"


def describe_tensor(tensor: Tensor) -> str:
    """Such as ``int32[4, 8]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


@dataclass(frozen=True)
class Indexing:
    """An index argument of an operator: its values, and the length of what they index."""

    index: Any
    size: int


# Operators ``(table, dim, index, ...)``.
_BY_DIM = frozenset(
    {
        "gather",
        "index_add",
        "index_copy",
        "index_fill",
        "index_reduce",
        "index_select",
        "scatter",
        "scatter_add",
        "scatter_reduce",
    }
)
GATHERS = frozenset({"embedding", "gather", "index", "index_select"})


def indexings(func: OpOverload, args: tuple[Any, ...], shape_of: Any) -> list[Indexing]:
    """The index arguments of a gather or scatter.

    Args:
        func: any operator.
        args: its positional arguments: tensors, or nodes of a graph.
        shape_of: gives the shape of one of them.
    """
    name = base_name(func)
    if name == "embedding":
        return [Indexing(args[1], shape_of(args[0])[0])]
    if name in _BY_DIM and len(args) > 2:
        shape = shape_of(args[0])
        return [Indexing(args[2], shape[args[1]] if shape else 1)]
    if name in ("index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put"):
        shape = shape_of(args[0])
        # A boolean mask takes the place of several axes; it is refused elsewhere.
        return [
            Indexing(index, shape[axis])
            for axis, index in enumerate(args[1])
            if index is not None and axis < len(shape)
        ]
    return []

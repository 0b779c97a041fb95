"""64-bit integers in a graph.

torch numbers the results of some operators with int64, and some of its indices must be int64 on
the host. On the device these are 32-bit values. So int64 may be made by such an operator or by a
cast, be moved around, be compared, index something, or be cast to at most 32 bits; nothing may be
computed with it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from deepinfer_neuron.platform.simulator.operators import base_name, indexings, is_view

_PRODUCERS = frozenset(
    {
        "_to_copy",
        "arange",
        "argmax",
        "argmin",
        "argsort",
        "bucketize",
        "full",
        "full_like",
        "iota",
        "max",
        "min",
        "new_zeros",
        "ones",
        "ones_like",
        "scalar_tensor",
        "searchsorted",
        "sort",
        "topk",
        "zeros",
        "zeros_like",
    }
)
_MOVES = frozenset(
    {
        "_unsafe_view",
        "cat",
        "clone",
        "expand",
        "gather",
        "getitem",
        "index",
        "index_select",
        "masked_fill",
        "repeat",
        "stack",
        "where",
    }
)
_COMPARISONS = frozenset({"eq", "ge", "gt", "le", "lt", "ne"})


def wide_integer_misuse(graph: fx.Graph) -> Iterator[fx.Node]:
    """Nodes that compute with int64."""
    for node in graph.nodes:
        if node.op == "call_function":
            makes = _is_wide(node) and not (_name(node) in _PRODUCERS or _moves(node))
            takes = any(_is_wide(source) for source in node.all_input_nodes)
            if makes or (takes and not _may_take(node)):
                yield node


def _may_take(node: fx.Node) -> bool:
    name = _name(node)
    if _moves(node) or name in _COMPARISONS or name == "copy":
        return True
    if name == "_to_copy":
        return True
    if not isinstance(node.target, OpOverload):
        return False
    indices = [
        item.index
        for item in indexings(node.target, node.args, lambda source: source.meta["val"].shape)
    ]
    wide = [source for source in node.all_input_nodes if _is_wide(source)]
    return bool(indices) and all(source in indices for source in wide)


def _moves(node: fx.Node) -> bool:
    view = isinstance(node.target, OpOverload) and is_view(node.target)
    return view or _name(node) in _MOVES


def _name(node: fx.Node) -> str:
    if isinstance(node.target, OpOverload):
        return base_name(node.target)
    return getattr(node.target, "__name__", "")


def _is_wide(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype in (torch.int64, torch.uint64)

"""How much a captured graph computes, moves and needs, from its shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from deepinfer_neuron.platform.simulator.collectives import is_collective
from deepinfer_neuron.platform.simulator.operators import (
    MATMULS,
    PACKED,
    base_name,
    is_view,
    tensors_in,
)

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
# Written in place on the device, though a captured graph shows a copy.
_UPDATES = frozenset(
    {"_unsafe_index_put", "index_copy", "index_put", "scatter", "select_scatter", "slice_scatter"}
)


@dataclass(frozen=True)
class GraphSize:
    """Sizes of one graph.

    Attributes:
        nodes: operators.
        tiles: tiles of 128 x 512 results over 128 summands in its matrix products.
        flops: operations of its matrix products, two per multiplication and addition.
        input_bytes: arguments, buffers and parameters.
        output_bytes: results.
        temporary_bytes: most that is alive in between, if nothing is fused.
        converted: elements that it decodes from packed weights and cache records.
        collectives: collective operations.
        collective_bytes: what they move.
    """

    nodes: int
    tiles: int
    flops: int
    input_bytes: int
    output_bytes: int
    temporary_bytes: int
    converted: int
    collectives: int
    collective_bytes: int


def measure(graph: fx.Graph) -> GraphSize:
    """The sizes of a graph of ATen operators; zeros where they depend on data."""
    calls = [node for node in graph.nodes if isinstance(node.target, OpOverload)]
    if symbolic_nodes(graph):
        return GraphSize(len(calls), *[0] * 8)
    products = [shape for node in calls for shape in _product(node)]
    collectives = [node for node in calls if is_collective(node.target)]
    output = next(iter(reversed(graph.nodes)))
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return GraphSize(
        nodes=len(calls),
        tiles=sum(b * -(-m // 128) * -(-n // 512) * -(-k // 128) for b, m, n, k in products),
        flops=sum(2 * b * m * n * k for b, m, n, k in products),
        input_bytes=sum(map(_bytes, inputs)),
        output_bytes=sum(map(_bytes, output.all_input_nodes)),
        temporary_bytes=_temporary_bytes(graph),
        converted=_converted(graph),
        collectives=len(collectives),
        collective_bytes=sum(_bytes(node.all_input_nodes[0]) for node in collectives),
    )


def symbolic_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Nodes whose value, or one of whose sizes, is not known."""
    return [node for node in graph.nodes if _has_symbols(node.meta.get("val"))]


def _has_symbols(value: Any) -> bool:
    if isinstance(value, _SYMBOLS):
        return True
    sizes = (size for tensor in tensors_in(value) for size in tensor.shape)
    return any(isinstance(size, _SYMBOLS) for size in sizes)


def _product(node: fx.Node) -> list[tuple[int, int, int, int]]:
    """Batch, rows, columns and summands of a matrix product; nothing for other operators."""
    out = node.meta.get("val")
    if base_name(_operator(node)) not in MATMULS or not isinstance(out, Tensor) or out.dim() < 2:
        return []
    operands = [node.meta.get("val") for node in node.all_input_nodes]
    left = [tensor for tensor in tensors_in(operands) if tensor.dim() >= 2][-2:][0]
    rows, columns = out.shape[-2:]
    batch = out.numel() // max(1, rows * columns)
    return [(batch, rows, columns, left.shape[-1])]


def _converted(graph: fx.Graph) -> int:
    """Elements that become floats, having come from packed inputs as integers or bytes."""
    codes: set[fx.Node] = set()
    total = 0
    for node in graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            continue
        if node.op == "placeholder":
            packed = value.dtype in PACKED and value.dim() > 1
        else:
            packed = bool(codes.intersection(node.all_input_nodes))
        if packed and value.is_floating_point() and value.element_size() > 1:
            total += value.numel()
        elif packed:
            codes.add(node)
    return total


def _temporary_bytes(graph: fx.Graph) -> int:
    """Most bytes of intermediate results that are alive at one time."""
    base: dict[fx.Node, fx.Node] = {}
    last_use: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        base[node] = base[node.all_input_nodes[0]] if _shares(node) else node
        for source in node.all_input_nodes:
            last_use[base[source]] = node
    ends: dict[fx.Node, list[fx.Node]] = {}
    for owner, user in last_use.items():
        ends.setdefault(user, []).append(owner)
    now = peak = 0
    for node in graph.nodes:
        if node.op == "call_function" and base[node] is node:
            now += _bytes(node)
            peak = max(peak, now)
        for owner in ends.get(node, ()):
            now -= _bytes(owner) if owner.op == "call_function" else 0
    return peak


def _shares(node: fx.Node) -> bool:
    """Whether the result lives in the memory of the first argument."""
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    if not isinstance(node.target, OpOverload):
        return True
    name = base_name(node.target)
    return is_view(node.target) or name in _UPDATES or name in ("_unsafe_view", "copy")


def _operator(node: fx.Node) -> OpOverload:
    assert isinstance(node.target, OpOverload)
    return node.target


def _bytes(node: fx.Node) -> int:
    value: Any = node.meta.get("val")
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))

"""Rules about the captured graph of a region."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from deepinfer_neuron.platform.simulator.collectives import (
    broken_collective_rules,
    is_collective,
)
from deepinfer_neuron.platform.simulator.graph_size import measure, symbolic_nodes
from deepinfer_neuron.platform.simulator.integers import wide_integer_misuse
from deepinfer_neuron.platform.simulator.limits import Limits
from deepinfer_neuron.platform.simulator.operator_rules import broken_rules
from deepinfer_neuron.platform.simulator.operators import (
    MATMULS,
    PACKED,
    TO_HOST,
    base_name,
    describe,
    is_view,
)

Found = tuple[str, str, str]
"""Rule, detail, and Python location."""

_READERS = frozenset({"item", "tolist"})


def lint(graph_module: fx.GraphModule, limits: Limits) -> Iterator[Found]:
    """Every violation in a graph of ATen operators."""
    graph = graph_module.graph
    dynamic = symbolic_nodes(graph)
    for node in dynamic:
        yield "G01", f"{node.name} has a size or value that depends on data", location(node)
    if dynamic:
        # No other rule can look at sizes that are not known.
        return
    for node in graph.nodes:
        if isinstance(node.target, OpOverload):
            yield from _node_rules(node, limits)
    for node in wide_integer_misuse(graph):
        yield "D04", describe_node(node), location(node)
    yield from _decoded_weights(graph, limits)
    yield from _constants(graph_module, limits)
    yield from _written_inputs(graph)
    yield from _size_and_groups(graph, limits)


def lint_python(graph_module: fx.GraphModule, limits: Limits) -> Iterator[Found]:
    """What only the graph before decomposition still shows."""
    for node in graph_module.graph.nodes:
        if node.op == "call_method" and node.target in _READERS:
            yield "G07", f"{node.target}() of a tensor", location(node)
        if node.op == "call_function" and getattr(node.target, "__name__", "") == "one_hot":
            value = node.meta.get("example_value")
            classes = value.shape[-1] if isinstance(value, Tensor) else 0
            if classes > limits.one_hot:
                yield "L05", f"one_hot with {classes} classes", location(node)


def _node_rules(node: fx.Node, limits: Limits) -> Iterator[Found]:
    func = node.target
    assert isinstance(func, OpOverload)
    args, kwargs, out = values(node.args), values(node.kwargs), node.meta.get("val")
    rules = list(broken_rules(func, args, kwargs, out, limits))
    if is_collective(func):
        rules += broken_collective_rules(func, args, kwargs, limits.collective)
    if base_name(func) in TO_HOST:
        rules.append("G07")
    if _narrows_interleaved(node):
        rules.append("D09")
    for rule in dict.fromkeys(rules):
        yield rule, describe_node(node), location(node)


def _narrows_interleaved(node: fx.Node) -> bool:
    """Whether this is a cast to int16 of every n-th element of an int32 tensor."""
    value = node.meta.get("val")
    if _call(node) != "_to_copy" or not _is(value, torch.int16):
        return False
    seen, waiting = set(), list(node.all_input_nodes)
    while waiting:
        source = waiting.pop()
        if source in seen or not _is(source.meta.get("val"), torch.int32):
            continue
        seen.add(source)
        if _call(source) == "slice" and len(source.args) > 4 and source.args[4] != 1:
            return True
        waiting += source.all_input_nodes
    return False


def _decoded_weights(graph: fx.Graph, limits: Limits) -> Iterator[Found]:
    """M03: floats made of a packed weight, more at a time than allowed."""
    packed: set[fx.Node] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            if isinstance(value, Tensor) and value.dtype in PACKED and value.dim() > 1:
                packed.add(node)
            continue
        if _call(node) in MATMULS or not packed.intersection(node.all_input_nodes):
            continue
        packed.add(node)
        large = isinstance(value, Tensor) and value.numel() > limits.dequant
        if large and value.dtype.is_floating_point and value.element_size() > 1:
            yield "M03", describe_node(node), location(node)


def _constants(graph_module: fx.GraphModule, limits: Limits) -> Iterator[Found]:
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            value = getattr(graph_module, str(node.target), None)
            size = value.numel() * value.element_size() if isinstance(value, Tensor) else 0
            if size > limits.constant:
                yield "M09", f"a constant of {size} bytes in the graph", location(node)


def _written_inputs(graph: fx.Graph) -> Iterator[Found]:
    """G17: an input that is written in part, or handed back as a view."""
    written: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if _call(node) == "copy" and getattr(node.args[0], "op", "") == "placeholder":
            target, value = node.args
            written[value] = node
            shapes = {tuple(part.meta["val"].shape) for part in (target, value)}
            if len(shapes) > 1:
                yield "G17", describe_node(node), location(node)
    output = next(iter(reversed(graph.nodes)))
    for result in output.all_input_nodes:
        if _root(result) in written:
            yield "G17", f"{result.name} is a view of an input that is written", location(result)


def _root(node: fx.Node) -> fx.Node:
    while isinstance(node.target, OpOverload) and is_view(node.target) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _size_and_groups(graph: fx.Graph, limits: Limits) -> Iterator[Found]:
    tiles = measure(graph).tiles
    if tiles > limits.tiles:
        yield "G11", f"{tiles} tiles of matrix products, {limits.tiles} allowed", ""
    groups = {
        str(node.args[-1]) for node in graph.nodes if is_collective(node.target) and node.args
    }
    if len(groups) > limits.groups:
        yield "G20", f"{len(groups)} groups of ranks in one graph", ""


def values(arguments: Any) -> Any:
    """Arguments of a node with nodes replaced by their fake tensors."""
    return fx.node.map_arg(arguments, lambda node: node.meta.get("val"))


def describe_node(node: fx.Node) -> str:
    """An operator with its shapes."""
    return describe(node.target, values((node.args, node.kwargs)))


def location(node: fx.Node) -> str:
    """File and line of the Python code behind a node."""
    lines = (node.meta.get("stack_trace") or node.stack_trace or "").splitlines()
    frames = [line.strip() for line in lines if line.lstrip().startswith("File ")]
    if not frames:
        return ""
    parts = frames[-1].split(",")
    return f"{parts[0].removeprefix('File ').strip(chr(34))}:{parts[1].split()[-1]}"


def _call(node: Any) -> str:
    target = getattr(node, "target", None)
    return base_name(target) if isinstance(target, OpOverload) else ""


def _is(value: object, dtype: torch.dtype) -> bool:
    return isinstance(value, Tensor) and value.dtype == dtype

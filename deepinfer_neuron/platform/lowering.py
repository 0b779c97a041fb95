"""Regions as StableHLO, made and run without an accelerator.

The Neuron compiler takes StableHLO, to which its PyTorch front end lowers a graph by way of
torch-mlir. The same route from the public packages (extra ``lowering``) shows on any machine
whether a region can be lowered, what the graph holds, and what it computes when XLA runs it on
the CPU. It says nothing about an accelerator's speed, memory, or rounding of special functions.

Usage::

    lowered = lower(Attention.decode, module, (x, cache))   # the method, decorated or not
    assert not scan(lowered.text)
    run = execute(lowered, module, (x, cache))
    run.outputs      # what the method returns, flattened
    run.mutated      # tensors it wrote to, as they are afterwards: {"args.1": ...}

Parameters, buffers and arguments are inputs of the graph, never constants, so layers of one kind
give the same text. A tensor that is none of these is refused.
"""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from deepinfer_neuron.errors import PlatformError

# Folds what torch-mlir writes around numbers and index ranges, and drops unused sort payloads.
_CLEANUP = "builtin.module(func.func(stablehlo-aggressive-simplification,canonicalize,cse))"


@dataclass(frozen=True)
class Lowered:
    """A region as text.

    Attributes:
        text: one StableHLO module with the function ``main``.
        inputs: names of its inputs in order: ``module.<parameter or buffer>`` or ``args.<i>``,
            counting the tensors of the arguments. What the region does not read is left out.
        mutated: names of the inputs that the region writes to; their new contents come before the
            outputs.
    """

    text: str
    inputs: tuple[str, ...]
    mutated: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """Results of :func:`execute`.

    Attributes:
        outputs: tensors that the region returns, flattened.
        mutated: new contents of the inputs that it writes to, by name.
    """

    outputs: tuple[Tensor, ...]
    mutated: dict[str, Tensor]


def lower(function: Callable[..., Any], module: nn.Module, args: tuple[Any, ...]) -> Lowered:
    """Lower ``function(module, *args)``.

    Args:
        function: a region of the module's class, or any function of a module and arguments.
        module: its parameters and buffers become inputs.
        args: tensors, nested tuples of them, and frozen dataclasses of sizes, which are constants.

    Raises:
        PlatformError: torch-mlir is missing, the region cannot be lowered, or it holds a constant
            tensor.
    """
    frontend = _needed("torch_mlir.fx", "torch-mlir")
    function = inspect.unwrap(function)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        graph, inputs, mutated = _traced(function, module, args)
        try:
            lowered = frontend.stateless_fx_import(graph, output_type="stablehlo")
        except Exception as error:
            # torch-mlir raises plain exceptions with a text of its own.
            raise PlatformError(f"{_name(function)} cannot be lowered: {error}") from error
    return Lowered(_clean(lowered), inputs, mutated)


def execute(lowered: Lowered, module: nn.Module, args: tuple[Any, ...]) -> Run:
    """Run a lowered region on the CPU through XLA.

    bf16 values are rounded wherever the graph says so. XLA's CPU flushes subnormal numbers.

    Args:
        lowered: from :func:`lower` with arguments of the same shapes.
        module: where parameters and buffers come from.
        args: as for :func:`lower`; nothing is written to them.

    Raises:
        PlatformError: jax is missing, or XLA cannot compile the text.
    """
    jax = _needed("jax", "jax")
    client = _needed("jaxlib.xla_client", "jaxlib")
    tensors = _inputs(module, args)
    device = jax.devices("cpu")[0]
    options = client.CompileOptions()
    options.env_option_overrides = [("xla_allow_excess_precision", False)]
    # Regions run once: most of the time goes into compiling them.
    options.executable_build_options.debug_options.xla_backend_optimization_level = 0
    try:
        compiled = device.client.compile_and_load(lowered.text, [device], options)
    except client.XlaRuntimeError as error:
        raise PlatformError(f"XLA cannot compile the lowered region: {error}") from error
    values = [jax.device_put(_array(tensors[name]), device) for name in lowered.inputs]
    results = [_tensor(value) for value in compiled.execute(values)]
    count = len(lowered.mutated)
    return Run(tuple(results[count:]), dict(zip(lowered.mutated, results[:count], strict=True)))


def _traced(
    function: Callable[..., Any], module: nn.Module, args: tuple[Any, ...]
) -> tuple[fx.GraphModule, tuple[str, ...], tuple[str, ...]]:
    """The functional graph, the names of its inputs, and of those it leaves new contents for."""
    tensors = _inputs(module, args)
    leaves, tree = pytree.tree_flatten(args)
    call = _Call(function, module)

    def flat(*values: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(tensors, values, strict=True))
        given = iter([value for name, value in named.items() if name.startswith("args.")])
        filled = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        state = {name: value for name, value in named.items() if name.startswith("module.")}
        result = torch.func.functional_call(call, state, tuple(pytree.tree_unflatten(filled, tree)))
        return tuple(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))

    table = _needed("torch_mlir.extras.fx_decomp_util", "torch-mlir").get_decomposition_table()
    trace = make_fx(
        torch.func.functionalize(flat), table, tracing_mode="fake", _allow_non_fake_inputs=True
    )
    try:
        graph = trace(*tensors.values())
    except Exception as error:
        raise PlatformError(f"{_name(function)} cannot be traced: {error}") from error
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and any(
            isinstance(size, torch.SymInt) for size in value.shape
        ):
            raise PlatformError(
                f"{_name(function)} makes a tensor whose shape depends on data ({node.target}); "
                "a region has static shapes, so mask instead of selecting"
            )
    constants = [str(node.target) for node in graph.graph.nodes if node.op == "get_attr"]
    if constants:
        raise PlatformError(
            f"{_name(function)} holds {len(constants)} tensors that are neither parameters, "
            "buffers nor arguments; register them as buffers"
        )
    return graph, *_interface(graph, list(tensors))


class _Call(nn.Module):
    """The function as a module's forward, so that its state can be replaced."""

    def __init__(self, function: Callable[..., Any], module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._function = function

    def forward(self, *args: Any) -> Any:
        return self._function(self.module, *args)


def _inputs(module: nn.Module, args: tuple[Any, ...]) -> dict[str, Tensor]:
    """All tensors a region can read, by name; a tensor with two names appears once."""
    state = [*module.named_parameters(), *module.named_buffers()]
    tensors = {f"module.{name}": tensor.detach() for name, tensor in state}
    given = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
    tensors.update({f"args.{index}": tensor for index, tensor in enumerate(given)})
    return tensors


def _interface(graph: fx.GraphModule, names: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Turn writes to inputs into leading outputs, and drop the inputs that nothing reads.

    Returns:
        names of the remaining inputs, and of those whose new contents lead the outputs.
    """
    nodes = list(graph.graph.nodes)
    name_of = dict(zip((node for node in nodes if node.op == "placeholder"), names, strict=True))
    contents = {}
    for node in nodes:
        # Tracing leaves one copy behind the computation for each input that was written to.
        if node.target is torch.ops.aten.copy_.default and node.args[0] in name_of:
            contents[name_of[node.args[0]]] = node.args[1]
            node.replace_all_uses_with(node.args[1])
            graph.graph.erase_node(node)
    output = nodes[-1]
    output.args = ((*contents.values(), *output.args[0]),)
    graph.graph.eliminate_dead_code()
    for node in name_of:
        if not node.users:
            graph.graph.erase_node(node)
    graph.recompile()
    return tuple(name for node, name in name_of.items() if node.users), tuple(contents)


def _clean(lowered: Any) -> str:
    """Text of a module with literals and index ranges folded."""
    ir = _needed("torch_mlir.ir", "torch-mlir")
    passes = _needed("torch_mlir.passmanager", "torch-mlir")
    with lowered.context:
        # The same operation; only this spelling is known to the folding patterns.
        text = str(lowered).replace("arith.constant", "stablehlo.constant")
        module = ir.Module.parse(text)
        passes.PassManager.parse(_CLEANUP).run(module.operation)
        return str(module)


def _array(tensor: Tensor) -> Any:
    """A numpy array of a tensor's values."""
    if tensor.dtype in (torch.int64, torch.float64):
        raise PlatformError(f"a region takes no {tensor.dtype}; give a 32-bit tensor")
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        bfloat16 = _needed("ml_dtypes", "jaxlib").bfloat16
        return tensor.view(torch.int16).numpy().view(bfloat16)
    return tensor.numpy()


def _tensor(value: Any) -> Tensor:
    """A tensor of a result of XLA."""
    numpy = importlib.import_module("numpy")
    array = numpy.array(value)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(numpy.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _needed(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PlatformError(
            f"lowering needs the package {package}, which is not installed; install "
            "deepinfer-neuron[lowering]"
        ) from error


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


_FORBIDDEN = {
    "float8": re.compile(r"tensor<[^>]*f8E\w+>"),
    "complex": re.compile(r"complex<"),
    "dynamic shape": re.compile(
        r"tensor<[^>]*\?|stablehlo\.(?:real_)?dynamic_(?!slice|update_slice)"
    ),
}
# What may be done with int64 indices.
_MOVES = frozenset(
    {"broadcast_in_dim", "concatenate", "constant", "convert", "gather", "iota", "pad", "region"}
    | {"reshape", "return", "scatter", "slice", "sort", "transpose"}
)
_SORT = re.compile(r'stablehlo\.sort"?\(([^)]*)\)')
_STEP = re.compile(r"\d+:\d+:\d+")
_INTEGERS = re.compile(r"tensor<(?:\d+x)*u?i\d+>")
_OPERATION = re.compile(r"stablehlo\.(\w+)")
_TYPE = re.compile(r"tensor<((?:\d+x)*)([a-z]\w*)>")


def scan(text: str) -> tuple[str, ...]:
    """What a lowered region holds that an accelerator does not take.

    Looked for: fp64 and arithmetic on int64 (single numbers are literals and pass, as do int64
    indices that are only made, moved and used), float8 and complex types, dynamic shapes, slices
    with a step, matrix products of integers, and sorts that carry a second tensor, whose order
    among equals is not defined unless they are stable, and which are slow if they are.

    Args:
        text: StableHLO of :func:`lower`.

    Returns:
        one line per finding, without repetitions; empty for a clean region.
    """
    return tuple(dict.fromkeys(_findings(text)))


def _findings(text: str) -> Iterator[str]:
    opened: list[str] = []
    for line in text.splitlines():
        operation = _OPERATION.search(line)
        name = operation.group(1) if operation else "region"
        if line.lstrip().startswith("})") and opened:
            # The types of an operation with a body follow the body.
            name = opened.pop()
        elif line.rstrip().endswith("({"):
            opened.append(name)
        yield from _line_findings(line, name)


def _line_findings(line: str, name: str) -> Iterator[str]:
    kinds = [(kind, _elements(shape)) for shape, kind in _TYPE.findall(line)]
    wide = {kind for kind, count in kinds if count > 1}
    if "f64" in wide:
        yield f"f64: {name}"
    if "i64" in wide and name not in _MOVES:
        yield f"i64: {name}"
    if "func.func" in line and any(kind == "i64" for kind, _ in kinds):
        yield "i64: input or output"
    for label, pattern in _FORBIDDEN.items():
        if pattern.search(line):
            yield f"{label}: {name}"
    if name == "slice" and _STEP.search(line):
        yield "slice with a step"
    if name == "dot_general" and _INTEGERS.search(line):
        yield "product of integers"
    sort = _SORT.search(line)
    if sort is not None and "," in sort.group(1):
        yield "sort with a payload"


def _elements(shape: str) -> int:
    count = 1
    for size in shape.split("x")[:-1]:
        count *= int(size)
    return count

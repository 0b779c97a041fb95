"""Regions on the simulated device: captured, checked, and run on the host."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload

from deepinfer_neuron.platform.regions import RegionKey, Signature
from deepinfer_neuron.platform.simulator import graph_rules
from deepinfer_neuron.platform.simulator.counts import GraphReport, add_one
from deepinfer_neuron.platform.simulator.device import unwrap, wrap
from deepinfer_neuron.platform.simulator.graph_size import measure, symbolic_nodes
from deepinfer_neuron.platform.simulator.indices import check_indices
from deepinfer_neuron.platform.simulator.operators import Indexing, indexings
from deepinfer_neuron.platform.simulator.region_rules import check_inputs, check_outputs
from deepinfer_neuron.platform.simulator.shadows import Shadows
from deepinfer_neuron.platform.simulator.simulator import Simulator


class SimulatedBackend:
    """Captures every region as a graph, as the Neuron backend would, and runs it on the host.

    Args:
        simulator: the device.
    """

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self._shadows = Shadows()
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._captures: dict[tuple[RegionKey, Signature], int] = {}
        self._known: set[tuple[RegionKey, Signature]] = set()
        self._graphs: dict[Callable[..., Any], int] = {}
        self._sealed = False
        self._running: _Call | None = None

    def seal(self) -> None:
        """A graph that is new from here on breaks G02."""
        self._sealed = True

    def run(
        self,
        key: RegionKey,
        signature: Signature,
        function: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
    ) -> Any:
        """One launch.

        Raises:
            DeviceRuleError: a rule is broken and the mode is strict.
        """
        simulator = self.simulator
        simulator.counts.regions += 1
        add_one(simulator.counts.by_region, str(key))
        simulator.record(f"{key} {signature}")
        if simulator.checking:
            check_inputs(simulator, key, module, args)
        # Not every signature has a graph of its own: two kinds may be of one structure.
        if (key, signature) not in self._known:
            if self._sealed:
                simulator.violate("G02", f"{key} with {signature} after warm-up")
            self._known.add((key, signature))
        call = _Call(key, signature, function)
        out = self._launch(call, self._shadows.of(module), unwrap(args))
        if simulator.checking:
            check_outputs(simulator, key, out)
        return wrap(out, simulator)

    def _launch(self, call: _Call, shadow: nn.Module, args: tuple[Any, ...]) -> Any:
        compiled = self._compiled.get(call.function)
        if compiled is None:
            compiled = torch.compile(
                call.function, backend=self._capture, fullgraph=True, dynamic=False
            )
            self._compiled[call.function] = compiled
        unsupported = (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError)
        # The limit of torch holds for everything that ever captured this method.
        most = {"recompile_limit": 2**20, "accumulated_recompile_limit": 2**20}
        outer, self._running = self._running, call
        try:
            with torch.inference_mode(False), torch.no_grad(), torch._dynamo.config.patch(most):
                return compiled(shadow, *args)
        except unsupported as error:
            self.simulator.violate(_rule_of(error), f"{call.key}: {_first_line(error)}")
            return call.function(shadow, *args)
        finally:
            self._running = outer

    def _capture(self, graph_module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Backend of ``torch.compile``: called once per graph."""
        # Loads the compiler front end, which takes a second.
        from torch._dynamo.backends.common import aot_autograd

        call = self._running
        assert call is not None
        found = list(graph_rules.lint_python(graph_module, self.simulator.limits))

        def compile_aten(aten: fx.GraphModule, fake: list[Any]) -> Callable[..., Any]:
            return self._compile(call, found, aten)

        capture = aot_autograd(
            fw_compiler=compile_aten,
            inference_compiler=compile_aten,
            keep_inference_input_mutations=True,
        )
        captured: Callable[..., Any] = capture(graph_module, inputs)
        return captured

    def _compile(
        self, call: _Call, found: list[graph_rules.Found], aten: fx.GraphModule
    ) -> Callable[..., Any]:
        """Check a graph of ATen operators and make it runnable."""
        simulator = self.simulator
        if simulator.checking:
            found = found + list(graph_rules.lint(aten, simulator.limits)) + self._repeats(call)
        report = _report(call, aten.graph)
        simulator.graphs.append(report)
        simulator.counts.graphs += 1
        self._captures[call.key, call.signature] = (
            self._captures.get((call.key, call.signature), 0) + 1
        )
        if simulator.checking and not symbolic_nodes(aten.graph):
            _insert_index_checks(aten, simulator)
        return _Graph(simulator, report, list(dict.fromkeys(found)), aten)

    def _repeats(self, call: _Call) -> list[graph_rules.Found]:
        """G03 and G04: too many graphs of a method, and more than one for a signature."""
        limit = self.simulator.limits.graphs
        self._graphs[call.function] = self._graphs.get(call.function, 0) + 1
        found = []
        if self._graphs[call.function] > limit:
            found.append(("G03", f"more than {limit} graphs of {call.key}", ""))
        if (call.key, call.signature) in self._captures:
            detail = f"{call.key} was captured again for {call.signature}"
            found.append(("G04", detail, ""))
        return found


class _Call:
    """The region that is being launched."""

    def __init__(self, key: RegionKey, signature: Signature, function: Callable[..., Any]) -> None:
        self.key = key
        self.signature = signature
        self.function = function


class _Graph:
    """A captured graph; every launch reports what is wrong with it."""

    _boxed_call = True
    """Tells torch that the arguments come as one list."""

    def __init__(
        self,
        simulator: Simulator,
        report: GraphReport,
        found: list[graph_rules.Found],
        graph_module: fx.GraphModule,
    ) -> None:
        self._simulator = simulator
        self._report = report
        self._found = found
        self._forward = graph_module.forward

    def __call__(self, args: list[Any]) -> Any:
        simulator = self._simulator
        # Here and not at the capture, where torch would wrap the error into one of its own.
        for rule, detail, where in self._found:
            simulator.violate(rule, f"{self._report.region}: {detail}", where)
        simulator.launched(self._report.size)
        return self._forward(*args)


def _report(call: _Call, graph: fx.Graph) -> GraphReport:
    return GraphReport(
        region=str(call.key),
        signature=str(call.signature),
        size=measure(graph),
        text=hashlib.sha256(str(graph).encode()).hexdigest()[:16],
    )


def _insert_index_checks(graph_module: fx.GraphModule, simulator: Simulator) -> None:
    """Look at the indices of every gather and scatter before it runs."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if not isinstance(node.target, OpOverload):
            continue
        shape_of = lambda source: source.meta["val"].shape  # noqa: E731
        for indexing in indexings(node.target, node.args, shape_of):
            if isinstance(indexing.index, fx.Node):
                check = _index_check(simulator, indexing.size, node)
                with graph.inserting_before(node):
                    graph.call_function(check, (indexing.index,))
    graph_module.recompile()


def _index_check(simulator: Simulator, size: int, node: fx.Node) -> Callable[[Any], None]:
    detail, where = graph_rules.describe_node(node), graph_rules.location(node)

    def check_index(index: Any) -> None:
        check_indices(simulator, Indexing(index, size), detail, where)

    return check_index


def _rule_of(error: Exception) -> str:
    """The rule behind a region that cannot be captured."""
    text = str(error)
    if "Data-dependent" in text or "tolist" in text or "item()" in text:
        return "G07"
    return "G01" if "ynamic" in text and "shape" in text else "G06"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]

"""Regions lowered to StableHLO, run through XLA, and compared with their eager results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from deepinfer_neuron.platform.lowering import Lowered, execute, lower, scan
from deepinfer_neuron.platform.regions import PlainBackend, RegionKey, Signature
from tests.ops.number_formats import same_bits

FirstCall = tuple[Callable[..., Any], nn.Module, tuple[Any, ...]]
Compare = Callable[[Tensor, Tensor], bool]


class Recorder(PlainBackend):
    """Runs regions plainly and keeps what each module was first called with, ready to be lowered.

    ::

        recorder = Recorder()
        ...  # run a network whose regions are Regions(recorder)
        for (function, module, args), *other_layers in recorder.graphs.values():
            check_region(function, module, args, within(2**-7, 2**-9))

    Attributes:
        graphs: per graph, the first call of every module that would run it.
    """

    def __init__(self) -> None:
        self.graphs: dict[tuple[RegionKey, Signature], list[FirstCall]] = {}

    def run(
        self,
        key: RegionKey,
        signature: Signature,
        function: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
    ) -> Any:
        """The plain call."""
        calls = self.graphs.setdefault((key, signature), [])
        if all(module is not known for _, known, _ in calls):
            # Regions write to caches: keep the arguments as they are now, and open to writing.
            with torch.inference_mode(False):
                calls.append((function, module, copy.deepcopy(args)))
        return super().run(key, signature, function, module, args)


class Stateless(nn.Module):
    """For functions of tensors only."""


def within(relative: float, absolute: float = 0.0) -> Compare:
    """A comparison for results that a compiler may round differently."""

    def close(a: Tensor, b: Tensor) -> bool:
        if not (a.is_floating_point() and b.is_floating_point()):
            return same_bits(a, b)
        same_kind = a.dtype == b.dtype and a.shape == b.shape
        return same_kind and torch.allclose(a.float(), b.float(), relative, absolute)

    return close


def check_region(
    function: Callable[..., Any],
    module: nn.Module,
    args: tuple[Any, ...],
    compare: Compare = same_bits,
    written: Compare | None = None,
) -> Lowered:
    """Lower a region, run it, and compare outputs and written tensors with an eager call.

    Args:
        function: the raw or decorated method.
        module: left as it is.
        args: left as they are.
        compare: whether a result is good enough.
        written: whether what was written to a tensor is, if that is another question.

    Returns:
        the lowered region, for further checks.
    """
    lowered = lower(function, module, args)
    findings = scan(lowered.text)
    assert not findings, findings
    check_run(lowered, function, module, args, compare, written)
    return lowered


def check_run(
    lowered: Lowered,
    function: Callable[..., Any],
    module: nn.Module,
    args: tuple[Any, ...],
    compare: Compare = same_bits,
    written: Compare | None = None,
) -> None:
    """Run a region that is lowered already, perhaps of another module or with other arguments, and
    compare; see :func:`check_region`."""
    run = execute(lowered, module, args)
    # The registry leads to all that a recorder holds.
    regions = getattr(module, "regions", None)
    eager_module, eager_args = copy.deepcopy((module, args), {id(regions): regions})
    with torch.no_grad():
        result = getattr(function, "__wrapped__", function)(eager_module, *eager_args)
    outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    assert len(outputs) == len(run.outputs)
    for place, (ours, expected) in enumerate(zip(run.outputs, outputs, strict=True)):
        assert compare(ours, expected), f"output {place}: {_difference(ours, expected)}"
    after = _named(eager_module, eager_args)
    before = _named(module, args)
    for name, tensor in after.items():
        if name in run.mutated:
            ours = run.mutated[name]
            assert (written or compare)(ours, tensor), f"{name}: {_difference(ours, tensor)}"
        else:
            assert same_bits(tensor, before[name]), f"{name} is written to outside of the graph"


def check_function(
    function: Callable[..., Any], *args: Any, compare: Compare = same_bits
) -> Lowered:
    """The same for a function of tensors."""

    def call(module: nn.Module, *values: Any) -> Any:
        return function(*values)

    return check_region(call, Stateless(), args, compare)


def _difference(ours: Tensor, expected: Tensor) -> str:
    if ours.dtype != expected.dtype or ours.shape != expected.shape:
        return f"{ours.dtype} {list(ours.shape)} for {expected.dtype} {list(expected.shape)}"
    wide, other = ours.to(torch.float64), expected.to(torch.float64)
    count = int((wide != other).sum())
    return f"{count} of {ours.numel()} differ, by up to {float((wide - other).abs().max())}"


def _named(module: nn.Module, args: tuple[Any, ...]) -> dict[str, Tensor]:
    state = [*module.named_parameters(), *module.named_buffers()]
    named = {f"module.{name}": tensor.detach() for name, tensor in state}
    given = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
    named.update({f"args.{place}": tensor for place, tensor in enumerate(given)})
    return named

"""Regions lowered to StableHLO, run through XLA, and compared with their eager results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from deepinfer_neuron.platform.lowering import Lowered, execute, lower, scan
from tests.ops.number_formats import same_bits

Compare = Callable[[Tensor, Tensor], bool]


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
) -> Lowered:
    """Lower a region, run it, and compare outputs and written tensors with an eager call.

    Args:
        function: the raw or decorated method.
        module: left as it is.
        args: left as they are.
        compare: whether a result is good enough.

    Returns:
        the lowered region, for further checks.
    """
    lowered = lower(function, module, args)
    assert scan(lowered.text) == ()
    run = execute(lowered, module, args)
    eager_module, eager_args = copy.deepcopy((module, args))
    with torch.no_grad():
        result = getattr(function, "__wrapped__", function)(eager_module, *eager_args)
    outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    assert len(outputs) == len(run.outputs)
    for ours, expected in zip(run.outputs, outputs, strict=True):
        assert compare(ours, expected)
    after = _named(eager_module, eager_args)
    before = _named(module, args)
    for name, tensor in after.items():
        if name in run.mutated:
            assert compare(run.mutated[name], tensor), name
        else:
            assert same_bits(tensor, before[name]), f"{name} is written to outside of the graph"
    return lowered


def check_function(
    function: Callable[..., Any], *args: Any, compare: Compare = same_bits
) -> Lowered:
    """The same for a function of tensors."""

    def call(module: nn.Module, *values: Any) -> Any:
        return function(*values)

    return check_region(call, Stateless(), args, compare)


def _named(module: nn.Module, args: tuple[Any, ...]) -> dict[str, Tensor]:
    state = [*module.named_parameters(), *module.named_buffers()]
    named = {f"module.{name}": tensor.detach() for name, tensor in state}
    given = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
    named.update({f"args.{place}": tensor for place, tensor in enumerate(given)})
    return named

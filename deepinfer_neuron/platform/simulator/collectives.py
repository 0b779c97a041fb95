"""Rules of collective operations, outside regions and in their graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._ops import OpOverload

from deepinfer_neuron.platform.simulator.device import unwrap, wrap
from deepinfer_neuron.platform.simulator.operators import (
    base_name,
    describe,
    is_integer,
    namespace,
    tensors_in,
)

if TYPE_CHECKING:
    from deepinfer_neuron.platform.simulator.simulator import Simulator

_BROADCASTS = frozenset({"broadcast"})
_ONE_TO_ONE = frozenset({"recv", "recv_any_source", "send"})
_REDUCTIONS = frozenset(
    {
        "_reduce_scatter_base",
        "all_reduce",
        "all_reduce_coalesced",
        "allreduce",
        "allreduce_coalesced",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
    }
)
_EXCHANGES = frozenset({"all_to_all_single", "alltoall", "alltoall_base"})
_LEAST_EXCHANGE = 4
NAMESPACES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d"})


def is_collective(func: object) -> bool:
    """Whether ``func`` talks to other ranks; waiting for one does not count."""
    return (
        isinstance(func, OpOverload)
        and namespace(func) in NAMESPACES
        and base_name(func) != "wait_tensor"
    )


def broken_collective_rules(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], largest: int
) -> Iterator[str]:
    """Ids of the rules that a collective breaks; ``largest`` in bytes."""
    name = base_name(func)
    tensors = list(tensors_in((args, kwargs)))
    if name in _BROADCASTS:
        yield "C02"
    if name in _ONE_TO_ONE:
        yield "C04"
    if name in _REDUCTIONS and any(is_integer(tensor.dtype) for tensor in tensors):
        yield "D05"
    if any(tensor.numel() == 0 for tensor in tensors):
        yield "L06"
    if any(tensor.numel() * tensor.element_size() > largest for tensor in tensors):
        yield "M07"
    if name in _EXCHANGES and _is_uneven(func, args, kwargs):
        yield "C03"
    ranks = group_ranks(func, args, kwargs)
    if ranks is not None:
        yield from _group_rules(name, ranks)


def _group_rules(name: str, ranks: Sequence[int]) -> Iterator[str]:
    size = len(ranks)
    contiguous = list(ranks) == list(range(ranks[0], ranks[0] + size))
    pairs = name in _EXCHANGES and 1 < size < _LEAST_EXCHANGE
    if not contiguous or size & (size - 1) or pairs:
        yield "C05"
    if name == "barrier" and size != dist.get_world_size():
        yield "C04"


def _is_uneven(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    named = _by_name(func, args, kwargs)
    splits = [named.get("output_split_sizes") or [], named.get("input_split_sizes") or []]
    return any(len(set(sizes)) > 1 for sizes in splits)


def group_ranks(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sequence[int] | None:
    """The ranks of a collective's group, or ``None`` if this process knows no such group."""
    if not dist.is_initialized():
        return None
    named = _by_name(func, args, kwargs)
    group = named.get("group_name")
    boxed = named.get("process_group")
    try:
        if isinstance(group, str):
            group = getattr(dist.distributed_c10d, "_resolve_process_group")(group)  # noqa: B009
        elif boxed is not None:
            group = dist.ProcessGroup.unbox(boxed)
        return sorted(dist.get_process_group_ranks(group)) if group is not None else None
    except (RuntimeError, ValueError, KeyError):
        return None


def _by_name(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    arguments = func._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    given = dict(zip((argument.name for argument in arguments), args, strict=False))
    return {**defaults, **given, **kwargs}


def run_eager_collective(
    simulator: Simulator, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A collective on tensors of the device, outside a region: over the host's group."""
    detail = describe(func, (args, kwargs))
    if is_collective(func):
        simulator.counts.collectives += 1
        moved = next(tensors_in((args, kwargs)), None)
        if moved is not None:
            simulator.counts.collective_bytes += moved.numel() * moved.element_size()
        simulator.record(detail)
        if simulator.checking:
            limit = simulator.limits.collective
            for rule in broken_collective_rules(func, args, kwargs, limit):
                simulator.violate(rule, detail)
            if simulator.in_step:
                simulator.violate("C10", f"{detail} outside a region")
    out = func(*unwrap(args), **unwrap(kwargs))
    if namespace(func) != "c10d":
        return wrap(out, simulator)
    if _by_name(func, args, kwargs).get("async_op") is True:
        simulator.violate("C07", detail)
    # The results are written into the arguments.
    return (args[0], *out[1:]) if isinstance(out, tuple) else out

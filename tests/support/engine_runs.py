"""Runs of the engine's network over token ids, and a look into its caches afterwards."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_neuron.checkpoint.reader import Checkpoint
from deepinfer_neuron.model.step import StepTensors
from deepinfer_neuron.ops.arithmetic import (
    Arithmetic,
    FixedOrder,
    FreeOrder,
    fixed_arithmetic,
    free_arithmetic,
)
from deepinfer_neuron.reference import Network, Rounding
from deepinfer_neuron.runner.pack import ChunkPlan, pack
from deepinfer_neuron.runner.worker import Worker, blocks_for

MAX_LENGTH = 1024


@dataclass(frozen=True)
class Sides:
    """The reference and the engine, set up to compute the same."""

    network: Network
    worker: Worker


def unrounded(checkpoint: Checkpoint) -> Sides:
    """Both without any rounding point: fp32 all the way, sums in torch's order."""
    arithmetic = Arithmetic(FreeOrder(), rounding=False)
    return Sides(Network(checkpoint, Rounding(enabled=False)), make_worker(checkpoint, arithmetic))


def free_order(checkpoint: Checkpoint) -> Sides:
    """Both with every rounding point, sums in torch's order."""
    return Sides(Network(checkpoint), make_worker(checkpoint, free_arithmetic()))


def fixed_order(checkpoint: Checkpoint) -> Sides:
    """Both with every rounding point and the same order of every sum."""
    return Sides(Network(checkpoint, ops=FixedOrder()), make_worker(checkpoint, fixed_arithmetic()))


def make_worker(checkpoint: Checkpoint, arithmetic: Arithmetic, *, expanded: bool = True) -> Worker:
    """A worker without caches; weights are expanded by default because that runs faster."""
    return Worker(checkpoint, arithmetic, expanded=expanded, max_length=MAX_LENGTH)


def random_ids(checkpoint: Checkpoint, count: int, seed: int = 0) -> list[int]:
    """Token ids drawn from the whole vocabulary; a shorter draw is a prefix of a longer one."""
    draw = random.Random(seed)
    return [draw.randrange(checkpoint.config.vocab_size) for _ in range(count)]


@dataclass(frozen=True)
class Request:
    """Token ids, and where their keys live in a worker's caches."""

    ids: Sequence[int]
    slot: int
    table: Sequence[int]

    @classmethod
    def alone(cls, ids: Sequence[int]) -> Request:
        """Slot 1 and the lowest blocks, last one first."""
        return cls(ids, 1, list(range(blocks_for(len(ids)), 0, -1)))

    def plan(self, worker: Worker, start: int, stop: int) -> ChunkPlan:
        """The chunk of positions ``[start, stop)``."""
        rows = worker.engram_rows([(worker.compress(self.ids[:stop]), start)])
        return ChunkPlan(self.ids[start:stop], start, self.slot, self.table, rows, True)


def spans(length: int, cuts: Sequence[int]) -> list[tuple[int, int]]:
    """The chunks ``(start, stop)`` of a prompt that is cut at the given positions."""
    edges = [0, *cuts, length]
    return list(itertools.pairwise(edges))


def whole_step(worker: Worker, plans: Sequence[ChunkPlan]) -> StepTensors:
    """A step that gives the logits of all its rows, not only of each chunk's last."""
    step = pack(plans, worker.geometry)
    return dataclasses.replace(step, output_rows=torch.arange(len(step.token_ids)))


def run_step(worker: Worker, plans: Sequence[ChunkPlan]) -> list[Tensor]:
    """Logits ``[rows, V]`` of each plan after one step."""
    with torch.inference_mode():
        logits = worker.network(whole_step(worker, plans), worker.caches)
    return list(logits.split([len(plan.token_ids) for plan in plans]))


def run_alone(worker: Worker, ids: Sequence[int], cuts: Sequence[int] = ()) -> Tensor:
    """Logits ``[n, V]`` of a prompt in fresh caches, chunk by chunk."""
    request = Request.alone(ids)
    worker.allocate(len(request.table), 1)
    chunks = [request.plan(worker, *span) for span in spans(len(ids), cuts)]
    return torch.cat([run_step(worker, [chunk])[0] for chunk in chunks])


def cached_records(worker: Worker, request: Request, length: int) -> dict[str, Tensor]:
    """What the caches hold for a sequence of ``length`` tokens, by layer and kind.

    Records are found by the addresses that the cache layout prescribes: entry ``j`` of ratio ``r``
    is the ``j mod (128 / r)``-th of block ``table[j // (128 / r)]``, position ``p`` the
    ``p mod ring``-th of the slot's ring. An index record's scales follow its data.
    """
    found: dict[str, Tensor] = {}
    for spec, cache in zip(worker.config.layers, worker.caches, strict=True):
        name = f"layer {spec.index}"
        found[f"{name} window"] = _ring(cache.window.records, cache.window.length, request, length)
        if cache.pairs is not None:
            found[f"{name} pairs"] = _ring(cache.pairs.state, cache.pairs.length, request, length)
        if spec.ratio == 0:
            continue
        per_block = 128 // spec.ratio
        entry = torch.arange(length // spec.ratio)
        block, place = torch.tensor(request.table)[entry // per_block], entry % per_block
        if cache.compressed is not None:
            found[f"{name} compressed"] = cache.compressed.records[block * per_block + place]
        if cache.index is not None:
            width = cache.index.codec.data_width * per_block
            sections = (cache.index.blocks[:, :width], cache.index.blocks[:, width:])
            parts = [section.unflatten(1, (per_block, -1))[block, place] for section in sections]
            found[f"{name} index"] = torch.cat(parts, 1)
    return found


def _ring(state: Tensor, size: int, request: Request, length: int) -> Tensor:
    position = torch.arange(max(0, length - size), length)
    return state[request.slot * size + position % size]


def differing(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    """Names under which two collections of records differ in any bit."""
    assert first.keys() == second.keys()
    return [name for name, records in first.items() if not torch.equal(records, second[name])]

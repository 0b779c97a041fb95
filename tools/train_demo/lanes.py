"""Two processes that share the weights and halve the work of a step.

Each lane computes the gradients of its sequences into shared memory, then updates its share of the
weights. A lane runs single-threaded, so nothing waits inside an operation when the machine is busy
with other work. The sums have a fixed order: the same number of lanes gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Protocol

import torch
import torch.multiprocessing as processes
from torch import Tensor

from deepinfer_neuron.errors import PlatformError
from tools.train_demo.optimizer import Optimizer


@dataclass(frozen=True)
class Share:
    """What a lane reports of a step."""

    losses: dict[str, float]
    loads: dict[str, Tensor]


class Worker(Protocol):
    """The part of a step that differs between trainings."""

    def gradients(self, step: int, seen: int, lane: int, lanes: int) -> Share:
        """Compute this lane's gradients into its buffers."""


@dataclass
class Memory:
    """Shared tensors: weights, moments, and the gradients of every lane."""

    masters: dict[str, Tensor]
    optimizer: Optimizer
    gradients: list[dict[str, Tensor]] = field(default_factory=list)

    @classmethod
    def make(
        cls, masters: dict[str, Tensor], optimizer: Optimizer, trained: list[str], lanes: int
    ) -> Memory:
        """Move everything into shared memory."""
        for tensor in masters.values():
            tensor.share_memory_()
        optimizer.allocate({name: masters[name] for name in trained})
        buffers = [
            {name: torch.zeros_like(masters[name]).share_memory_() for name in trained}
            for _ in range(lanes)
        ]
        return cls(masters, optimizer, buffers)

    def share_of(self, lane: int) -> list[str]:
        """The trained weights that a lane updates, about equal work each."""
        names = list(self.gradients[0])
        costs = [0.0] * len(self.gradients)
        owner = {}
        for name in sorted(names, key=lambda n: (-self.optimizer.cost(n, self.masters[n]), n)):
            owner[name] = costs.index(min(costs))
            costs[owner[name]] += self.optimizer.cost(name, self.masters[name])
        return [name for name in names if owner[name] == lane]

    def average(self, lane: int) -> float:
        """Average a lane's share of the gradients into the first buffer; returns its square."""
        total = 0.0
        for name in self.share_of(lane):
            mean = self.gradients[0][name]
            for other in self.gradients[1:]:
                mean.add_(other[name])
            mean.div_(len(self.gradients))
            total += float(mean.square().sum())
        return total

    def update(self, lane: int, factor: float, clip: float, count: int) -> None:
        """Update a lane's share of the weights."""
        grads = {name: self.gradients[0][name] for name in self.share_of(lane)}
        self.optimizer.update(self.masters, grads, factor, clip, count)


Maker = Callable[[Memory], Worker]


class Lanes:
    """The lanes of a training; the first one is this process.

    Args:
        memory: shared tensors.
        make: builds a lane's worker; called in the lane's process.
    """

    def __init__(self, memory: Memory, make: Maker) -> None:
        self._memory = memory
        self._worker = make(memory)
        self._pipes: list[Connection] = []
        self._helpers = []
        context = processes.get_context("spawn")
        count = len(memory.gradients)
        for lane in range(1, count):
            ours, theirs = context.Pipe()
            helper = context.Process(
                target=_serve, args=(theirs, memory, make, lane, count), daemon=True
            )
            helper.start()
            self._pipes.append(ours)
            self._helpers.append(helper)

    def step(self, step: int, seen: int, factor: float) -> tuple[list[Share], float]:
        """One update of all weights; returns what the lanes report and the gradient's norm."""
        memory, count = self._memory, len(self._memory.gradients)
        shares = self._all(
            ("gradients", step, seen), lambda: self._worker.gradients(step, seen, 0, count)
        )
        squares = self._all(("average",), lambda: memory.average(0))
        norm = sum(squares) ** 0.5
        if not norm < float("inf"):
            return shares, norm
        clip = min(1.0, memory.optimizer.rates.clip / (norm + 1e-12))
        memory.optimizer.step += 1
        number = memory.optimizer.step
        self._all(("update", factor, clip, number), lambda: memory.update(0, factor, clip, number))
        return shares, norm

    def _all(self, command: tuple[object, ...], own: Callable[[], object]) -> list:
        for pipe in self._pipes:
            pipe.send(command)
        results = [own()]
        for pipe in self._pipes:
            try:
                results.append(pipe.recv())
            except EOFError as error:
                raise PlatformError("a training process ended; start again to go on.") from error
        return results

    def close(self) -> None:
        """End the other processes."""
        for pipe in self._pipes:
            pipe.send(None)
        for helper in self._helpers:
            helper.join(timeout=20)


def _serve(pipe: Connection, memory: Memory, make: Maker, lane: int, count: int) -> None:
    torch.set_num_threads(1)
    worker = make(memory)
    while True:
        try:
            command = pipe.recv()
        except EOFError:
            return
        if command is None:
            return
        kind, *rest = command
        if kind == "gradients":
            pipe.send(worker.gradients(*rest, lane, count))
        elif kind == "average":
            pipe.send(memory.average(lane))
        else:
            memory.update(lane, *rest)
            pipe.send(None)


def collect(memory: Memory, lane: int, work: Mapping[str, Tensor]) -> None:
    """Copy the gradients of a lane's working weights into its buffers."""
    for name, buffer in memory.gradients[lane].items():
        grad = work[name].grad
        if grad is None:
            buffer.zero_()
        else:
            buffer.copy_(grad)

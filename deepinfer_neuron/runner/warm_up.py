"""Compiles every graph of a bucket ladder before the first request."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from tqdm import tqdm

from deepinfer_neuron.model.shapes import PassShape
from deepinfer_neuron.runner.static_worker import StaticWorker


@dataclass(frozen=True)
class WarmUp:
    """What a warm-up did.

    Attributes:
        passes: shapes that were run.
        missing: shapes that the budget left out; their graphs are compiled when they are needed.
        graphs: compiled so far.
        seconds: it took.
    """

    passes: int
    missing: tuple[PassShape, ...]
    graphs: int
    seconds: float

    @property
    def complete(self) -> bool:
        """Whether nothing is left to compile."""
        return not self.missing


def warm_up(
    worker: StaticWorker, *, budget_seconds: float | None = None, progress: bool = False
) -> WarmUp:
    """Run every pass of the worker's ladder with padding only.

    Padding writes block 0, page 0 and slot 0 alone, so a warm-up may happen at any time. If it is
    complete, the regions are sealed: a graph compiled later on is counted as late.

    Args:
        worker: with allocated caches.
        budget_seconds: no further pass is begun after this time; ``None`` for no limit.
        progress: show a bar.
    """
    started = time.monotonic()
    shapes = list(worker.ladder.passes())
    done = 0
    with tqdm(shapes, "compiling", unit="pass", disable=not progress) as bar:
        for shape in bar:
            if budget_seconds is not None and time.monotonic() - started >= budget_seconds:
                break
            _run_empty(worker, shape)
            done += 1
            bar.set_postfix(graphs=len(worker.regions.records))
        if done == len(shapes):
            worker.restore_window(0, 0, ())
            worker.platform.synchronize()
            worker.regions.seal()
    return WarmUp(
        done,
        tuple(shapes[done:]),
        len(worker.regions.records),
        time.monotonic() - started,
    )


def _run_empty(worker: StaticWorker, shape: PassShape) -> None:
    """Every way in which a pass of this shape can end."""
    queued = worker.queue([], shape)
    worker.verify(queued, 0)
    worker.logits(queued)
    worker.logits(queued, torch.zeros(shape.sequences * shape.outputs, dtype=torch.int32))
    if worker.nextn:
        tokens = torch.zeros(0, shape.outputs, dtype=torch.int32)
        worker.propose(queued, tokens, torch.zeros(0, dtype=torch.int32))

"""The measurements of one checkpoint; each function is meant to run in a process of its own."""

from __future__ import annotations

import copy
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.experts import recorded_experts
from benchmarks.memory import peak_bytes, resident
from benchmarks.results import Decode, Load, Memory, Prefill, Speed, Touched
from benchmarks.timing import Budget, durations, repetitions
from benchmarks.traffic import StepBytes, Traffic
from benchmarks.workload import (
    RECORDED_STEPS,
    Member,
    Sizes,
    Workload,
    decode,
    engram_rows,
    prefill,
    run_tokens,
)
from deepinfer_neuron.checkpoint.reader import Checkpoint
from deepinfer_neuron.llm import LLM
from deepinfer_neuron.ops.arithmetic import Arithmetic, fixed_arithmetic, free_arithmetic
from deepinfer_neuron.runner.worker import Worker
from deepinfer_neuron.settings import WeightsMode

ARITHMETICS = ("free", "fixed")
WEIGHTS: tuple[WeightsMode, ...] = ("packed", "expanded")

_TOUCHING_STEPS = 4
_WARM_LOADS = Budget(3, 20.0)


@dataclass(frozen=True)
class Task:
    """One checkpoint with one way to hold the weights."""

    directory: Path
    weights: WeightsMode
    threads: int
    sizes: Sizes

    @property
    def expanded(self) -> bool:
        """Whether quantized weights are decoded when they are loaded."""
        return self.weights == "expanded"

    def load(self, checkpoint: Checkpoint, arithmetic: str) -> Worker:
        """The network, without caches."""
        return Worker(
            checkpoint,
            _arithmetic(arithmetic),
            expanded=self.expanded,
            max_length=max(self.sizes.prompt, self.sizes.longest + self.sizes.decoded),
        )


def measure_load(task: Task) -> Load:
    """Seconds to construct the public object: files, tokenizer and weights, without warm-up."""
    torch.set_num_threads(task.threads)
    drop_from_page_cache(task.directory)
    (cold,) = repetitions(lambda: _load(task), Budget(1, 0.0))
    warm = repetitions(lambda: _load(task), _WARM_LOADS)
    _say(f"{task.weights}: loads in {cold:.2f} s cold, {statistics.median(warm):.2f} s warm")
    return Load(cold, statistics.median(warm))


def _load(task: Task) -> None:
    with LLM(task.directory, weights=task.weights):
        pass


def drop_from_page_cache(directory: Path) -> None:
    """Ask the system to forget the contents of a directory's files, so that they are read anew.

    Pages that another process has mapped stay. Does nothing where the system has no such call.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    for path in directory.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def measure_memory(task: Task, arithmetic: str) -> Memory:
    """Resident memory after loading, after a few decode steps, and after a prompt."""
    base = resident(task.directory)
    torch.set_num_threads(task.threads)
    with Checkpoint.open(task.directory) as checkpoint:
        worker = task.load(checkpoint, arithmetic)
        prompt = Workload.draw(worker, 1, task.sizes.prompt, task.sizes.prompt, 0)
        worker.allocate(prompt.blocks, 1)
        loaded = resident(task.directory)
        member = prompt.members[0]
        _say(f"memory, {task.weights}, {arithmetic}: {_TOUCHING_STEPS} steps and a prompt")
        touched = tuple(_touching_steps(task, worker, member))
        prefill(worker, member)
        caches = cache_bytes(worker)
        return Memory(
            arithmetic, base, loaded, caches, touched, resident(task.directory), peak_bytes()
        )


def _touching_steps(task: Task, worker: Worker, member: Member) -> Iterator[Touched]:
    """Decode the first tokens of a sequence, one step each."""
    traffic = Traffic(worker.config, expanded=task.expanded)
    rows = caches = 0.0
    with recorded_experts(worker) as record:
        for step in range(_TOUCHING_STEPS):
            run_tokens(worker, [member], [range(step, step + 1)])
            read = traffic.decode_bytes([step + 1], 0, 0)
            rows, caches = rows + read.rows, max(caches, read.caches)
            weights = len(record.used) * traffic.expert_bytes
            touched = StepBytes(read.dense, weights, rows, caches)
            experts = record.by_layer(len(worker.config.layers))
            yield Touched(step + 1, experts, touched.total, resident(task.directory))


def cache_bytes(worker: Worker) -> int:
    """Size of all caches of a worker."""
    total = 0
    for layer in worker.caches:
        tensors = [layer.window.records]
        tensors += [] if layer.compressed is None else [layer.compressed.records]
        tensors += [] if layer.index is None else [layer.index.blocks]
        tensors += [] if layer.pairs is None else [layer.pairs.state]
        total += sum(tensor.nbytes for tensor in tensors)
    return total


def measure_speed(task: Task, arithmetics: Sequence[str]) -> tuple[Speed, ...]:
    """Prefill and decode with each arithmetic, one after the other.

    The caches are filled once, by the first arithmetic; every measurement starts from them.
    """
    torch.set_num_threads(task.threads)
    results: list[Speed] = []
    filled = None
    with Checkpoint.open(task.directory) as checkpoint:
        for arithmetic in arithmetics:
            worker = task.load(checkpoint, arithmetic)
            name = f"{task.weights}, {arithmetic}"
            timed = _measure_prefill(task, worker, name)
            workload = _draw(task, worker)
            worker.allocate(workload.blocks, len(workload.members))
            if filled is None:
                _say(f"{name}: prompts of {len(workload.members)} sequences")
                for member in workload.members:
                    prefill(worker, member)
                filled = worker.caches
            decoded = []
            for batch in task.sizes.batches:
                worker.caches = copy.deepcopy(filled)
                decoded.append(_measure_decode(task, worker, workload.spread(batch), name))
            results.append(Speed(arithmetic, timed, tuple(decoded)))
            del worker
    return tuple(results)


def _draw(task: Task, worker: Worker) -> Workload:
    sizes = task.sizes
    return Workload.draw(worker, max(sizes.batches), sizes.shortest, sizes.longest, sizes.decoded)


def _measure_prefill(task: Task, worker: Worker, name: str) -> Prefill:
    tokens = task.sizes.prompt
    workload = Workload.draw(worker, 1, tokens, tokens, 0)
    worker.allocate(workload.blocks, 1)
    seconds = durations(lambda: prefill(worker, workload.members[0]), task.sizes.prefill)
    median = statistics.median(seconds)
    flops = Traffic(worker.config, expanded=task.expanded).prefill_flops(tokens)
    _say(f"{name}: prefill {tokens / median:.1f} tokens/s")
    return Prefill(
        tokens=tokens,
        seconds=tuple(seconds),
        median=median,
        tokens_per_second=tokens / median,
        flops_per_token=flops / tokens,
        gflops=flops / median / 1e9,
    )


def _measure_decode(task: Task, worker: Worker, members: Sequence[Member], name: str) -> Decode:
    steps = iter(range(task.sizes.decoded))
    seconds = durations(lambda: decode(worker, members, next(steps)), task.sizes.decode)
    median, batch = statistics.median(seconds), len(members)
    experts, rows = [], []
    for step in [next(steps) for _ in range(RECORDED_STEPS)]:
        with recorded_experts(worker) as record:
            decode(worker, members, step)
        experts.append(len(record.used))
        rows.append(engram_rows(worker, members, step))
    lengths = [member.prompt + task.sizes.decoded for member in members]
    read = Traffic(worker.config, expanded=task.expanded).decode_bytes(
        lengths, statistics.mean(experts), statistics.mean(rows)
    )
    _say(f"{name}: decode batch {batch}, {batch / median:.1f} tokens/s")
    return Decode(
        batch=batch,
        seconds=tuple(seconds),
        median=median,
        tokens_per_second=batch / median,
        experts_per_layer=statistics.mean(experts) / len(worker.config.layers),
        step_bytes=read,
        bytes_per_token=read.total / batch,
        gbytes=read.total / median / 1e9,
    )


def _arithmetic(name: str) -> Arithmetic:
    return fixed_arithmetic() if name == "fixed" else free_arithmetic()


def _say(text: str) -> None:
    """One line of progress."""
    print(f"  {text}", file=sys.stderr, flush=True)

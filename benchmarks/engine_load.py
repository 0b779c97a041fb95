"""What batching, asynchronous steps and the prefix cache bring, and what planning costs.

Every comparison runs in one process, one after the other, on the same requests.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.machine import FULL_PROBE, QUICK_PROBE, Machine, examine
from benchmarks.markers import around, write_between
from benchmarks.report import table
from deepinfer_neuron.checkpoint.tiny import PRESETS, write_checkpoint
from deepinfer_neuron.errors import DeepInferNeuronError
from deepinfer_neuron.llm import LLM, RequestOutput, SamplingParams

NAME = "engine_load"


@dataclass(frozen=True)
class Load:
    """Sizes of a run."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    prefix_tokens: int
    schedule_sizes: tuple[int, ...]
    repeats: int


FULL = Load(32, 96, 32, 1024, (1, 32, 256), 5)
QUICK = Load(4, 20, 4, 256, (1, 4), 1)


@dataclass(frozen=True)
class Row:
    """One line of the results."""

    what: str
    value: str
    compared: str


def prompts(count: int, length: int, vocab_size: int, start: int = 3) -> list[dict[str, list[int]]]:
    """Different random-looking prompts of equal length."""
    return [
        {
            "prompt_token_ids": [
                (start + 7919 * (row * length + i)) % vocab_size for i in range(length)
            ]
        }
        for row in range(count)
    ]


def params(tokens: int) -> SamplingParams:
    """Greedy, never ending early."""
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def timed(
    llm: LLM, batch: list[dict[str, list[int]]], tokens: int
) -> tuple[float, list[RequestOutput]]:
    """Seconds to complete a batch, and its outputs."""
    started = time.perf_counter()
    outputs = llm.generate(batch, params(tokens), use_tqdm=False)  # type: ignore[arg-type]
    return time.perf_counter() - started, outputs


def batching(directory: Path, load: Load) -> list[Row]:
    """All requests together against one after the other, asynchronous against synchronous."""
    rows = []
    times: dict[str, list[float]] = {"asynchronous": [], "synchronous": []}
    alone = 0.0
    # In turns, so that a slower phase of the machine meets both.
    for name in ("asynchronous", "synchronous") * load.repeats:
        with LLM(
            directory,
            nextn=0,
            asynchronous=name == "asynchronous",
            enable_prefix_caching=False,
            max_model_len=2048,
        ) as llm:
            batch = prompts(load.requests, load.prompt_tokens, llm.checkpoint.config.vocab_size)
            timed(llm, batch[:1], 2)
            times[name].append(timed(llm, batch, load.output_tokens)[0])
            if not alone:
                alone = sum(timed(llm, [one], load.output_tokens)[0] for one in batch)
    seconds = {name: statistics.median(measured) for name, measured in times.items()}
    total = load.requests * load.output_tokens
    speed = total / seconds["asynchronous"]
    rows.append(
        Row(
            f"{load.requests} requests together",
            f"{speed:.1f} tokens/s",
            f"{alone / seconds['asynchronous']:.1f}x the same one after the other "
            f"({total / alone:.1f} tokens/s)",
        )
    )
    rows.append(
        Row(
            "asynchronous steps",
            f"{seconds['asynchronous']:.2f} s",
            f"{seconds['synchronous'] / seconds['asynchronous']:.2f}x the speed of synchronous "
            f"({seconds['synchronous']:.2f} s)",
        )
    )
    return rows


def prefix(directory: Path, load: Load) -> list[Row]:
    """Time to first token of a prompt whose prefix is known, against one whose prefix is not."""
    with LLM(directory, nextn=0, max_model_len=2048) as llm:
        vocabulary = llm.checkpoint.config.vocab_size
        timed(llm, prompts(1, 8, vocabulary), 2)
        misses, hits = [], []
        for repeat in range(3):
            batch = prompts(1, load.prefix_tokens, vocabulary, start=11 + 13 * repeat)
            for times in (misses, hits):
                _, outputs = timed(llm, batch, 1)
                ttft = outputs[0].metrics.ttft
                times.append(ttft if ttft is not None else 0.0)
    miss, hit = statistics.median(misses), statistics.median(hits)
    return [
        Row(
            f"TTFT of {load.prefix_tokens} tokens, prefix cached",
            f"{hit * 1e3:.0f} ms",
            f"{miss / hit:.1f}x faster than not cached ({miss * 1e3:.0f} ms)",
        )
    ]


def scheduling(directory: Path, load: Load) -> list[Row]:
    """Median time of planning a step in which every running request gets its row."""
    rows = []
    for size in load.schedule_sizes:
        with LLM(
            directory,
            nextn=0,
            max_num_seqs=size,
            max_num_batched_tokens=max(512, 4 * size),
            max_model_len=256,
            num_blocks=2 * size + 2,
            enable_prefix_caching=False,
        ) as llm:
            vocabulary = llm.checkpoint.config.vocab_size
            before = llm.stats()
            plans = _planning_times(llm, prompts(size, 4, vocabulary), tokens=12)
            after = llm.stats()
        step = (after.step_seconds - before.step_seconds) / (after.steps - before.steps)
        median = statistics.median(plans)
        rows.append(
            Row(
                f"planning a step, {size} running",
                f"{median * 1e6:.0f} µs",
                f"{100 * median / step:.2f} % of the mean step ({step * 1e3:.1f} ms)",
            )
        )
    return rows


def _planning_times(llm: LLM, batch: list[dict[str, list[int]]], tokens: int) -> list[float]:
    """Seconds of each call of the scheduler while the whole batch decodes."""
    scheduler = llm.engine.scheduler
    original, times = scheduler.schedule, []

    def measured() -> object:
        started = time.perf_counter()
        scheduled = original()
        if scheduled is not None and len(scheduled.requests) == len(batch):
            times.append(time.perf_counter() - started)
        return scheduled

    scheduler.schedule = measured  # type: ignore[method-assign, assignment]
    llm.generate(batch, params(tokens), use_tqdm=False)  # type: ignore[arg-type]
    scheduler.schedule = original  # type: ignore[method-assign]
    return times


def render(machine: Machine, preset: str, rows: Sequence[Row]) -> str:
    """The results as Markdown."""
    facts = (
        f"- {machine.cpu}, {machine.cores} cores, {machine.threads} thread(s) used; load average "
        f"{machine.load_average:.1f} when the run began; torch {machine.torch}\n"
        f"- checkpoint `{preset}`, greedy, free order"
    )
    body = table(
        ("", "measured", "compared"), [(row.what, row.value, row.compared) for row in rows], 3
    )
    return f"{facts}\n\n{body}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line; the exit code is 0 unless something broke."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_load", description=__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--checkpoints", type=Path, default=Path(".cache/checkpoints"))
    parser.add_argument("--markdown", type=Path, help="write the table between FILE's markers")
    parser.add_argument("--quick", action="store_true", help="few, short runs")
    given = parser.parse_args(arguments)
    load, probe = (QUICK, QUICK_PROBE) if given.quick else (FULL, FULL_PROBE)
    try:
        if given.markdown is not None:
            around(given.markdown, NAME)
        directory = write_checkpoint(given.checkpoints / given.preset, given.preset)
        machine = examine(probe, torch.get_num_threads())
        rows: list[Row] = []
        for part in (batching, prefix, scheduling):
            print(f"{part.__name__} ...", file=sys.stderr, flush=True)
            rows += part(directory, load)
        text = render(machine, given.preset, rows)
        print(text)
        if given.markdown is not None:
            write_between(given.markdown, NAME, text)
    except (DeepInferNeuronError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

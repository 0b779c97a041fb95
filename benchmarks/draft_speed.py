"""What verifying and drafting cost, and the speed-up that a given acceptance brings.

Random checkpoints seldom accept a draft, so the drafts come from a recorded greedy run: each is the
recorded token with a fixed probability and another token otherwise. The draft blocks and heads run
all the same, so their cost is in every figure. The prediction needs only the costs of the run in
which no draft is right: ``tokens per step * step without drafts / step with drafts``.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.engine_load import params, prompts
from benchmarks.machine import FULL_PROBE, QUICK_PROBE, Machine, examine
from benchmarks.markers import around, write_between
from benchmarks.report import table
from deepinfer_neuron.checkpoint.tiny import PRESETS, write_checkpoint
from deepinfer_neuron.engine.outputs import EngineStats
from deepinfer_neuron.errors import DeepInferNeuronError
from deepinfer_neuron.llm import LLM
from deepinfer_neuron.runner.sequence import SequenceData
from deepinfer_neuron.sampling.drafts import Draft

NAME = "draft_speed"
ACCEPTANCES = (0.0, 0.5, 0.8, 1.0)


@dataclass(frozen=True)
class Load:
    """Sizes of a run."""

    prompt_tokens: int
    output_tokens: int
    repeats: int


FULL, QUICK = Load(64, 96, 3), Load(8, 8, 1)


@dataclass
class Recorded:
    """Drafts of a recorded run, right with a fixed probability."""

    continuations: Mapping[tuple[int, ...], Sequence[int]]
    acceptance: float
    vocab_size: int
    rng: random.Random

    def __call__(self, data: SequenceData, drafts: Sequence[Draft]) -> list[Draft]:
        """The recorded tokens behind the sequence, some replaced by their neighbours."""
        prompt = tuple(data.tokens(0, data.num_prompt_tokens).tolist())
        done = len(data) - data.num_prompt_tokens
        known = self.continuations[prompt][done : done + len(drafts)]
        return [Draft(self._spoil(token)) for token in known]

    def _spoil(self, token: int) -> int:
        if self.rng.random() < self.acceptance:
            return token
        return (token + self.rng.randrange(1, self.vocab_size)) % self.vocab_size


@dataclass(frozen=True)
class Run:
    """Medians over the repetitions; milliseconds per decode step."""

    tokens_per_second: float
    step: float
    forward: float
    verify: float
    draft: float
    tokens_per_step: float


def measure(
    directory: Path, load: Load, batch: int, nextn: int, source: Recorded | None
) -> tuple[Run, dict[tuple[int, ...], list[int]]]:
    """Decode a batch several times; speeds count from the first token."""
    runs: list[Run] = []
    with LLM(
        directory, nextn=nextn, max_num_seqs=batch, max_model_len=1024, enable_prefix_caching=False
    ) as llm:
        requests = prompts(batch, load.prompt_tokens, llm.checkpoint.config.vocab_size)
        if source is not None:
            llm.engine.executor.source = source
        for _ in range(1 + load.repeats):
            before = llm.stats()
            # One token: all prompts, and nothing else.
            llm.generate(requests, params(1), use_tqdm=False)  # type: ignore[arg-type]
            prefilled = llm.stats()
            outputs = llm.generate(
                requests,  # type: ignore[arg-type]
                params(load.output_tokens),
                use_tqdm=False,
            )
            runs.append(_run(before, prefilled, llm.stats(), batch * (load.output_tokens - 1)))
    tokens = {
        tuple(request["prompt_token_ids"]): output.outputs[0].token_ids
        for request, output in zip(requests, outputs, strict=True)
    }
    kept = runs[1:]
    fields = [[getattr(run, name) for run in kept] for name in Run.__dataclass_fields__]
    return Run(*(statistics.median(values) for values in fields)), tokens


def _run(before: EngineStats, prefilled: EngineStats, after: EngineStats, tokens: int) -> Run:
    """The decode steps of the second of two equal batches, whose prompts cost what the first's
    did."""
    prompt_steps = prefilled.steps - before.steps
    steps = after.steps - prefilled.steps - prompt_steps

    def spent(name: str) -> float:
        whole = getattr(after, name) - getattr(prefilled, name)
        prompt = getattr(prefilled, name) - getattr(before, name)
        return float(whole - prompt)

    seconds = spent("step_seconds")
    sequence_steps = after.decode.steps - prefilled.decode.steps
    return Run(
        tokens_per_second=tokens / seconds,
        step=1e3 * seconds / steps,
        forward=1e3 * spent("forward_seconds") / steps,
        verify=1e3 * spent("sample_seconds") / steps,
        draft=1e3 * spent("draft_seconds") / steps,
        tokens_per_step=tokens / sequence_steps,
    )


def compare(
    directory: Path, load: Load, batch: int, nextn: int
) -> tuple[list[str], list[list[str]]]:
    """Costs of a step, and speed-up by acceptance beside its prediction."""
    with LLM(directory, nextn=0) as llm:
        vocabulary = llm.checkpoint.config.vocab_size
        layers = llm.checkpoint.config.num_hidden_layers
    plain, tokens = measure(directory, load, batch, 0, None)
    costs: list[str] = []
    rows: list[list[str]] = []
    base: Run | None = None
    for acceptance in ACCEPTANCES:
        source = Recorded(tokens, acceptance, vocabulary, random.Random(5))
        run, _ = measure(directory, load, batch, nextn, source)
        if base is None:
            base = run
            costs = [
                f"batch {batch}: a step without drafts {plain.step:.1f} ms (backbone "
                f"{plain.forward:.1f}); with {nextn} drafts {run.step:.1f} ms: backbone of "
                f"{nextn + 1} rows {run.forward:.1f} ({run.forward / plain.forward:.2f}x one row), "
                f"verification {run.verify:.1f}, drafting {run.draft:.1f} "
                f"({run.draft / (plain.forward / layers):.1f}x one layer of one row)"
            ]
        measured = run.tokens_per_second / plain.tokens_per_second
        predicted = run.tokens_per_step * plain.step / base.step
        rows.append(
            [
                str(batch), f"{acceptance:.1f}", f"{run.tokens_per_step:.2f}",
                f"{run.tokens_per_second:.1f}", f"{measured:.2f}x", f"{predicted:.2f}x",
                f"{100 * (measured / predicted - 1):+.0f} %",
            ]
        )  # fmt: skip
    return costs, rows


def render(machine: Machine, preset: str, costs: Sequence[str], rows: list[list[str]]) -> str:
    """The results as Markdown."""
    facts = (
        f"- {machine.cpu}, {machine.cores} cores, {machine.threads} thread(s) used; load average "
        f"{machine.load_average:.1f} when the run began; torch {machine.torch}\n"
        f"- checkpoint `{preset}`, greedy, free order\n" + "".join(f"- {cost}\n" for cost in costs)
    )
    head = (
        "batch", "drafts right", "tokens/step", "tokens/s", "speed-up", "predicted", "difference",
    )  # fmt: skip
    return f"{facts}\n{table(head, rows, 1)}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line; the exit code is 0 unless something broke."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.draft_speed", description=__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--nextn", type=int, default=5)
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
        costs: list[str] = []
        rows: list[list[str]] = []
        for batch in (1, 2) if given.quick else (1, 8):
            print(f"batch {batch} ...", file=sys.stderr, flush=True)
            more_costs, more_rows = compare(directory, load, batch, given.nextn)
            costs += more_costs
            rows += more_rows
        text = render(machine, given.preset, costs, rows)
        print(text)
        if given.markdown is not None:
            write_between(given.markdown, NAME, text)
    except (DeepInferNeuronError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

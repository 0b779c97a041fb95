"""One benchmark run on a loaded model: times, counts, and what a chip is predicted to take."""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepinfer_neuron.cli.output import console
from deepinfer_neuron.cli.plan import step_record, step_table
from deepinfer_neuron.engine.inputs import Prompt
from deepinfer_neuron.engine.outputs import DeviceStats, EngineStats, RequestOutput
from deepinfer_neuron.engine.run_forecast import RunForecast, forecast_run
from deepinfer_neuron.errors import RequestError
from deepinfer_neuron.llm import LLM
from deepinfer_neuron.platform.base import Platform
from deepinfer_neuron.platform.simulator import SimulatedNeuronPlatform, StepKind
from deepinfer_neuron.runner.static_executor import pass_label
from deepinfer_neuron.runner.static_worker import StaticWorker
from deepinfer_neuron.sampling.params import SamplingParams

HOST_TIMES = "times of the host that plays the device; they say nothing about a chip"

_LABEL_WIDTH = 32
_STEP_COUNTS = ("uploads", "downloads", "regions", "eager", "graphs")


@dataclass(frozen=True)
class Workload:
    """Random prompts of one length that run together.

    Raises:
        RequestError: a size below 1.
    """

    input_len: int = 512
    output_len: int = 128
    batch: int = 1
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "batch"):
            if getattr(self, name) < 1:
                option = f"--{name.replace('_', '-')}"
                raise RequestError(
                    f"{option} is {getattr(self, name)}; give a number of at least 1"
                )

    def prompts(self, vocabulary: int) -> list[Prompt]:
        """Token ids of the prompts."""
        rng = random.Random(self.seed)
        return [
            {"prompt_token_ids": [rng.randrange(3, vocabulary) for _ in range(self.input_len)]}
            for _ in range(self.batch)
        ]

    def params(self) -> SamplingParams:
        """Parameters that let every prompt generate exactly ``output_len`` tokens."""
        return SamplingParams(
            temperature=self.temperature,
            max_tokens=self.output_len,
            ignore_eos=True,
            seed=self.seed,
        )


@dataclass(frozen=True)
class Run:
    """What a run showed.

    Attributes:
        times: as the clock of this machine saw them, in milliseconds, and how drafts fared.
        device: counts of a device with compiled regions, warm-up excluded.
        step: mean counts of a decode step on the simulated device.
        forecast: of the same run on a chip, where the device was simulated.
    """

    times: dict[str, object]
    device: DeviceStats | None
    step: dict[str, float] | None
    forecast: RunForecast | None

    def record(self) -> dict[str, object]:
        """The run as a JSON object."""
        found = dict(self.times)
        if self.device is not None:
            found["device"] = dataclasses.asdict(self.device)
        if self.step is not None:
            found["times_are"] = HOST_TIMES
            found["decode_step"] = self.step
        if self.forecast is not None:
            found["forecast"] = _forecast_record(self.forecast)
        return found

    def show(self) -> None:
        """Print the run for a person."""
        out = console()
        if self.step is not None:
            out.print(f"Measured: {HOST_TIMES}")
        _show(self.times)
        if self.device is not None:
            out.print("\nCounted since the warm-up")
            _show(dataclasses.asdict(self.device))
        if self.step is not None:
            out.print("\nCounted per decode step")
            _show(self.step)
        if self.forecast is not None:
            _show_forecast(self.forecast)


def measure(llm: LLM, workload: Workload, *, cores: int = 1, use_tqdm: bool = False) -> Run:
    """Run a workload and say how it went.

    Args:
        llm: made with ``max_num_seqs`` of at least the batch, without prefix caching.
        workload: the prompts.
        cores: of the estimate that goes with a simulated device.
        use_tqdm: show a progress bar.
    """
    before = llm.stats().device
    prompts = workload.prompts(llm.checkpoint.config.vocab_size)
    outputs = llm.generate(prompts, workload.params(), use_tqdm=use_tqdm)
    _refuse_failures(outputs)
    stats = llm.stats()
    step = _decode_step(llm)
    forecast = None
    if step is not None:
        forecast = forecast_run(
            llm.checkpoint.config,
            llm.config,
            cores=cores,
            host_embed=llm.settings.host_embed,
            input_len=workload.input_len,
            output_len=workload.output_len,
            batch=workload.batch,
            tokens_per_step=stats.decode.tokens_per_step,
        )
    return Run(
        _times(workload, llm.config.nextn, outputs, stats),
        _since(before, stats.device),
        step,
        forecast,
    )


def _refuse_failures(outputs: Sequence[RequestOutput]) -> None:
    """Raise :class:`RequestError` if a request did not run to its end."""
    for output in outputs:
        completion = output.outputs[0]
        if completion.finish_reason == "error":
            raise RequestError(f"a request of the benchmark failed: {completion.stop_reason}")


def _times(
    workload: Workload, nextn: int, outputs: list[RequestOutput], stats: EngineStats
) -> dict[str, object]:
    """Everything measured; times in milliseconds, medians over the requests."""
    starts = [output.metrics.arrival_time for output in outputs]
    ends = [output.metrics.finish_time for output in outputs]
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    steps = max(stats.steps, 1)
    return {
        "input_len": workload.input_len,
        "output_len": workload.output_len,
        "batch": workload.batch,
        "nextn": nextn,
        "ttft_ms": _median([output.metrics.ttft for output in outputs]),
        "tpot_ms": _median([output.metrics.tpot for output in outputs]),
        "tokens_per_second": tokens / max(max(ends) - min(starts), 1e-9),
        "steps": stats.steps,
        "step_ms": 1e3 * stats.step_seconds / steps,
        "forward_ms": 1e3 * stats.forward_seconds / steps,
        "verify_ms": 1e3 * stats.sample_seconds / steps,
        "draft_ms": 1e3 * stats.draft_seconds / steps,
        "tokens_per_decode_step": stats.decode.tokens_per_step,
        "acceptance_by_position": stats.decode.acceptance,
        "confidence_by_position": stats.decode.mean_confidence,
    }


def _median(seconds: list[float | None]) -> float | None:
    known = [1e3 * value for value in seconds if value is not None]
    return statistics.median(known) if known else None


def _since(before: DeviceStats | None, after: DeviceStats | None) -> DeviceStats | None:
    """What was counted after the warm-up; graphs are all there are."""
    if before is None or after is None:
        return None
    return DeviceStats(
        after.graphs,
        after.graphs_after_warm_up,
        after.regions_launched - before.regions_launched,
        after.passes - before.passes,
        after.uploads - before.uploads,
        after.downloads - before.downloads,
    )


def _decode_step(llm: LLM) -> dict[str, float] | None:
    """Mean counts of a decode step, if the device is simulated and ran one.

    A step whose tokens the host chooses has several parts, each with a label of its own.
    """
    worker = llm.engine.executor.worker
    kinds = _step_kinds(llm.platform)
    if kinds is None or not isinstance(worker, StaticWorker):
        return None
    labels = {pass_label(shape) for shape in worker.ladder.decode_passes()}
    steps = sum(kind.steps for kind in kinds if kind.label in labels)
    if not steps:
        return None
    parts = [kind.counts for kind in kinds if kind.label.startswith(tuple(labels))]
    totals = {name: sum(getattr(part, name) for part in parts) for name in _STEP_COUNTS}
    totals["operators outside regions"] = totals.pop("eager")
    totals["graphs compiled"] = totals.pop("graphs")
    return {name: total / steps for name, total in totals.items()}


def _step_kinds(platform: Platform) -> tuple[StepKind, ...] | None:
    if isinstance(platform, SimulatedNeuronPlatform):
        return platform.simulator.report().kinds
    return None


def _forecast_record(found: RunForecast) -> dict[str, object]:
    return {
        "label": found.label,
        "cores": found.cores,
        "fits": found.fits,
        "step_ms": found.step_ms,
        "tokens_per_decode_step": found.tokens_per_step,
        "tpot_ms": found.tpot_ms,
        "ttft_ms": found.ttft_ms,
        "decode_step": step_record(found.decode),
        "prompt_passes": [step_record(part) for part in found.prompt],
    }


def _show_forecast(found: RunForecast) -> None:
    """Predicted times with what they are made of."""
    out = console()
    cores = f"{found.cores} Trainium2 core{'s' if found.cores > 1 else ''}"
    out.print(f"\nPredicted for {cores} ({found.label})")
    if not found.fits:
        out.print("The model does not fit there; 'inspect --plan' says what is missing.")
    _show(
        {
            "step_ms": found.step_ms,
            "tokens_per_decode_step": found.tokens_per_step,
            "tpot_ms": found.tpot_ms,
            "ttft_ms": found.ttft_ms,
        }
    )
    out.print("", step_table(found.decode))
    for shape, count in Counter(part.shape for part in found.prompt).items():
        part = next(part for part in found.prompt if part.shape == shape)
        title = f"Prompt pass of {shape.rows} rows, {count} per prompt"
        out.print("", step_table(part, title))


def _show(record: Mapping[str, object]) -> None:
    out = console()
    for name, value in record.items():
        out.print(f"{name.replace('_', ' '):<{_LABEL_WIDTH}}{_text(value)}", soft_wrap=True)


def _text(value: object) -> str:
    if isinstance(value, list):
        return " ".join(f"{item:.3f}" for item in value) or "-"
    if isinstance(value, float):
        return f"{value:.2f}"
    return "-" if value is None else str(value)

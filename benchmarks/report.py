"""Results as Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.machine import Machine
from benchmarks.results import Decode, Memory, ModelResult, Report, Speed, WeightsResult

BOUNDED_PRESET = "mid"
"""The checkpoint that is large enough for bounds to mean something."""

LOAD_LIMIT_SECONDS = 5.0
"""Its packed weights shall load faster than this."""

_FREE, _FIXED = "free", "fixed"


def render(report: Report) -> str:
    """The whole report as Markdown, ending in a newline."""
    parts = [_machine(report.machine)]
    parts += [_model(model, report.machine) for model in report.models]
    return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], texts: int) -> str:
    """A Markdown table whose first ``texts`` columns are text and whose others are numbers."""
    rule = ["---" if column < texts else "---:" for column in range(len(head))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def _machine(m: Machine) -> str:
    features = f" ({', '.join(m.features)})" if m.features else ""
    return "\n".join(
        (
            f"- {m.cpu}{features}, {m.cores} cores, {m.memory_bytes / 1e9:.0f} GB; "
            f"{m.threads} thread(s) used; load average {m.load_average:.1f} when the run began",
            f"- torch {m.torch}, Python {m.python}, {m.system}",
            f"- copy: {m.copy_gbytes:.1f} GB/s read and written; bf16 matrix times vector: "
            f"{m.vector_gbytes:.1f} GB/s read; bf16 matrix product: {m.matmul_gflops:.0f} GFLOP/s",
        )
    )


def _model(model: ModelResult, machine: Machine) -> str:
    parts = [
        f"### `{model.preset}`\n\nCheckpoint of {_mb(model.checkpoint_bytes)}, {model.layers} "
        f"layers, {model.experts // model.layers} routed experts in each.",
        "Prefill:",
        _prefill(model, machine),
        "Decode:",
        _decode(model, machine),
    ]
    price = _price(model)
    if price:
        parts += ["Price of the fixed order, as time of fixed over time of free:", price]
    parts += ["Loading and resident memory:", _memory(model)]
    if model.preset == BOUNDED_PRESET:
        parts += ["Bounds for packed weights:", _bounds(model)]
    return "\n\n".join(parts)


def _prefill(model: ModelResult, machine: Machine) -> str:
    rows = [
        (
            result.weights,
            speed.arithmetic,
            str(speed.prefill.tokens),
            f"{speed.prefill.tokens_per_second:.1f}",
            f"{speed.prefill.flops_per_token / 1e6:.0f}",
            f"{speed.prefill.gflops:.1f}",
            _share(speed.prefill.gflops / machine.matmul_gflops),
        )
        for result, speed in _speeds(model)
    ]
    head = ("weights", "order", "prompt", "tokens/s", "MFLOP/token", "GFLOP/s", "of matmul")
    return table(head, rows, texts=2)


def _decode(model: ModelResult, machine: Machine) -> str:
    rows = [
        (
            result.weights,
            speed.arithmetic,
            str(decode.batch),
            f"{decode.median * 1e3:.1f}",
            f"{decode.tokens_per_second:.1f}",
            f"{decode.experts_per_layer:.1f}",
            f"{decode.bytes_per_token / 1e6:.1f}",
            f"{decode.gbytes:.2f}",
            _share(decode.gbytes / machine.copy_gbytes),
        )
        for result, speed in _speeds(model)
        for decode in speed.decode
    ]
    head = (
        "weights", "order", "batch", "ms/step", "tokens/s", "experts/layer", "MB/token", "GB/s",
        "of copy",
    )  # fmt: skip
    return table(head, rows, texts=2)


def _price(model: ModelResult) -> str:
    """Ratios of the two orders; empty unless both were measured."""
    rows = []
    batches: list[int] = []
    for result in model.weights:
        orders = {speed.arithmetic: speed for speed in result.speed}
        if not {_FREE, _FIXED} <= orders.keys():
            return ""
        free, fixed = orders[_FREE], orders[_FIXED]
        pairs: list[tuple[Decode, Decode]] = list(zip(free.decode, fixed.decode, strict=True))
        batches = [quick.batch for quick, _ in pairs]
        ratios = [fixed.prefill.median / free.prefill.median]
        ratios += [slow.median / quick.median for quick, slow in pairs]
        rows.append((result.weights, *(f"{ratio:.1f}" for ratio in ratios)))
    head = ("weights", "prefill", *(f"decode, batch {batch}" for batch in batches))
    return table(head, rows, texts=1)


def _memory(model: ModelResult) -> str:
    rows = []
    for result in model.weights:
        for memory in result.memory:
            first, last = memory.touched[0], memory.touched[-1]
            stages = (memory.base, memory.loaded, first.resident, last.resident, memory.prefilled)
            rows.append(
                (
                    result.weights,
                    memory.arithmetic,
                    f"{result.load.cold:.2f} s",
                    f"{result.load.warm:.2f} s",
                    *(_mb(stage.total) for stage in stages),
                    _mb(memory.peak),
                    f"{memory.peak / model.checkpoint_bytes:.2f}",
                )
            )
    steps = model.weights[0].memory[0].touched[-1].steps
    head = (
        "weights", "order", "load, cold", "load, warm", "base", "loaded", "1 step",
        f"{steps} steps", "prompt", "peak", "peak / checkpoint",
    )  # fmt: skip
    return table(head, rows, texts=2)


def _bounds(model: ModelResult) -> str:
    packed = [result for result in model.weights if result.weights == "packed"]
    if not packed:
        return "Packed weights were not measured."
    rows = [
        (
            f"load, {name}",
            f"{seconds:.2f} s",
            f"below {LOAD_LIMIT_SECONDS:.0f} s",
            _verdict(seconds < LOAD_LIMIT_SECONDS),
        )
        for name, seconds in (("cold", packed[0].load.cold), ("warm", packed[0].load.warm))
    ]
    rows += [_memory_bound(model, memory) for memory in packed[0].memory]
    return table(("what", "measured", "asked for", "holds"), rows, texts=4)


def _memory_bound(model: ModelResult, memory: Memory) -> tuple[str, str, str, str]:
    first = memory.touched[0]
    now, base, caches = first.resident, memory.base.total, memory.caches
    rest = now.total - base - now.shards
    return (
        f"resident after one decode step, {memory.arithmetic} order "
        f"({first.expert_count} of {model.experts} experts used)",
        f"{_mb(now.total)}: base {_mb(base)}, checkpoint pages {_mb(now.shards)}, "
        f"everything else {_mb(rest)}",
        f"below {_mb(memory.allowance)}: base {_mb(base)}, caches {_mb(caches)}, "
        f"1.2 x {_mb(first.bytes)} touched",
        _verdict(now.total < memory.allowance),
    )


def _speeds(model: ModelResult) -> list[tuple[WeightsResult, Speed]]:
    return [(result, speed) for result in model.weights for speed in result.speed]


def _verdict(holds: bool) -> str:
    return "yes" if holds else "no"


def _share(ratio: float) -> str:
    return f"{ratio:.0%}" if ratio >= 0.1 else f"{ratio:.1%}"


def _mb(count: float) -> str:
    return f"{count / 1e6:.0f} MB" if count >= 1e7 else f"{count / 1e6:.1f} MB"

"""``deepinfer-neuron bench``: speed of random prompts, and what the drafts contribute."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from typing import TYPE_CHECKING

from deepinfer_neuron.cli.command import Command
from deepinfer_neuron.cli.output import console, print_json
from deepinfer_neuron.errors import RequestError
from deepinfer_neuron.settings import WEIGHTS_MODES

if TYPE_CHECKING:
    from deepinfer_neuron.engine.inputs import Prompt
    from deepinfer_neuron.engine.outputs import EngineStats, RequestOutput

_LABEL_WIDTH = 26


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the benchmark."""
    parser.add_argument(
        "--model", metavar="DIR", help="checkpoint directory (default: the demo model)"
    )
    parser.add_argument(
        "--input-len",
        type=int,
        default=512,
        metavar="N",
        help="prompt tokens (default %(default)s)",
    )
    parser.add_argument(
        "--output-len", type=int, default=128, metavar="N",
        help="tokens to generate per prompt (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--batch", type=int, default=1, metavar="N",
        help="prompts that run together (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--nextn", type=int, metavar="N",
        help="drafts per step, 0 for none (default: block length of the checkpoint)",
    )  # fmt: skip
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="default %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the prompts")
    parser.add_argument(
        "--weights", choices=WEIGHTS_MODES, default="auto",
        help="how quantized weights are held in memory (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )


def run(args: argparse.Namespace) -> int:
    """Run the benchmark and print its report."""
    for name in ("input_len", "output_len", "batch"):
        if getattr(args, name) < 1:
            option = f"--{name.replace('_', '-')}"
            raise RequestError(f"{option} is {getattr(args, name)}; give a number of at least 1")
    from deepinfer_neuron.llm import LLM
    from deepinfer_neuron.sampling.params import SamplingParams

    params = SamplingParams(
        temperature=args.temperature, max_tokens=args.output_len, ignore_eos=True, seed=args.seed
    )
    with LLM(
        args.model,
        nextn=args.nextn,
        max_num_seqs=args.batch,
        max_model_len=args.input_len + args.output_len,
        enable_prefix_caching=False,
        weights=args.weights,
        progress=sys.stderr.isatty() and not args.json,
    ) as llm:
        rng = random.Random(args.seed)
        vocabulary = llm.checkpoint.config.vocab_size
        prompts: list[Prompt] = [
            {"prompt_token_ids": [rng.randrange(3, vocabulary) for _ in range(args.input_len)]}
            for _ in range(args.batch)
        ]
        outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty() and not args.json)
        record = _record(args, llm.config.nextn, outputs, llm.stats())
    if args.json:
        print_json(record)
    else:
        _show(record)
    return 0


def _record(
    args: argparse.Namespace, nextn: int, outputs: list[RequestOutput], stats: EngineStats
) -> dict[str, object]:
    """Everything measured; times in milliseconds, medians over the requests."""
    starts = [output.metrics.arrival_time for output in outputs]
    ends = [output.metrics.finish_time for output in outputs]
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    steps = max(stats.steps, 1)
    return {
        "input_len": args.input_len,
        "output_len": args.output_len,
        "batch": args.batch,
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


def _show(record: dict[str, object]) -> None:
    out = console()
    for name, value in record.items():
        out.print(f"{name.replace('_', ' '):<{_LABEL_WIDTH}}{_text(value)}", soft_wrap=True)


def _text(value: object) -> str:
    if isinstance(value, list):
        return " ".join(f"{item:.3f}" for item in value) or "-"
    if isinstance(value, float):
        return f"{value:.2f}"
    return "-" if value is None else str(value)


COMMAND = Command("bench", "measure speed with random prompts", add_arguments, run)

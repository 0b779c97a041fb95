"""``deepinfer-neuron generate``: continue prompts and show the text, the tokens and the speed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_neuron.cli.command import Command
from deepinfer_neuron.cli.engine_options import (
    add_engine_options,
    add_limit_options,
    engine_arguments,
    limit_arguments,
)
from deepinfer_neuron.cli.output import console, print_json, printable
from deepinfer_neuron.errors import RequestError

if TYPE_CHECKING:
    from deepinfer_neuron.llm import RequestOutput

_LABEL_WIDTH = 11
_MOST_TOGETHER = 32
"""Prompts that run together unless told otherwise, as in the engine."""


@dataclass(frozen=True)
class Speed:
    """Times of one request: milliseconds to the first token and per later token, tokens/s overall.

    A figure is ``None`` where the request has too few tokens to define it.
    """

    ttft_ms: float | None
    tpot_ms: float | None
    tokens_per_second: float | None


def measure(output: RequestOutput) -> Speed:
    """The speed of ``output``; tokens/s counts its tokens over the time to its last token."""
    ttft, tpot = output.metrics.ttft, output.metrics.tpot
    count = len(output.outputs[0].token_ids)
    seconds = (ttft or 0.0) + (tpot or 0.0) * max(count - 1, 0)
    return Speed(
        ttft_ms=None if ttft is None else ttft * 1e3,
        tpot_ms=None if tpot is None else tpot * 1e3,
        tokens_per_second=count / seconds if seconds > 0 else None,
    )


def collect_prompts(prompts: Sequence[str], prompt_file: str | None) -> list[str]:
    """The prompts to run, in order: those given directly, then the non-empty lines of the file.

    Raises :class:`RequestError` if the file cannot be read as UTF-8 text or there is no prompt.
    """
    collected = list(prompts)
    if prompt_file is not None:
        try:
            text = Path(prompt_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(
                f"cannot read the prompt file {prompt_file!r} ({error}); give a UTF-8 text file "
                "with one prompt per line."
            ) from error
        collected.extend(line for line in text.split("\n") if line.strip())
    if not collected:
        raise RequestError(
            "there is no prompt; give --prompt TEXT (repeatable) or a --prompt-file with one "
            "prompt per line."
        )
    return collected


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_options(parser)
    add_limit_options(parser)
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="a prompt (repeatable)"
    )
    parser.add_argument(
        "--prompt-file", metavar="FILE", help="UTF-8 text file with one prompt per line"
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=32,
        metavar="N",
        help="tokens to generate per prompt at most (default %(default)s)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 takes the likeliest token, larger is more random (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, metavar="S", help="seed of the random choices")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per prompt and nothing else"
    )


def _run(args: argparse.Namespace) -> int:
    prompts = collect_prompts(args.prompt, args.prompt_file)
    limits = limit_arguments(args)
    if limits["max_num_seqs"] is None:
        # No more than can run together: a device compiles graphs for every number of sequences.
        rows = limits["max_num_batched_tokens"] or _MOST_TOGETHER
        limits["max_num_seqs"] = max(1, min(len(prompts), _MOST_TOGETHER, rows))
    shared = engine_arguments(args)
    from deepinfer_neuron.llm import LLM
    from deepinfer_neuron.sampling.params import SamplingParams

    params = SamplingParams(
        temperature=args.temperature, max_tokens=args.max_tokens, seed=args.seed
    )
    use_tqdm = sys.stderr.isatty() and not args.json
    llm = LLM(args.model, **shared, **limits, progress=use_tqdm)
    for output in llm.generate(prompts, params, use_tqdm=use_tqdm):
        if args.json:
            print_json(_record(output))
        else:
            _show(output)
    return 0


def _record(output: RequestOutput) -> dict[str, object]:
    """``output`` as the object of one JSON line."""
    completion, speed = output.outputs[0], measure(output)
    failed = {"error": completion.stop_reason} if completion.finish_reason == "error" else {}
    return {
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "ttft_ms": speed.ttft_ms,
        "tpot_ms": speed.tpot_ms,
        "tokens_per_second": speed.tokens_per_second,
        "tokens_per_decode_step": output.metrics.decode.tokens_per_step,
        **failed,
    }


def _show(output: RequestOutput) -> None:
    """Print ``output`` for a person, followed by an empty line."""
    completion, speed = output.outputs[0], measure(output)
    finish = f"{completion.finish_reason}, {len(completion.token_ids)} tokens"
    if completion.finish_reason == "error":
        finish += f": {completion.stop_reason}"
    lines = {
        "prompt": output.prompt or "",
        "text": completion.text,
        "token ids": " ".join(str(token) for token in completion.token_ids),
        "finish": finish,
        "speed": f"TTFT {_number(speed.ttft_ms)} ms, TPOT {_number(speed.tpot_ms)} ms, "
        f"{_number(speed.tokens_per_second)} tokens/s",
        "drafts": f"{output.metrics.decode.tokens_per_step:.2f} tokens per decode step",
    }
    out = console()
    for label, value in lines.items():
        body = printable(value).replace("\n", "\n" + " " * _LABEL_WIDTH)
        out.print(f"{label:<{_LABEL_WIDTH}}{body}", soft_wrap=True)
    out.print()


def _number(value: float | None) -> str:
    """``value`` to one decimal, or a dash."""
    return "-" if value is None else f"{value:.1f}"


COMMAND = Command("generate", "continue prompts with a checkpoint", _add_arguments, _run)

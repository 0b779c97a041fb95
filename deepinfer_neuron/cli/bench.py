"""``deepinfer-neuron bench``: speed of random prompts, and what the drafts contribute."""

from __future__ import annotations

import argparse
import sys

from deepinfer_neuron.cli.command import Command
from deepinfer_neuron.cli.engine_options import (
    add_engine_options,
    engine_arguments,
    is_simulated,
)
from deepinfer_neuron.cli.output import print_json
from deepinfer_neuron.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the benchmark."""
    add_engine_options(parser)
    parser.add_argument(
        "--input-len", type=int, default=512, metavar="N",
        help="prompt tokens (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--output-len", type=int, default=128, metavar="N",
        help="tokens to generate per prompt (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--batch", type=int, default=1, metavar="N",
        help="prompts that run together (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--max-num-batched-tokens", type=int, metavar="N", help="rows of a step (default: 512)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="default %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the prompts")
    parser.add_argument(
        "--cores", type=int, metavar="N",
        help="with --simulate: Trainium cores that the predicted times are for (default 1)",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )


def run(args: argparse.Namespace) -> int:
    """Run the benchmark and print its report."""
    shared = engine_arguments(args)
    if args.cores is not None and not is_simulated(args):
        raise ConfigError(
            "--cores belongs to the predicted times of a simulated run; add --simulate, or use "
            "'inspect --plan'"
        )
    from deepinfer_neuron.cli.benchmark import Workload, measure
    from deepinfer_neuron.engine.config import check_integer
    from deepinfer_neuron.engine.layout import MOST_CORES
    from deepinfer_neuron.llm import LLM

    cores = 1 if args.cores is None else check_integer("--cores", args.cores, 1, MOST_CORES)
    workload = Workload(args.input_len, args.output_len, args.batch, args.temperature, args.seed)
    watched = sys.stderr.isatty() and not args.json
    with LLM(
        args.model,
        **shared,
        max_num_seqs=args.batch,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.input_len + args.output_len,
        enable_prefix_caching=False,
        progress=watched,
    ) as llm:
        found = measure(llm, workload, cores=cores, use_tqdm=watched)
    if args.json:
        print_json(found.record())
    else:
        found.show()
    return 0


COMMAND = Command("bench", "measure speed with random prompts", add_arguments, run)

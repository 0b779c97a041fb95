"""``deepinfer-neuron tiny``: write a small random checkpoint to try the engine with."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from deepinfer_neuron.cli.command import Command
from deepinfer_neuron.cli.output import console, format_bytes


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="where the checkpoint goes; made if missing"
    )
    parser.add_argument(
        "--preset",
        default="tiny",
        help="size of the model: nano, tiny or mid (default %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the weights (default %(default)s)"
    )
    parser.add_argument(
        "--wild",
        action="store_true",
        help="full-strength random layers, which amplify every rounding difference",
    )
    parser.add_argument(
        "--golden",
        action="store_true",
        help="also compute golden tokens with the reference computation",
    )


def _run(args: argparse.Namespace) -> int:
    from deepinfer_neuron.checkpoint.tiny import write_checkpoint

    directory = write_checkpoint(
        Path(args.out),
        preset=args.preset,
        seed=args.seed,
        wild=args.wild,
        progress=sys.stderr.isatty(),
    )
    if args.golden:
        from deepinfer_neuron.checkpoint.reader import Checkpoint
        from deepinfer_neuron.reference import golden

        with Checkpoint.open(directory) as checkpoint:
            golden.save(directory, golden.compute(checkpoint))
    size = sum(path.stat().st_size for path in directory.iterdir())
    console().print(f"{directory}: {args.preset} checkpoint, {format_bytes(size)}", soft_wrap=True)
    return 0


COMMAND = Command("tiny", "write a small random checkpoint", _add_arguments, _run)

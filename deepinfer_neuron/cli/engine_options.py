"""Options of every command that runs the engine, and what they mean to :class:`LLM`."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Literal, TypedDict

from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.settings import WEIGHTS_MODES, Settings, WeightsMode

if TYPE_CHECKING:
    from deepinfer_neuron.engine.config import BucketOptions

DEVICES = ("cpu", "neuron")
COMPILE = ("off", "regions")
"""As ``platform.base`` has it, which only loads with torch."""


class EngineArguments(TypedDict):
    """Arguments of :class:`LLM` that all commands share."""

    device: str
    simulate: bool | None
    compile: Literal["off", "regions"] | None
    buckets: BucketOptions
    nextn: int | None
    weights: WeightsMode | None


class LimitArguments(TypedDict):
    """Arguments of :class:`LLM` that bound its memory and its shapes."""

    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    num_blocks: int | None


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Checkpoint, drafts, weights, device and buckets."""
    parser.add_argument(
        "--model", metavar="DIR", help="checkpoint directory (default: the demo model)"
    )
    parser.add_argument(
        "--nextn", type=int, metavar="N",
        help="drafts per step, 0 for none (default: block length of the checkpoint)",
    )  # fmt: skip
    parser.add_argument(
        "--weights", choices=WEIGHTS_MODES,
        help="how quantized weights are held in memory (default: DEEPINFER_NEURON_WEIGHTS, or "
        "auto)",
    )  # fmt: skip
    add_device_options(parser)


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Where the engine runs and what it compiles there."""
    group = parser.add_argument_group("device")
    group.add_argument("--device", choices=DEVICES, help="default: cpu, or neuron with --simulate")
    group.add_argument(
        "--simulate", action="store_true",
        help="a simulated Neuron device: checks its rules and counts, on the host and slowly",
    )  # fmt: skip
    group.add_argument(
        "--compile", choices=COMPILE,
        help="regions: one compiled graph per part of the network and shape (default: off on cpu, "
        "regions on neuron)",
    )  # fmt: skip
    group.add_argument(
        "--prefill-bucket", type=int, metavar="ROWS",
        help="rows of the smallest compiled prompt pass (default 128)",
    )  # fmt: skip
    group.add_argument(
        "--context-bucket", type=int, metavar="TOKENS",
        help="tokens of the narrowest compiled block table (default 16384)",
    )  # fmt: skip
    group.add_argument(
        "--warm-up-seconds", type=float, metavar="S",
        help="begin no further compilation before the first request after this time, 0 for none "
        "(default: no limit)",
    )  # fmt: skip


def add_limit_options(parser: argparse.ArgumentParser) -> None:
    """Bounds of memory and shapes."""
    group = parser.add_argument_group("limits")
    group.add_argument(
        "--max-model-len", type=int, metavar="N",
        help="longest prompt plus output in tokens (default: at most 4096)",
    )  # fmt: skip
    group.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences that run together")
    group.add_argument(
        "--max-num-batched-tokens", type=int, metavar="N",
        help="rows of a step (default: 512)",
    )  # fmt: skip
    group.add_argument(
        "--num-blocks", type=int, metavar="N",
        help="cache blocks of 128 tokens, the reserved one included (default: from the memory)",
    )  # fmt: skip


def engine_arguments(args: argparse.Namespace) -> EngineArguments:
    """What the options of :func:`add_engine_options` say.

    Raises:
        ConfigError: options that contradict each other, or a bucket out of range.
    """
    return EngineArguments(
        device=device_of(args),
        simulate=args.simulate or None,
        compile=args.compile,
        buckets=buckets_of(args),
        nextn=args.nextn,
        weights=args.weights,
    )


def limit_arguments(args: argparse.Namespace) -> LimitArguments:
    """What the options of :func:`add_limit_options` say."""
    return LimitArguments(
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        num_blocks=args.num_blocks,
    )


def device_of(args: argparse.Namespace) -> str:
    """Name of the device.

    Raises:
        ConfigError: the CPU is to be simulated.
    """
    if args.simulate and args.device == "cpu":
        raise ConfigError(
            "--simulate is for the Neuron device; leave --device cpu out, or leave --simulate out "
            "to run on the CPU"
        )
    return args.device or ("neuron" if args.simulate else "cpu")


def is_simulated(args: argparse.Namespace) -> bool:
    """Whether the simulated device will run, by option or by environment."""
    if device_of(args) != "neuron":
        return False
    return bool(args.simulate) or Settings.from_env(os.environ).simulate


def buckets_of(args: argparse.Namespace) -> BucketOptions:
    """Sizes that graphs are compiled for.

    Raises:
        ConfigError: one of them is out of range.
    """
    from deepinfer_neuron.engine.config import BucketOptions, check_integer

    known = BucketOptions()
    rows, context = args.prefill_bucket, args.context_bucket
    seconds = args.warm_up_seconds
    if seconds is not None and not seconds >= 0:
        raise ConfigError(f"--warm-up-seconds is {seconds}; give a number of seconds from 0 on")
    return BucketOptions(
        known.prefill_rows if rows is None else check_integer("--prefill-bucket", rows, 1, 2**20),
        known.context
        if context is None
        else check_integer("--context-bucket", context, 1, 2**31 - 1),
        seconds,
    )

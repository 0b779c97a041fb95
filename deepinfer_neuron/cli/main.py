"""Entry point of ``deepinfer-neuron``: parses the command, runs it, turns errors into exit codes.

Exit codes: 0 success, 1 unexpected error or a plan that does not fit, 2 wrong usage or an error
that the user can mend, 130 interrupted, 141 the reader of the output went away.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from deepinfer_neuron import __version__
from deepinfer_neuron.cli import bench, compile, doctor, generate, inspect, tiny
from deepinfer_neuron.cli.log import brief_log
from deepinfer_neuron.errors import DeepInferNeuronError

COMMANDS = (
    generate.COMMAND,
    bench.COMMAND,
    compile.COMMAND,
    tiny.COMMAND,
    inspect.COMMAND,
    doctor.COMMAND,
)

EXIT_UNEXPECTED = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; the chosen :class:`Command` arrives as ``args.command``."""
    debug = argparse.ArgumentParser(add_help=False)
    debug.add_argument(
        "--debug",
        action="store_true",
        default=argparse.SUPPRESS,
        help="show the traceback of an error",
    )
    parser = argparse.ArgumentParser(
        prog="deepinfer-neuron",
        description="Inference engine for DeepSeek-V4.1 checkpoints.",
        parents=[debug],
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        child = commands.add_parser(
            command.name,
            help=command.help,
            description=f"{command.help[0].upper()}{command.help[1:]}.",
            parents=[debug],
            allow_abbrev=False,
        )
        command.add_arguments(child)
        child.set_defaults(command=command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv`` (default: the process's arguments) and return the exit code.

    Raises ``SystemExit`` for ``--help``, ``--version`` and wrong usage, as argparse does.
    """
    args = build_parser().parse_args(argv)
    return guarded(lambda: args.command.run(args), debug="debug" in args)


def guarded(run: Callable[[], int], *, debug: bool | None = None) -> int:
    """Call ``run`` and return its exit code; what it raises becomes one line and a code.

    Args:
        run: the work.
        debug: show the traceback too; ``None`` where the user cannot ask for it.
    """
    try:
        with nullcontext() if debug else brief_log():
            code = run()
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except DeepInferNeuronError as error:
        _report(f"error: {error}", debug=bool(debug))
        return EXIT_ERROR
    except Exception as error:
        text = " ".join(str(error).split()) or "no message"
        hint = "; run again with --debug for the traceback" if debug is False else ""
        _report(f"error: unexpected {type(error).__name__}: {text}{hint}", debug=bool(debug))
        return EXIT_UNEXPECTED
    return code


def _report(message: str, *, debug: bool) -> None:
    """Print ``message`` to stderr, after the traceback of the current exception if ``debug``."""
    if debug:
        traceback.print_exc()
    print(message, file=sys.stderr)


def _discard_stdout() -> None:
    """Send what is still buffered for stdout nowhere, so that closing it at exit stays quiet."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, sys.stdout.fileno())
    os.close(sink)


if __name__ == "__main__":
    sys.exit(main())

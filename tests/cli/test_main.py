"""Exit codes and messages of the command line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from deepinfer_neuron import __version__
from deepinfer_neuron.cli.main import main
from deepinfer_neuron.errors import (
    CheckpointError,
    ConfigError,
    DeepInferNeuronError,
    PlatformError,
    RequestError,
    TokenizerError,
)

GENERATE = ["generate", "--model", "some/dir", "--prompt", "hello"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"deepinfer-neuron {__version__}\n"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert all(f"\n    {name} " in out for name in ("generate", "tiny", "inspect", "doctor"))


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["unknown"],
        ["generate", "--nextn", "x"],
        ["generate", "--mod", "x"],
        ["tiny"],
        ["inspect"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: deepinfer-neuron")


@pytest.mark.parametrize(
    "error_class",
    [
        CheckpointError,
        ConfigError,
        DeepInferNeuronError,
        PlatformError,
        RequestError,
        TokenizerError,
    ],
)
def test_an_error_of_the_package_is_one_line_and_exit_2(
    error_class: type[DeepInferNeuronError], engine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.error = error_class("something is off; mend it.")
    assert main(GENERATE) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: something is off; mend it.\n"


def test_an_unexpected_error_is_one_line_with_a_hint_and_exit_1(
    engine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.error = IndexError("first line\nsecond line")
    assert main(GENERATE) == 1
    assert capsys.readouterr().err == (
        "error: unexpected IndexError: first line second line; "
        "run again with --debug for the traceback\n"
    )


@pytest.mark.parametrize("argv", [["--debug", *GENERATE], [*GENERATE, "--debug"]])
@pytest.mark.parametrize(("error", "code"), [(ConfigError("bad"), 2), (IndexError("bad"), 1)])
def test_debug_shows_the_traceback(
    argv: list[str],
    error: Exception,
    code: int,
    engine,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine.error = error
    assert main(argv) == code
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last):")
    assert err.splitlines()[-1].startswith("error: ")
    assert "--debug" not in err.splitlines()[-1]


def test_an_interrupt_exits_with_130(engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.error = KeyboardInterrupt()
    assert main(GENERATE) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("write", ["print", "console().print"])
def test_a_closed_pipe_is_quiet(write: str) -> None:
    code = (
        "import sys\n"
        "from deepinfer_neuron.cli import main as module\n"
        "from deepinfer_neuron.cli.command import Command\n"
        "from deepinfer_neuron.cli.output import console\n"
        "def run(args):\n"
        f"    {write}('x' * 100_000)\n"
        "    return 0\n"
        "module.COMMANDS = (Command('loud', 'be loud', lambda parser: None, run),)\n"
        "sys.exit(module.main(['loud']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    stderr = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), stderr) == (141, "")


def test_help_does_not_load_torch() -> None:
    code = (
        "import sys\n"
        "from deepinfer_neuron.cli.main import build_parser\n"
        "build_parser().format_help()\n"
        "print('torch' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("False\n", "")

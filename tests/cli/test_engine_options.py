"""Options of the device: what they mean, and how wrong ones are answered."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_neuron.cli import engine_options
from deepinfer_neuron.cli.compile import shapes_of
from deepinfer_neuron.cli.main import EXIT_ERROR, main
from deepinfer_neuron.platform.base import COMPILE_MODES

CheckpointDir = Callable[..., Path]
COMMANDS = (["generate", "--prompt", "p"], ["bench"], ["compile", "--compile", "regions"])


def parse(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    engine_options.add_engine_options(parser)
    return parser.parse_args(["--model", "m", *options])


def test_modes_are_those_of_the_platform() -> None:
    assert engine_options.COMPILE == COMPILE_MODES


@pytest.mark.parametrize(
    ("options", "environment", "device", "simulated"),
    [
        ([], "", "cpu", False),
        ([], "1", "cpu", False),
        (["--simulate"], "", "neuron", True),
        (["--device", "neuron"], "", "neuron", False),
        (["--device", "neuron"], "1", "neuron", True),
        (["--device", "neuron", "--simulate"], "", "neuron", True),
    ],
)
def test_where_the_engine_runs(
    options: list[str],
    environment: str,
    device: str,
    simulated: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DEEPINFER_NEURON_SIMULATE", environment)
    args = parse(*options)
    assert engine_options.device_of(args) == device
    assert engine_options.is_simulated(args) is simulated
    # Without the option the environment decides.
    assert engine_options.engine_arguments(args)["simulate"] in (None, True)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--simulate", "--device", "cpu"], "--simulate is for the Neuron device"),
        (["--prefill-bucket", "0"], "--prefill-bucket is 0; give an integer from 1"),
        (["--context-bucket", "-5"], "--context-bucket is -5; give an integer from 1"),
        (["--warm-up-seconds", "-1"], "--warm-up-seconds is -1.0; give a number of seconds"),
        (["--warm-up-seconds", "nan"], "--warm-up-seconds is nan; give a number of seconds"),
    ],
)
def test_wrong_values_are_one_line(
    command: list[str], options: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command[0], "--model", "nowhere", *command[1:], *options]) == EXIT_ERROR
    assert capsys.readouterr().err.startswith(f"error: {problem}")


@pytest.mark.parametrize("options", [["--compile", "all"], ["--device", "cuda"]])
def test_unknown_words_are_wrong_usage(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["generate", "--model", "m", "--prompt", "p", *options])
    assert caught.value.code == 2
    assert "invalid choice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ([], "the CPU compiles nothing by itself"),
        (["--simulate", "--compile", "off"], "--compile off compiles nothing"),
        (["--simulate", "--warm-up-seconds", "0"], "--warm-up-seconds 0 leaves nothing"),
    ],
)
def test_compile_wants_something_to_compile(
    options: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", "--model", "nowhere", *options]) == EXIT_ERROR
    assert capsys.readouterr().err.startswith(f"error: {problem}")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--cores", "4"], "--cores belongs to the predicted times of a simulated run"),
        (["--cores", "0", "--simulate"], "--cores is 0; give an integer from 1"),
        (["--output-len", "0", "--simulate"], "--output-len is 0; give a number of at least 1"),
    ],
)
def test_bench_checks_before_it_loads(
    options: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--model", "nowhere", *options]) == EXIT_ERROR
    assert capsys.readouterr().err.startswith(f"error: {problem}")


def test_a_machine_without_a_chip_says_so(
    checkpoint_dir: CheckpointDir,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DEEPINFER_NEURON_SIMULATE", raising=False)
    directory = str(checkpoint_dir("nano", 1))
    argv = ["generate", "--model", directory, "--prompt", "p", "--device", "neuron"]
    assert main(argv) == EXIT_ERROR
    assert "doctor" in capsys.readouterr().err


def test_shapes_of_a_graph() -> None:
    tensor = ("torch.bfloat16", (4, 2), (2, 1))
    assert list(shapes_of((tensor, None, (tensor, ("torch.int32", (), ()))))) == [
        "bf16[4, 2]",
        "bf16[4, 2]",
        "i32[]",
    ]

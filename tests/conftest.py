"""Fixtures that every room of the tests may use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deepinfer_neuron.checkpoint.reader import Checkpoint
from deepinfer_neuron.checkpoint.tiny import write_checkpoint

CheckpointDir = Callable[..., Path]
OpenCheckpoint = Callable[..., Checkpoint]


@pytest.fixture(scope="session")
def checkpoint_dir(tmp_path_factory: pytest.TempPathFactory) -> CheckpointDir:
    """Makes synthetic checkpoints: ``checkpoint_dir(preset, seed=0, wild=False)``.

    Each is written once per session. They are shared: a test that changes files copies them first.
    """
    root = tmp_path_factory.mktemp("checkpoints")

    def make(preset: str, seed: int = 0, wild: bool = False) -> Path:
        name = f"{preset}-{seed}-{'wild' if wild else 'calm'}"
        return write_checkpoint(root / name, preset, seed=seed, wild=wild)

    return make


@pytest.fixture(scope="session")
def open_checkpoint(checkpoint_dir: CheckpointDir) -> Iterator[OpenCheckpoint]:
    """Opens synthetic checkpoints: ``open_checkpoint(preset, seed=0, wild=False)``.

    They are shared and closed at the end of the session.
    """
    opened: dict[Path, Checkpoint] = {}

    def get(preset: str, seed: int = 0, wild: bool = False) -> Checkpoint:
        directory = checkpoint_dir(preset, seed, wild)
        if directory not in opened:
            opened[directory] = Checkpoint.open(directory)
        return opened[directory]

    yield get
    for checkpoint in opened.values():
        checkpoint.close()

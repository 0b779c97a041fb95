"""Fixtures of the checkpoint tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deepinfer_neuron.checkpoint.reader import Checkpoint
from tests.support.raw_checkpoint import RawCheckpoint, small_checkpoint


@pytest.fixture
def raw() -> RawCheckpoint:
    """The parts of a small valid checkpoint that is not written yet."""
    return small_checkpoint()


@pytest.fixture
def opened(raw: RawCheckpoint, tmp_path: Path) -> Iterator[Checkpoint]:
    """The small checkpoint, written and opened."""
    with Checkpoint.open(raw.write(tmp_path / "model")) as checkpoint:
        yield checkpoint

"""Files that ship with the package: the small trained model that is used when none is named."""

from __future__ import annotations

from pathlib import Path

from deepinfer_neuron.errors import CheckpointError

DEMO_MODEL = Path(__file__).parent / "demo"
"""Directory of the demo checkpoint."""

HELD_OUT_FILE = "held_out.json"
"""Held-out chapters beside the checkpoint: a list of ``name``, ``edition`` and ``text``."""


def demo_model() -> Path:
    """Directory of the demo checkpoint.

    Raises:
        CheckpointError: the installation lacks it.
    """
    if not (DEMO_MODEL / "config.json").is_file():
        raise CheckpointError(
            f"the demo model is missing from this installation ({DEMO_MODEL}); install "
            "deepinfer-neuron again, or name a checkpoint directory."
        )
    return DEMO_MODEL


def model_or_demo(model: str | Path | None) -> Path:
    """The checkpoint directory to open: the one named, or that of the demo model.

    Raises:
        CheckpointError: none is named and the installation lacks the demo model.
    """
    return demo_model() if model is None else Path(model)

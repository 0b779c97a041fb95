"""Command line of the recipe: ``python -m tools.train_demo --folder RUN [part ...]``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from deepinfer_neuron.errors import DeepInferNeuronError
from tools.train_demo.recipe import Folder, Recipe, demo_recipe

PARTS = ("prepare", "main", "continuations", "drafts", "calibration", "export")


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Train the demo model. Every part goes on where it was interrupted."
    )
    parser.add_argument("--folder", required=True, type=Path, metavar="DIR", help="of the run")
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}")
    args = parser.parse_args()
    unknown = sorted(set(args.parts) - set(PARTS))
    if unknown:
        parser.error(f"unknown parts {', '.join(unknown)}")
    try:
        for part in args.parts or PARTS:
            run(part, demo_recipe(), Folder(args.folder))
    except DeepInferNeuronError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run(part: str, recipe: Recipe, folder: Folder, quiet: bool = False) -> None:
    """Run one part of a recipe."""
    import torch

    from tools.train_demo import continuations, data, shipping
    from tools.train_demo.calibration import CALIBRATED, calibrate
    from tools.train_demo.draft_trainer import DraftTrainer
    from tools.train_demo.trainer import MAIN_STATE, Trainer

    folder.root.mkdir(parents=True, exist_ok=True)
    if part == "prepare":
        data.prepare(recipe, folder)
    elif part == "main":
        Trainer(recipe, folder, data.load(folder), quiet).run()
    elif part == "continuations":
        continuations.make(recipe, folder, MAIN_STATE, quiet)
    elif part == "drafts":
        DraftTrainer(recipe, folder, data.load(folder), quiet).run()
    elif part == "calibration":
        print(f"temperature {calibrate(recipe, folder, data.load(folder)):.3f}")
    else:
        prepared = data.load(folder)
        target = shipping.export(folder, prepared, CALIBRATED)
        masters = torch.load(folder.path(CALIBRATED), weights_only=True)["masters"]
        numbers = shipping.losses(prepared, masters)
        (target / "evaluation.json").write_text(json.dumps(numbers, indent=1) + "\n")
        print(target, numbers)


if __name__ == "__main__":
    sys.exit(main())

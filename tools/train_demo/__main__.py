"""Command line of the recipe: ``python -m tools.train_demo --folder RUN [part ...]``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from deepinfer_neuron.errors import DeepInferNeuronError
from tools.train_demo.recipe import Folder, demo_recipe

PARTS = ("prepare", "main")


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the demo model; every part resumes.")
    parser.add_argument("--folder", required=True, type=Path, metavar="DIR")
    parser.add_argument("parts", nargs="*", choices=PARTS, default=PARTS)
    args = parser.parse_args()
    try:
        for part in args.parts:
            run(part, Folder(args.folder))
    except DeepInferNeuronError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run(part: str, folder: Folder) -> None:
    """Run one part of the recipe."""
    from tools.train_demo import data
    from tools.train_demo.trainer import Trainer

    recipe = demo_recipe()
    folder.root.mkdir(parents=True, exist_ok=True)
    if part == "prepare":
        data.prepare(recipe, folder)
    elif part == "main":
        Trainer(recipe, folder, data.load(folder)).run()


if __name__ == "__main__":
    sys.exit(main())

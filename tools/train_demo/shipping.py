"""From trained weights to the folder that ships: checkpoint, golden tokens, held-out text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from torch import Tensor

from deepinfer_neuron.assets import HELD_OUT_FILE
from deepinfer_neuron.checkpoint.reader import Checkpoint
from deepinfer_neuron.reference import Network, golden
from tools.train_demo import corpus
from tools.train_demo.data import Prepared
from tools.train_demo.evaluate import CONTEXT
from tools.train_demo.files import write_release
from tools.train_demo.network import network_for
from tools.train_demo.recipe import Folder
from tools.train_demo.trainer import held_out_loss
from tools.train_demo.weights import EXACT, RELEASED, Precision, plan, working_copy

RELEASE = "release"
_CLEAR_MARGIN = 0.1
_TRIES = 4


def export(folder: Folder, data: Prepared, state_file: str) -> Path:
    """Write the release of a training state; returns its folder."""
    target = folder.path(RELEASE)
    shutil.rmtree(target, ignore_errors=True)
    masters = torch.load(folder.path(state_file), weights_only=True)["masters"]
    files = folder.path("files")
    write_release(target, files / "config.json", masters, files / "tokenizer.json")
    text = folder.path("documents.json").read_text(encoding="utf-8")
    records = json.dumps(json.loads(text), ensure_ascii=False, indent=0)
    (target / HELD_OUT_FILE).write_text(records + "\n", encoding="utf-8")
    golden.save(target, golden_prompts(target, data))
    return target


def golden_prompts(target: Path, data: Prepared) -> list[golden.GoldenPrompt]:
    """Beginnings of held-out chapters, of those tried the ones with the clearest decisions."""
    documents = corpus.encode(data.tokenizer, [document.text for document in data.held_out])
    found = []
    with Checkpoint.open(target) as checkpoint:
        network = Network(checkpoint)
        for name, length in golden.LENGTHS.items():
            best: golden.GoldenPrompt | None = None
            for ids in documents[:_TRIES]:
                prompt = [corpus.BOS, *ids[: length - 1]]
                candidate = golden.golden_prompt(network, name, prompt)
                if best is None or candidate.margin > best.margin:
                    best = candidate
                if best.margin >= _CLEAR_MARGIN:
                    break
            assert best is not None
            found.append(best)
    return found


def losses(data: Prepared, masters: dict[str, Tensor]) -> dict[str, float]:
    """Held-out loss per token of the fp32 weights without any rounding, and as released."""
    documents = corpus.encode(data.tokenizer, [document.text for document in data.held_out])
    kinds = {slot.name: slot.kind for slot in plan(data.config)[0]}

    def loss(precision: Precision) -> float:
        work = working_copy(masters, kinds, precision, lambda name: False)
        network = network_for(data.config, data.hasher, precision)
        total, count = held_out_loss(network, work, documents, CONTEXT)
        return total / count

    exact, released = loss(EXACT), loss(RELEASED)
    return {
        "unquantized_loss": exact,
        "released_loss": released,
        "released_over_unquantized": released / exact,
    }

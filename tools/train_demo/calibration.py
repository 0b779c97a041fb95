"""One temperature for the confidence head, from blocks placed as verification places them.

The draft training puts blocks anywhere. In use a block begins where the last one was rejected,
which is where the text is hard to foresee, so the head is too sure of itself. Here fresh
continuations are walked block by block, and the head's weights are divided by the temperature that
makes its estimates likeliest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tools.train_demo.continuations import continuation
from tools.train_demo.data import Prepared
from tools.train_demo.draft_trainer import DRAFT_STATE, Judge
from tools.train_demo.drafts import Anchors
from tools.train_demo.recipe import Folder, Recipe
from tools.train_demo.trainer import MAIN_STATE
from tools.train_demo.weights import RELEASED, plan, working_copy

CALIBRATED = "calibrated.pt"


def calibrate(recipe: Recipe, folder: Folder, data: Prepared) -> float:
    """Write the weights with a calibrated head; returns the temperature."""
    numbers = recipe.continuations
    fresh = -(-numbers.prompts // numbers.batch)
    rows, bits = continuation(recipe, folder, data, MAIN_STATE, fresh)
    masters = torch.load(folder.path(DRAFT_STATE), weights_only=True)["masters"]
    kinds = {slot.name: slot.kind for slot in plan(data.config)[0]}
    judge = Judge(recipe, data)
    work = working_copy(masters, kinds, RELEASED, lambda name: False)
    texts = torch.from_numpy(rows.astype("int64"))
    features = torch.from_numpy(bits).view(torch.bfloat16)
    pairs = [
        _walk(judge, work, ids[None, 1:].contiguous(), feature, int(ids[0]))
        for ids, feature in zip(texts, features, strict=True)
    ]
    guess = torch.cat([pair[0] for pair in pairs])
    right = torch.cat([pair[1] for pair in pairs])
    temperature = best_temperature(guess, right)
    name = f"mtp.{data.config.num_draft_layers - 1}.confidence_head.proj.weight"
    masters[name] /= temperature
    torch.save({"masters": masters, "temperature": temperature}, folder.path(CALIBRATED))
    return temperature


@torch.no_grad()
def _walk(
    judge: Judge, work: dict[str, Tensor], ids: Tensor, features: Tensor, start: int
) -> tuple[Tensor, Tensor]:
    """Logits and outcomes of the drafts reached when blocks follow each other."""
    count = judge.recipe.drafts.block
    places = torch.arange(start, ids.shape[1] - count)
    anchors = Anchors(torch.zeros_like(places), places, ids.shape[1])
    verdict = judge(work, ids, anchors, features)
    accepted = verdict.right.long().cumprod(1).sum(1).tolist()
    guesses, outcomes, at = [], [], 0
    while at < len(places):
        reached = min(accepted[at] + 1, count)
        guesses.append(verdict.guess[at, :reached])
        outcomes.append(verdict.right[at, :reached])
        at += accepted[at] + 1
    return torch.cat(guesses), torch.cat(outcomes).float()


def best_temperature(guess: Tensor, right: Tensor) -> float:
    """The divisor of logits, of 0.5 to 4 in steps of 2 %, with the least cross-entropy."""
    loss = torch.nn.functional.binary_cross_entropy_with_logits
    candidates = [0.5 * 1.02**step for step in range(106)]
    return min(candidates, key=lambda t: float(loss(guess / t, right)))

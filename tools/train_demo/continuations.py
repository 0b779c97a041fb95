"""Greedy continuations of the finished network: the texts that the drafts learn."""

from __future__ import annotations

import numpy as np
import torch
import torch.multiprocessing as processes
from numpy.typing import NDArray
from tqdm import tqdm

from tools.train_demo.data import Prepared, load
from tools.train_demo.decoding import continue_greedily
from tools.train_demo.network import network_for
from tools.train_demo.recipe import Folder, Recipe
from tools.train_demo.weights import RELEASED, plan, working_copy

FILE = "continuations.npy"
FEATURES = "features.npy"
_PARTS = "continuations.{}.npz"


def make(recipe: Recipe, folder: Folder, masters_file: str, quiet: bool = False) -> None:
    """Write the continuations and their features; batches that are there are kept."""
    if folder.path(FILE).exists():
        return
    batches = range(-(-recipe.continuations.prompts // recipe.continuations.batch))
    missing = [b for b in batches if not folder.path(_PARTS.format(b)).exists()]
    context = processes.get_context("spawn")
    jobs = [(recipe, folder, masters_file, batch) for batch in missing]
    with context.Pool(recipe.lanes) as pool:
        for _ in tqdm(pool.imap_unordered(_one, jobs), total=len(jobs), disable=quiet):
            pass
    parts = [np.load(folder.path(_PARTS.format(b))) for b in batches]
    np.save(folder.path(FEATURES), np.concatenate([part["features"] for part in parts]))
    np.save(folder.path(FILE), np.concatenate([part["ids"] for part in parts]))
    for b in batches:
        folder.path(_PARTS.format(b)).unlink()


def _one(job: tuple[Recipe, Folder, str, int]) -> None:
    recipe, folder, masters_file, batch = job
    torch.set_num_threads(1)
    ids, features = continuation(recipe, folder, load(folder), masters_file, batch)
    partial = folder.path(f"partial.{batch}.npz")
    np.savez(partial, ids=ids, features=features)
    partial.replace(folder.path(_PARTS.format(batch)))


def continuation(
    recipe: Recipe, folder: Folder, data: Prepared, masters_file: str, batch: int
) -> tuple[NDArray[np.int32], NDArray[np.int16]]:
    """One batch: the prompt's length and the ids ``[B, 1 + T]``, and the bits of the features."""
    numbers = recipe.continuations
    masters = torch.load(folder.path(masters_file), weights_only=True)["masters"]
    kinds = {slot.name: slot.kind for slot in plan(data.config)[0]}
    work = working_copy(masters, kinds, RELEASED, lambda name: False)
    network = network_for(data.config, data.hasher, RELEASED)
    generator = np.random.default_rng([recipe.seed, 77, batch])
    shortest, longest = numbers.prompt_tokens
    length = int(generator.integers(shortest, longest + 1))
    starts = generator.integers(len(data.tokens) - length, size=numbers.batch)
    prompts = np.stack([data.tokens[at : at + length - 1] for at in starts])
    prompts = np.concatenate((np.zeros((numbers.batch, 1), np.int32), prompts), 1)
    ids, features = continue_greedily(
        network, work, torch.from_numpy(prompts.astype(np.int64)), recipe.drafts.context
    )
    head = np.full((numbers.batch, 1), length, dtype=np.int32)
    rows = np.concatenate((head, ids.numpy().astype(np.int32)), 1)
    return rows, features.view(torch.int16).numpy()

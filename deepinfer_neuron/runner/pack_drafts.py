"""From plain numbers to the tensors of a draft pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer_neuron.model.step import DraftStep
from deepinfer_neuron.runner.pack import StepGeometry


@dataclass(frozen=True)
class DraftPlan:
    """A sequence that wants drafts."""

    golden: int
    """Its last token, which the backbone has not seen."""
    position: int
    """Position of that token: how many tokens the caches hold."""
    state_slot: int


def pack_drafts(
    plans: Sequence[DraftPlan], block: int, noise: int, geometry: StepGeometry
) -> DraftStep:
    """Tensors of a pass that drafts ``block`` tokens for every sequence.

    Args:
        plans: at least one.
        block: drafts per sequence, at least 1.
        noise: token of the places that hold no token yet.
        geometry: window and ring sizes.
    """
    count = len(plans)
    golden = np.array([plan.golden for plan in plans], dtype=np.int64)
    anchor = np.array([plan.position for plan in plans], dtype=np.int64)
    slot = np.array([plan.state_slot for plan in plans], dtype=np.int64)
    token_ids = np.full((count, block), noise, dtype=np.int64)
    token_ids[:, 0] = golden

    kept = np.minimum(anchor, geometry.window)
    offset = np.cumsum(kept) - kept
    owner = np.repeat(np.arange(count), kept)
    position = (anchor - kept - offset)[owner] + np.arange(len(owner))
    places = slot[owner] * geometry.window_ring + position % geometry.window_ring

    width = int(kept.max()) + block
    key = np.arange(width)
    own = len(owner) + np.arange(count)[:, None] * block + key - kept[:, None]
    index = np.where(key < kept[:, None], offset[:, None] + key, own)
    index = np.where(key < kept[:, None] + block, index, -1)
    return DraftStep(
        token_ids=torch.from_numpy(token_ids.reshape(-1)),
        positions=torch.from_numpy((anchor[:, None] + np.arange(block)).reshape(-1)),
        history_places=torch.from_numpy(places),
        key_index=torch.from_numpy(np.repeat(index, block, axis=0)),
        block=block,
    )

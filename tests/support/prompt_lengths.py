"""Prompt lengths at which something in the network begins, ends or fills up."""

from __future__ import annotations

import random
from dataclasses import dataclass

from deepinfer_neuron.checkpoint.tiny_presets import get_preset


@dataclass(frozen=True)
class Case:
    """One prompt for one synthetic checkpoint."""

    preset: str
    seed: int
    wild: bool
    length: int
    cuts: tuple[int, ...]
    """Where the engine's chunks end; none runs it in one step."""

    def __str__(self) -> str:
        kind = "wild" if self.wild else "calm"
        return f"{self.preset}-{self.seed}-{kind}-{self.length}-in-{len(self.cuts) + 1}"


def border_lengths(preset: str) -> list[int]:
    """Lengths around the window, the block size, and the limits of top-k and candidates."""
    text = get_preset(preset).text
    window, topk = int(text["sliding_window"]), int(text["index_topk"])
    candidates = int(text["candidate_topk_blocks"]) * int(text["candidate_block_size"])
    centers = (window, topk, 2 * topk, 2 * topk + 2, 128, 256, candidates)
    return sorted({1, 2, 3, *(center + off for center in centers for off in (-1, 0, 1))})


def cases(preset: str, longest: int, extra: int = 0) -> list[Case]:
    """Border lengths up to ``longest`` and ``extra`` random odd ones, over ten checkpoints.

    Seeds 0 to 4, calm and wild, take turns; every other prompt is cut at up to four places.
    """
    draw = random.Random(f"{preset} {longest}")
    lengths = [length for length in border_lengths(preset) if length <= longest]
    lengths += [draw.randrange(longest // 2, longest) | 1 for _ in range(extra)]
    found = []
    for number, length in enumerate(lengths):
        parts = min(length - 1, draw.randrange(1, 5)) if number % 2 else 0
        cuts = tuple(sorted(draw.sample(range(1, length), parts)))
        found.append(Case(preset, number % 5, number // 5 % 2 == 1, length, cuts))
    return found

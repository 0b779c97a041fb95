"""Proposed tokens: what is known about them, and how many of them a step verifies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_neuron.ops.draft_input import split_rows_by_confidence
from deepinfer_neuron.sampling.state import Matcher, SamplingState

_WORD_BITS = 32

SEED_OFFSET = 1000000007
"""Added to a request's seed where drafts are drawn, so that draft and target draws never share
random words."""


@dataclass(frozen=True)
class Draft:
    """A proposal for one place of a sequence.

    Attributes:
        token_id: of the vocabulary.
        confidence: estimated probability that it is accepted if all drafts before it are.
        logprobs: fp32 ``[V]`` of the distribution it was drawn from; ``None`` if it was not drawn
            (then it counts as proposed with certainty).
    """

    token_id: int
    confidence: float = 1.0
    logprobs: Tensor | None = None


def survival(confidences: Sequence[float]) -> NDArray[np.float32]:
    """Estimated probability of every draft that it and all before it are accepted."""
    return np.cumprod(np.array(confidences, dtype=np.float32), dtype=np.float32)


def split_budget(survivals: Sequence[NDArray[np.float32]], total: int) -> list[int]:
    """How many leading drafts of each sequence are among the ``total`` most likely ones.

    Among equal probabilities the earlier sequence wins, then the earlier place. Because they never
    rise within a sequence, the winners are leading ones.

    Args:
        survivals: per sequence, from :func:`survival`.
        total: drafts that may be verified together.
    """
    width = max((len(chances) for chances in survivals), default=0)
    # Less than any chance, so that missing drafts come last.
    table = torch.full((len(survivals), width), -1.0)
    for row, chances in enumerate(survivals):
        table[row, : len(chances)] = torch.from_numpy(chances)
    available = sum(len(chances) for chances in survivals)
    rows = split_rows_by_confidence(len(survivals) + min(total, available), table)
    return (rows - 1).tolist()


def legal_drafts(state: SamplingState, drafts: Sequence[Draft]) -> int:
    """How many leading drafts are worth verifying under the sequence's grammar.

    A draft that the grammar refuses is rejected for certain, so nothing behind it counts. A greedy
    row may leave it out as well. A row that draws may not: what replaces a rejected draft follows
    another distribution than a draw without a draft, and both together give the right one.
    """
    matcher = state.matcher
    if matcher is None or state.failure is not None:
        return len(drafts)
    accepted = 0
    try:
        while accepted < len(drafts) and _follows(state, matcher, drafts[accepted].token_id):
            accepted += 1
        matcher.rollback(accepted)
    except Exception as error:
        state.failure = f"the grammar failed: {error}"
        return 0
    refused = accepted < len(drafts)
    return accepted + int(refused and not state.params.is_greedy)


def _follows(state: SamplingState, matcher: Matcher, token: int) -> bool:
    """Advance a matcher by a token that it allows; ``False`` if it does not.

    The mask is asked first: the library writes a warning about a special token it has to refuse.
    """
    if matcher.constrained():
        bitmask = torch.zeros(-(-state.vocab_size // _WORD_BITS), dtype=torch.int32)
        matcher.fill_bitmask(bitmask)
        if not (int(bitmask[token // _WORD_BITS]) >> (token % _WORD_BITS)) & 1:
            return False
    return matcher.accept(token)

"""What is reported about a token besides its id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_neuron.ops.sample import leading

LOWEST_LOGPROB = -9999.0
"""Reported instead of anything below it, also of minus infinity."""


@dataclass(frozen=True)
class TokenResult:
    """One token of a sequence.

    Attributes:
        token_id: of the vocabulary; 0 if ``failed``.
        logprob: natural logarithm of its probability, at least -9999; ``None`` if not asked for.
        top: the most probable tokens and their log-probabilities, descending, the lower id first
            among equal logits. A token that a filter removed has -9999.
        sum_smaller_probs: probability of drawing a token at most as probable as this one; ``None``
            unless the engine computes it.
        failed: why there is no token, or ``None``. The sequence cannot go on then.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    sum_smaller_probs: float | None = None
    failed: str | None = None


@dataclass(frozen=True)
class Score:
    """Log-probability of a token, and the alternatives at its place."""

    logprob: float
    top: tuple[tuple[int, float], ...]


def score(
    logits: Tensor,
    logprobs: Tensor,
    columns: Sequence[int],
    counts: Sequence[int],
    token_ids: Tensor | None = None,
) -> list[Score]:
    """Look up tokens and their alternatives.

    Args:
        logits: fp32 ``[n, V]``, for the ranking of the alternatives.
        logprobs: fp32 ``[n, V]``.
        columns: ``n`` tokens as columns; one outside ``[0, V)`` has the lowest log-probability.
        counts: ``n`` numbers of alternatives.
        token_ids: int64 ``[n, V]`` vocabulary ids of the columns, if they are not the columns.
    """
    width = logits.shape[1]
    most = min(max(counts, default=0), width)
    own = torch.tensor([c if 0 <= c < width else 0 for c in columns])[:, None]
    values = _floored(logprobs.gather(-1, own))
    ranked = leading(logits, most) if most else own[:, :0]
    alternatives = _floored(logprobs.gather(-1, ranked))
    names = ranked if token_ids is None else token_ids.gather(-1, ranked)
    scores = []
    for row, (column, count) in enumerate(zip(columns, counts, strict=True)):
        pairs = zip(names[row, :count].tolist(), alternatives[row, :count].tolist(), strict=True)
        value = float(values[row, 0]) if 0 <= column < width else LOWEST_LOGPROB
        scores.append(Score(value, tuple(pairs)))
    return scores


def _floored(logprobs: Tensor) -> Tensor:
    return logprobs.clamp_min(LOWEST_LOGPROB)

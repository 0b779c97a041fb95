"""Penalties for tokens that were there before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

_SPARE = 64


class TokenCounts:
    """The distinct tokens of a sequence and how often each was generated.

    Applying penalties costs time in proportion to the distinct tokens, not to the vocabulary or
    to the length of the text.
    """

    def __init__(self, prompt: Iterable[int]) -> None:
        """Start with the tokens of the prompt, generated zero times."""
        ids = list(dict.fromkeys(prompt))
        self._places = {token: place for place, token in enumerate(ids)}
        spare = max(_SPARE, len(ids))
        self._ids = np.concatenate((np.array(ids, dtype=np.int64), np.zeros(spare, np.int64)))
        self._counts = np.zeros(len(ids) + spare, dtype=np.float32)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def ids(self) -> Tensor:
        """Distinct tokens in order of appearance, int64 ``[k]``."""
        return torch.from_numpy(self._ids[: len(self)])

    @property
    def counts(self) -> Tensor:
        """How often each was generated, fp32 ``[k]``; 0 for one that only the prompt has."""
        return torch.from_numpy(self._counts[: len(self)])

    def add(self, token: int) -> None:
        """Count a generated token."""
        place = self._places.setdefault(token, len(self))
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[place] = token
        self._counts[place] += 1.0


def penalise(
    logits: Tensor,
    rows: Sequence[int],
    counts: Sequence[TokenCounts],
    repetition: Sequence[float],
    frequency: Sequence[float],
    presence: Sequence[float],
) -> None:
    """Change the logits of earlier tokens in place.

    First a positive logit of every counted token is divided by the repetition penalty and another
    one multiplied by it; then ``frequency * count`` and, for a generated token, ``presence`` are
    subtracted.

    Args:
        logits: fp32 ``[R, V]``.
        rows: ``n`` distinct rows.
        counts: earlier tokens of these rows.
        repetition: factors above 0; 1 is off.
        frequency: amounts per generation; 0 is off.
        presence: amounts; 0 is off.
    """
    lengths = torch.tensor([len(item) for item in counts])
    place = torch.tensor(list(rows)).repeat_interleave(lengths)
    ids = torch.cat([item.ids for item in counts])
    count = torch.cat([item.counts for item in counts])
    factor, slope, step = (
        torch.tensor(amounts, dtype=torch.float32).repeat_interleave(lengths)
        for amounts in (repetition, frequency, presence)
    )
    before = logits[place, ids]
    after = torch.where(before > 0.0, before / factor, before * factor)
    after = after - slope * count - step * (count > 0.0)
    logits[place, ids] = after

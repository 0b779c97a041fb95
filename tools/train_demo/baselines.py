"""Classical predictors of the held-out text: xz with the training text before it, and n-grams."""

from __future__ import annotations

import lzma
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ORDER = 5
_BITS = 12
"""Bits of a token id inside a packed n-gram."""

Keys = NDArray[np.int64]


def xz_bits_per_byte(train: bytes, held_out: bytes) -> float:
    """Growth of ``xz -9`` of the training text when the held-out text follows it."""
    together = len(lzma.compress(train + held_out, preset=9))
    return 8 * (together - len(lzma.compress(train, preset=9))) / len(held_out)


class NGrams:
    """Interpolated Kneser-Ney over tokens, one discount per order, orders 1 to 5.

    Args:
        tokens: the training stream, ids below 4096.
        vocabulary: number of ids.
    """

    def __init__(self, tokens: NDArray[np.int32], vocabulary: int) -> None:
        assert vocabulary <= 1 << _BITS
        self._vocabulary = vocabulary
        grams = [np.unique(_packed(tokens, n), return_counts=True) for n in range(1, ORDER + 1)]
        self._orders = []
        for order in range(1, ORDER + 1):
            keys, counts = grams[order - 1]
            if order < ORDER:
                # Below the highest order a gram counts once for every token before it.
                longer = grams[order][0] & ((1 << (_BITS * order)) - 1)
                keys, counts = np.unique(longer, return_counts=True)
            self._orders.append(_Order(keys, counts))

    def log2(self, history: Sequence[int], token: int) -> float:
        """Base-2 logarithm of the probability of a token behind at least four tokens."""
        probability = 1.0 / self._vocabulary
        for length, order in enumerate(self._orders):
            context = _pack(history[len(history) - length :]) if length else 0
            probability = order.refine(context, token, probability)
        return math.log2(probability)


class _Order:
    """Counts of one order, sorted by packed gram (oldest token in the highest bits)."""

    def __init__(self, keys: Keys, counts: NDArray[np.int64]) -> None:
        self._keys, self._counts = keys, counts
        singles, doubles = int((counts == 1).sum()), int((counts == 2).sum())
        self._discount = max(singles / max(singles + 2 * doubles, 1), 0.05)
        context = keys >> _BITS
        self._contexts, first = np.unique(context, return_index=True)
        self._totals = np.add.reduceat(counts, first)
        self._kinds = np.diff(np.append(first, len(keys)))

    def refine(self, context: int, token: int, lower: float) -> float:
        """Probability of a token, given that of the order below."""
        at = int(np.searchsorted(self._contexts, context))
        if at == len(self._contexts) or self._contexts[at] != context:
            return lower
        gram = (context << _BITS) | token
        place = int(np.searchsorted(self._keys, gram))
        found = place < len(self._keys) and self._keys[place] == gram
        count = int(self._counts[place]) if found else 0
        total = int(self._totals[at])
        rest = self._discount * int(self._kinds[at])
        return (max(count - self._discount, 0.0) + rest * lower) / total


def _packed(tokens: NDArray[np.int32], order: int) -> Keys:
    """All grams of one order in a stream."""
    ids = tokens.astype(np.int64)
    keys = np.zeros(len(ids) - order + 1, dtype=np.int64)
    for place in range(order):
        keys = (keys << _BITS) | ids[place : place + len(keys)]
    return keys


def _pack(ids: Sequence[int]) -> int:
    packed = 0
    for token in ids:
        packed = (packed << _BITS) | int(token)
    return packed


def ngram_bits(model: NGrams, documents: Sequence[Sequence[int]]) -> float:
    """Bits of documents; each begins behind an end and a start token, as in the stream."""
    total = 0.0
    for ids in documents:
        history = [1, 1, 1, 1, 0, *ids]
        for at in range(5, len(history)):
            total -= model.log2(history[at - 4 : at], history[at])
    return total

"""Philox4x32-10: random words that are a pure function of a key and a counter.

Nothing is carried from one draw to the next. The key is the seed of a request and the counter
comes from the position of the token, so a draw cannot depend on the batch, on how a prompt was
cut into chunks, or on what ran before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

CASES = 3
"""Independent draws per position: 0 a fresh token, 1 a token after a rejected draft, 2 the test
that accepts or rejects a draft."""

_WORD = 0xFFFFFFFF
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_KEY_STEP_0 = 0x9E3779B9
_KEY_STEP_1 = 0xBB67AE85
_ROUNDS = 10


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Ten rounds of Philox with four 32-bit words.

    One round maps ``(c0, c1, c2, c3)`` to ``(hi(B c2) ^ c1 ^ k0, lo(B c2), hi(A c0) ^ c3 ^ k1,
    lo(A c0))`` with the constants ``A = 0xD2511F53`` and ``B = 0xCD9E8D57``; the key words grow by
    ``0x9E3779B9`` and ``0xBB67AE85`` between rounds.

    Args:
        counter: int64 ``[..., 4]``, values in [0, 2^32).
        key: int64 ``[..., 2]``, values in [0, 2^32).

    Returns:
        int64 ``[..., 4]``, values in [0, 2^32).
    """
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key.unbind(-1)
    for _ in range(_ROUNDS):
        high_0, low_0 = _product(c0, _MULTIPLIER_0)
        high_1, low_1 = _product(c2, _MULTIPLIER_1)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + _KEY_STEP_0) & _WORD, (k1 + _KEY_STEP_1) & _WORD
    return torch.stack((c0, c1, c2, c3), -1)


def draw_words(seeds: Tensor, positions: Tensor, case: int | Tensor = 0) -> Tensor:
    """The random words of a draw.

    The counter is ``(0, 0, low, high)`` of the sequence number ``3 * position + case``, computed in
    32-bit arithmetic that wraps and then sign-extended to 64 bits.

    Args:
        seeds: int64 ``[n]`` holding the bits of unsigned 64-bit seeds, see :func:`seed_bits`.
        positions: int64 ``[n]``, index of the token that is drawn.
        case: which of the :data:`CASES` draws of that position; a tensor broadcasts, so one call
            serves several draws of a position.

    Returns:
        int64 ``[n, 4]``, values in [0, 2^32); ``[m, n, 4]`` with cases ``[m, n]`` or ``[m, 1]``.
    """
    sequence = (positions * CASES + case).to(torch.int32).to(torch.int64)
    zero = torch.zeros_like(sequence)
    counter = torch.stack((zero, zero, *_halves(sequence)), -1)
    return philox(counter, torch.stack(_halves(seeds), -1))


def seed_bits(seeds: Sequence[int]) -> Tensor:
    """Seeds in [0, 2^64) as int64 ``[n]`` with the same bits."""
    return torch.from_numpy(np.array(seeds, dtype=np.uint64).view(np.int64))


def _product(x: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low word of ``x * multiplier``; the partial products stay below 2^49."""
    low = x * (multiplier & 0xFFFF)
    high = x * (multiplier >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Low and high word of 64-bit integers."""
    return x & _WORD, (x >> 32) & _WORD

"""The next token of a row of logits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def greedy_token(logits: Tensor) -> int:
    """The largest logit's id, the lowest id among equals: fp32 ``[V]``."""
    return int(torch.argmax(logits))


def sampled_token(logits: Tensor, temperature: float, seed: int, index: int) -> int:
    """A token drawn from ``softmax(logits / temperature)``.

    The draw inverts the cumulative distribution at one uniform number that depends on nothing but
    the seed and the token's index, so neighbours in a batch do not matter.

    Args:
        logits: fp32 ``[V]``.
        temperature: above 0.
        seed: of the request, in [0, 2^64).
        index: how many tokens the request has generated before this one.
    """
    wide = logits.to(torch.float64)
    # The largest logit is taken off first: a tiny temperature would make it infinite.
    weights = torch.exp((wide - wide.amax()) / float(temperature)).numpy()
    cumulative = np.cumsum(weights)
    bits = np.random.Philox(key=seed, counter=index)
    uniform = np.random.Generator(bits).random()
    token = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return min(token, len(cumulative) - 1)

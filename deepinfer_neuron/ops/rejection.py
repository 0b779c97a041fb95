"""Verifying a drawn draft: accept it, or draw from what it left over."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer_neuron.ops.arithmetic import Order
from deepinfer_neuron.ops.philox import draw_words
from deepinfer_neuron.ops.sample import (
    Distribution,
    bounded_exp,
    fixed_point_draw,
    fixed_point_weights,
)

RESIDUAL_CASE, ACCEPT_CASE = 1, 2
PENALTY = 5e-5
"""Taken from the draft's log-probabilities in the residual, so that it does not vanish where both
distributions agree."""

_THRESHOLD_BITS = 33


def verify_drafts(
    target: Distribution,
    draft_logprobs: Tensor,
    drafts: Tensor,
    seeds: Tensor,
    positions: Tensor,
    order: Order,
) -> Tensor:
    """One token per row, distributed as the target says if the draft was drawn as its row says.

    A draft ``x`` is kept with probability ``min(1, p(x) / d(x))``, decided by the integer test
    ``2 w + 1 < trunc(ratio * 2^33)`` on a 32-bit random word. A rejected one is replaced by a draw
    from ``max(p - d exp(-5e-5), 0)``; where that has no mass, by the most probable token.

    Args:
        target: processed distribution of ``n`` rows, fp32 ``[n, V]``.
        draft_logprobs: fp32 ``[n, V]`` that the drafts were drawn from.
        drafts: int64 ``[n]`` columns; a negative one is rejected.
        seeds: int64 ``[n]``, bits of unsigned seeds.
        positions: int64 ``[n]``, index of the token in its sequence.
        order: who computes exponentials.

    Returns:
        int64 ``[n]`` columns.
    """
    column = drafts.clamp_min(0)[:, None]
    own = target.logprobs.gather(-1, column)[:, 0]
    proposed = draft_logprobs.gather(-1, column)[:, 0]
    gap = (own - proposed).clamp_max(0.0).nan_to_num(nan=-math.inf)
    threshold = (bounded_exp(order, gap).to(torch.float64) * 2.0**_THRESHOLD_BITS).to(torch.int64)
    word = draw_words(seeds, positions, ACCEPT_CASE)[:, 0]
    accepted = (drafts >= 0) & (2 * word + 1 < threshold)
    if bool(accepted.all()):
        return drafts
    left = target.probabilities - bounded_exp(order, draft_logprobs - PENALTY)
    words = draw_words(seeds, positions, RESIDUAL_CASE)
    replacement = fixed_point_draw(fixed_point_weights(left.clamp_min_(0.0)), words)
    likeliest = target.logprobs.argmax(-1)
    replacement = replacement.where(replacement >= 0, likeliest)
    return drafts.where(accepted, replacement)

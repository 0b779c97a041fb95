"""Changes to the logits that a request or the engine asks for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from deepinfer_neuron.sampling.penalties import penalise
from deepinfer_neuron.sampling.state import SamplingState

_WORD_BITS = 32


def edit_logits(logits: Tensor, states: Sequence[SamplingState], blacklist: Tensor) -> None:
    """Apply every mask, bias and penalty in place.

    In order: the blacklist, the tokens that would end a sequence too early, logit biases,
    penalties, grammars. A step that no sequence needs costs nothing. A grammar that fails sets the
    failure of its sequence and leaves the other rows alone.

    Args:
        logits: fp32 ``[R, V]``.
        states: of the rows.
        blacklist: int64 ids that no sequence may draw.
    """
    if blacklist.shape[0]:
        logits.index_fill_(1, blacklist, -math.inf)
    _exclude(logits, states)
    _bias(logits, states)
    _penalise(logits, states)
    _follow_grammars(logits, states)


def apply_bitmask(logits: Tensor, bitmask: Tensor, rows: Sequence[int]) -> None:
    """Set the logits of forbidden tokens to minus infinity, in place.

    Args:
        logits: fp32 ``[R, V]``.
        bitmask: int32 ``[R, words]``; bit ``j % 32`` of word ``j // 32`` is 1 for an allowed token
            ``j``. Tokens behind the last word stay as they are.
        rows: rows of both that are treated.
    """
    packed = np.ascontiguousarray(bitmask[list(rows)].numpy()).astype("<i4").view(np.uint8)
    covered = min(logits.shape[1], 8 * packed.shape[1])
    allowed = torch.from_numpy(np.unpackbits(packed, axis=1, count=covered, bitorder="little"))
    for row, bits in zip(rows, allowed, strict=True):
        logits[row, :covered].masked_fill_(bits == 0, -math.inf)


def _exclude(logits: Tensor, states: Sequence[SamplingState]) -> None:
    pairs = [(row, token) for row, s in enumerate(states) for token in s.excluded_tokens()]
    if pairs:
        rows, tokens = torch.tensor(pairs).unbind(-1)
        logits[rows, tokens] = -math.inf


def _bias(logits: Tensor, states: Sequence[SamplingState]) -> None:
    biased = [(row, *s.bias) for row, s in enumerate(states) if s.bias is not None]
    if biased:
        rows = torch.cat([torch.full_like(ids, row) for row, ids, _ in biased])
        tokens = torch.cat([ids for _, ids, _ in biased])
        amounts = torch.cat([amount for _, _, amount in biased])
        logits[rows, tokens] = logits[rows, tokens] + amounts


def _penalise(logits: Tensor, states: Sequence[SamplingState]) -> None:
    counted = [
        (row, s.counts, s.params)
        for row, s in enumerate(states)
        if s.counts is not None and len(s.counts)
    ]
    if counted:
        penalise(
            logits,
            rows=[row for row, _, _ in counted],
            counts=[counts for _, counts, _ in counted],
            repetition=[params.repetition_penalty for _, _, params in counted],
            frequency=[params.frequency_penalty for _, _, params in counted],
            presence=[params.presence_penalty for _, _, params in counted],
        )


def _follow_grammars(logits: Tensor, states: Sequence[SamplingState]) -> None:
    rows = [row for row, state in enumerate(states) if state.matcher is not None]
    if not rows:
        return
    words = -(-logits.shape[1] // _WORD_BITS)
    bitmask = torch.full((len(states), words), -1, dtype=torch.int32)
    constrained = [row for row in rows if _fill(states[row], bitmask[row])]
    if constrained:
        apply_bitmask(logits, bitmask, constrained)


def _fill(state: SamplingState, bitmask: Tensor) -> bool:
    """Whether the grammar restricts the next token; the mask is filled then."""
    if state.matcher is None or state.failure is not None:
        return False
    try:
        if not state.matcher.constrained():
            return False
        state.matcher.fill_bitmask(bitmask)
    except Exception as error:
        state.failure = f"the grammar failed: {error}"
        return False
    return True

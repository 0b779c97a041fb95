"""Distributions of the next token and draws from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from deepinfer_neuron.errors import ConfigError, RequestError
from deepinfer_neuron.ops import sample
from deepinfer_neuron.ops.arithmetic import FreeOrder
from deepinfer_neuron.ops.verify import accept_drafts

__all__ = ["fused_sample_tl", "random_sampling_tl", "sum_smaller_probs_tl"]

_CHUNK_ELEMENTS = 1 << 21
"""Logits treated at once: bounds the memory of intermediates; rows do not influence each other."""

_ORDER = FreeOrder()
_RESIDUAL = 1


@cache
def random_sampling_tl(
    vocab_size: int, is_nextn_predict: bool
) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """Draw a token per row, as a fresh sample or as one after a rejected draft.

    Kernel: ``probs [n, vocab_size] f32``, ``seq_seeds [n] u64``, ``sample_positions [n] i32``,
    ``-> out [n] i32``.

    Raises:
        RequestError: a row has no probability of at least ``2^-31``.
    """
    _check("random_sampling", vocab_size)
    case = _RESIDUAL if is_nextn_predict else 0

    def kernel(probs: Tensor, seq_seeds: Tensor, sample_positions: Tensor, out: Tensor) -> None:
        seeds = seq_seeds.view(torch.int64)
        for rows in _chunks(probs.shape[0], vocab_size):
            drawn = sample.random_sampling(probs[rows], seeds[rows], sample_positions[rows], case)
            out[rows].copy_(_drawable(drawn, rows))

    return kernel


@cache
def sum_smaller_probs_tl(vocab_size: int) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Probability of a token at most as likely as the given one.

    Kernel: ``logprobs [n, vocab_size] f32``, ``sample_results [n] i32`` (negative gives 0),
    ``-> out [n] f32``.
    """
    _check("sum_smaller_probs", vocab_size)

    def kernel(logprobs: Tensor, sample_results: Tensor, out: Tensor) -> None:
        for rows in _chunks(logprobs.shape[0], vocab_size):
            part = logprobs[rows]
            of = sample.Distribution(part, sample.exponential(_ORDER, part))
            tokens = sample_results[rows].to(torch.int64)
            out[rows].copy_(sample.sum_smaller_probs(of, tokens, _ORDER))

    return kernel


@cache
def fused_sample_tl(
    vocab_size: int, do_sample: bool, do_reject_sampling: bool
) -> Callable[..., None]:
    """Temperature, top-p and top-k, then a draw, then the judgement of drafts.

    Kernel: ``logits [Q, V] f32``, ``temperatures [Q] f32``, ``top_p [Q] f32``, ``top_k [Q] i32``
    (0 counts as 1, other values outside 1 to V - 1 are off), ``sample_positions [Q] i32``,
    ``seq_seeds [Q] u64``, ``is_verify [Q] bool``, ``-> logprobs [Q, V] f32``,
    ``-> candidate_ids [Q] i32``, ``draft_logprobs [P, V] f32``, ``read_rows [Q] i32`` (none: row
    ``q`` of the drafts belongs to row ``q``), ``draft_ids [P] i32``, ``-> accept [Q] bool``,
    ``-> draft_selected_logprobs [Q] f32``, ``-> accept_probs [Q] f32``, ``seed_offset`` int,
    ``lse_workspace`` (unused). What sampling or rejection needs may hold anything without it.

    Raises:
        RequestError: logits are NaN or infinite, or nothing can be drawn.
    """
    _check("fused_sample", vocab_size)

    def kernel(*arguments: Any) -> None:
        step = _Step(*arguments)
        for rows in _chunks(step.logits.shape[0], vocab_size):
            of = _transformed(step, rows, probabilities=do_sample or do_reject_sampling)
            step.logprobs[rows].copy_(of.logprobs)
            if do_reject_sampling:
                _judge(step, of, rows)
            elif do_sample:
                _draw(step, of, rows)

    return kernel


@dataclass(frozen=True)
class _Step:
    """Arguments of the fused sampler in their order."""

    logits: Tensor
    temperatures: Tensor
    top_p: Tensor
    top_k: Tensor
    sample_positions: Tensor
    seq_seeds: Tensor
    is_verify: Tensor
    logprobs: Tensor
    candidate_ids: Tensor
    draft_logprobs: Tensor
    read_rows: Tensor | None
    draft_ids: Tensor
    accept: Tensor
    draft_selected_logprobs: Tensor
    accept_probs: Tensor
    seed_offset: int
    lse_workspace: Tensor

    def seeds(self, rows: slice) -> Tensor:
        """Bits of the seeds; signed addition wraps like unsigned."""
        return self.seq_seeds[rows].view(torch.int64) + self.seed_offset


def _transformed(step: _Step, rows: slice, *, probabilities: bool) -> sample.Distribution:
    logits = step.logits[rows]
    usable = logits.amax(-1).isfinite()
    if not bool(usable.all()):
        raise RequestError(
            f"the logits of row {rows.start + int(usable.int().argmin())} are NaN, infinite or all "
            "-inf: leave a finite largest logit in every row"
        )
    top_ks = step.top_k[rows]
    transform = sample.Transform(
        step.temperatures[rows].tolist(),
        [0.0] * logits.shape[0],
        step.top_p[rows].tolist(),
        top_ks.where(top_ks != 0, 1).tolist(),
    )
    return sample.distribution(logits, transform, _ORDER, probabilities=probabilities)


def _draw(step: _Step, of: sample.Distribution, rows: slice) -> None:
    drawn = sample.random_sampling(of.probabilities, step.seeds(rows), step.sample_positions[rows])
    step.candidate_ids[rows].copy_(_drawable(drawn, rows))


def _judge(step: _Step, of: sample.Distribution, rows: slice) -> None:
    if step.read_rows is None:
        drafts, theirs = step.draft_ids[rows], step.draft_logprobs[rows]
    else:
        drafts = step.draft_ids.index_select(0, step.read_rows[rows])
        theirs = step.draft_logprobs.index_select(0, step.read_rows[rows])
    seeds, positions = step.seeds(rows), step.sample_positions[rows]
    decided = accept_drafts(of, theirs, drafts, step.is_verify[rows], seeds, positions, _ORDER)
    step.candidate_ids[rows].copy_(_drawable(decided.candidates, rows))
    step.accept[rows].copy_(decided.accept)
    step.draft_selected_logprobs[rows].copy_(decided.draft_logprobs)
    step.accept_probs[rows].copy_(decided.accept_probs)


def _chunks(count: int, width: int) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // width)
    for first in range(0, count, step):
        yield slice(first, min(first + step, count))


def _drawable(drawn: Tensor, rows: slice) -> Tensor:
    """The drawn tokens; a row without one is an error."""
    if bool((drawn < 0).any()):
        raise RequestError(
            f"row {rows.start + int((drawn >= 0).int().argmin())} has no probability of at least "
            "2^-31: nothing can be drawn"
        )
    return drawn


def _check(name: str, vocab_size: int) -> None:
    if vocab_size < 1:
        raise ConfigError(f"{name}: vocab_size is {vocab_size}, it must be positive")

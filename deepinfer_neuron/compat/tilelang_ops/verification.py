"""From the decisions of single rows to what each request emits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops import shortlist, verify
from deepinfer_neuron.ops.arithmetic import FreeOrder

__all__ = [
    "expand_sampling_params_tl",
    "finalize_verification_tl",
    "get_accept_result_tl",
    "map_lookup_tl",
    "prepare_verification_metadata_tl",
    "remap_draft_topk_tl",
]

_CHUNK_ELEMENTS = 1 << 20
"""List entries treated at once, so that intermediates stay in cache."""

_MODES = ("by_key", "by_index")


@cache
def prepare_verification_metadata_tl(
    num_steps: int,
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]:
    """Request and place of every row, and whether it judges a draft.

    Kernel: ``ftp [r] i32``, ``seqlen_q [r] i32``, ``-> row_to_req [q] i32``,
    ``-> local_step [q] i32``, ``-> is_verify [q] bool``.
    """
    _check_steps("prepare_verification_metadata", num_steps)

    def kernel(
        ftp: Tensor, seqlen_q: Tensor, row_to_req: Tensor, local_step: Tensor, is_verify: Tensor
    ) -> None:
        rows = verify.verification_rows(ftp, seqlen_q, row_to_req.shape[0])
        row_to_req.copy_(rows.requests)
        local_step.copy_(rows.steps)
        is_verify.copy_(rows.verifies)

    return kernel


@cache
def expand_sampling_params_tl() -> Callable[..., None]:
    """Sampling parameters of every row from those of its request.

    Kernel: ``temperatures [r] f32``, ``top_ps [r] f32``, ``top_ks [r] i32``,
    ``sample_positions [r] i32``, ``seq_seeds [r] u64``, ``row_to_req [q] i32``,
    ``local_step [q] i32``, then the five ``-> [q]`` in the same order and dtypes.
    """

    def kernel(
        temperatures: Tensor,
        top_ps: Tensor,
        top_ks: Tensor,
        sample_positions: Tensor,
        seq_seeds: Tensor,
        row_to_req: Tensor,
        local_step: Tensor,
        temperatures_q: Tensor,
        top_ps_q: Tensor,
        top_ks_q: Tensor,
        sample_positions_q: Tensor,
        seq_seeds_q: Tensor,
    ) -> None:
        temperatures_q.copy_(temperatures.index_select(0, row_to_req))
        top_ps_q.copy_(top_ps.index_select(0, row_to_req))
        top_ks_q.copy_(top_ks.index_select(0, row_to_req))
        sample_positions_q.copy_(verify.row_positions(sample_positions, row_to_req, local_step))
        # Torch does not index unsigned integers.
        seeds = seq_seeds.view(torch.int64).index_select(0, row_to_req)
        seq_seeds_q.view(torch.int64).copy_(seeds)

    return kernel


@cache
def map_lookup_tl(
    force_topk: int, mode: str = "by_key", value_dtype: Any = torch.float32
) -> Callable[[Tensor | None, Tensor, Tensor, Tensor], None]:
    """One value per row, by key or by column; nothing found gives ``-inf``, or -1 for integers.

    Kernel: ``key [q, force_topk] i32`` (unused by index), ``value [q, force_topk]`` f32 or, by
    index, i32, ``query [q, 1] i32``, ``-> out [q, 1]`` like the values.
    """
    if mode not in _MODES:
        raise ConfigError(f"map_lookup: mode is {mode!r}, it must be one of {', '.join(_MODES)}")

    def kernel(key: Tensor | None, value: Tensor, query: Tensor, out: Tensor) -> None:
        wanted = query[:, 0]
        if mode == "by_index":
            out[:, 0].copy_(shortlist.value_at(value, wanted))
            return
        assert key is not None
        for rows in _chunks(*value.shape):
            out[rows, 0].copy_(shortlist.value_of(key[rows], value[rows], wanted[rows]))

    return kernel


@cache
def remap_draft_topk_tl(force_topk: int, vocab_size: int) -> Callable[..., None]:
    """Draft distributions over a short list, seen from the target's list.

    Kernel: ``draft_topk_index [P, k] i32``, ``draft_topk_logprobs [P, k] f32``,
    ``draft_token_ids_pool [P] i32``, ``target_topk_index [q, k] i32``, ``read_rows [q] i32``,
    ``-> aligned_logprobs [q, k] f32``, ``-> draft_local_ids [q] i32`` (-1 if the target's list
    lacks the draft), ``-> identity_rows [q] i32``.
    """
    if force_topk < 1 or vocab_size < 1:
        raise ConfigError(
            f"remap_draft_topk: force_topk {force_topk} and vocab_size {vocab_size} must be "
            "positive"
        )

    def kernel(
        draft_topk_index: Tensor,
        draft_topk_logprobs: Tensor,
        draft_token_ids_pool: Tensor,
        target_topk_index: Tensor,
        read_rows: Tensor,
        aligned_logprobs: Tensor,
        draft_local_ids: Tensor,
        identity_rows: Tensor,
    ) -> None:
        for rows in _chunks(*target_topk_index.shape):
            wanted, source = target_topk_index[rows], read_rows[rows]
            keys = draft_topk_index.index_select(0, source)
            values = draft_topk_logprobs.index_select(0, source)
            aligned_logprobs[rows].copy_(shortlist.aligned_values(keys, values, wanted))
            drafts = draft_token_ids_pool.index_select(0, source)
            draft_local_ids[rows].copy_(shortlist.column_of(wanted, drafts))
        identity_rows.copy_(torch.arange(identity_rows.shape[0]))

    return kernel


@cache
def get_accept_result_tl(has_golden: bool) -> Callable[..., None]:
    """Which rows' tokens are emitted, with forced tokens taking precedence.

    Kernel: ``raw_accept [q] bool``, ``golden [q] i32`` (-1 for none; ignored unless announced),
    ``draft_token_ids_pool [P] i32``, ``read_rows [q] i32``, ``candidate_token_ids [q] i32``,
    ``is_verify [q] bool``, ``ftp [r] i32``, ``row_to_req [q] i32``, ``-> token_ids [q] i32``,
    ``-> accept [q] bool``, ``-> is_final [q] bool``.
    """

    def kernel(
        raw_accept: Tensor,
        golden: Tensor,
        draft_token_ids_pool: Tensor,
        read_rows: Tensor,
        candidate_token_ids: Tensor,
        is_verify: Tensor,
        ftp: Tensor,
        row_to_req: Tensor,
        token_ids: Tensor,
        accept: Tensor,
        is_final: Tensor,
    ) -> None:
        drafts, forced = candidate_token_ids, None
        if has_golden:
            drafts, forced = draft_token_ids_pool.index_select(0, read_rows), golden
        accepted = verify.accept_result(
            raw_accept, candidate_token_ids, drafts, is_verify, ftp, row_to_req, forced
        )
        token_ids.copy_(accepted.tokens)
        accept.copy_(accepted.accept)
        is_final.copy_(accepted.final)

    return kernel


@cache
def finalize_verification_tl(
    has_sum_smaller_probs: bool, has_confidence: bool, num_steps: int, num_stop_tokens: int
) -> Callable[..., None]:
    """Values of the emitted tokens, and what the step tells about its drafts.

    Kernel: ``effective_accept [q] bool``, ``is_final [q] bool``, ``effective_token_ids [q] i32``,
    ``token_logprobs [q] f32``, ``sum_smaller_probs [q] f32``, ``top_logprobs [q, t] f32``,
    ``top_token_ids [q, t] i32``, ``ftp [r] i32``, ``seqlen_q [r] i32``, ``row_to_req [q] i32``,
    ``is_verify [q] bool``, ``accept_probs [q] f32``, ``confidence_pool [P] f32``,
    ``mtp_info_read_rows [q] i32``, ``stop_token_ids [r, num_stop_tokens] i32``;
    ``-> last_valid_offset [r] i32``, ``-> num_generated_tokens [num_steps] i32``,
    ``-> num_verified_tokens [num_steps] i32``, ``-> batch_confidence_error [1] f32``,
    ``-> emitted_stop_token [r] bool``; of the final rows ``-> sampled_token_ids [r] i32``,
    ``-> sampled_token_logprobs [r] f32``, ``-> sampled_sum_smaller_probs [r] f32``,
    ``-> sampled_top_logprobs [r, t] f32``, ``-> sampled_top_token_ids [r, t] i32``; of the
    accepted rows, -1 or 0 elsewhere, the same five ``[q, ...]`` called ``verified_...``.

    Without ``has_sum_smaller_probs`` those arguments are ignored; without ``has_confidence`` the
    four before ``last_valid_offset`` and ``emitted_stop_token`` are, and the error is 0.
    """
    _check_steps("finalize_verification", num_steps)

    def kernel(*arguments: Tensor) -> None:
        step = _Step(*arguments)
        if step.effective_accept.shape[0] == 0:
            _finish_without_rows(step)
            return
        counts = verify.accepted_counts(step.effective_accept, step.ftp, step.seqlen_q)
        step.last_valid_offset.copy_(counts)
        _count(step, num_steps)
        step.batch_confidence_error.zero_()
        if has_confidence:
            _compare(step)
        pairs = [
            (step.effective_token_ids, step.sampled_token_ids, step.verified_token_ids, -1),
            (step.token_logprobs, step.sampled_token_logprobs, step.verified_token_logprobs, 0),
        ]
        if has_sum_smaller_probs:
            sums = (step.sampled_sum_smaller_probs, step.verified_sum_smaller_probs)
            pairs.append((step.sum_smaller_probs, *sums, 0))
        if step.top_logprobs.shape[-1]:
            values = (step.sampled_top_logprobs, step.verified_top_logprobs)
            ids = (step.sampled_top_token_ids, step.verified_top_token_ids)
            pairs += [(step.top_logprobs, *values, 0), (step.top_token_ids, *ids, 0)]
        final = verify.final_rows(step.ftp, counts, step.effective_accept.shape[0])
        for rows, sampled, verified, fill in pairs:
            sampled.copy_(rows.index_select(0, final))
            verified.copy_(verify.accepted_values(rows, step.effective_accept, fill))

    return kernel


@dataclass(frozen=True)
class _Step:
    """Arguments of the last factory's kernel in their order."""

    effective_accept: Tensor
    is_final: Tensor
    effective_token_ids: Tensor
    token_logprobs: Tensor
    sum_smaller_probs: Tensor
    top_logprobs: Tensor
    top_token_ids: Tensor
    ftp: Tensor
    seqlen_q: Tensor
    row_to_req: Tensor
    is_verify: Tensor
    accept_probs: Tensor
    confidence_pool: Tensor
    mtp_info_read_rows: Tensor
    stop_token_ids: Tensor
    last_valid_offset: Tensor
    num_generated_tokens: Tensor
    num_verified_tokens: Tensor
    batch_confidence_error: Tensor
    emitted_stop_token: Tensor
    sampled_token_ids: Tensor
    sampled_token_logprobs: Tensor
    sampled_sum_smaller_probs: Tensor
    sampled_top_logprobs: Tensor
    sampled_top_token_ids: Tensor
    verified_token_ids: Tensor
    verified_token_logprobs: Tensor
    verified_sum_smaller_probs: Tensor
    verified_top_logprobs: Tensor
    verified_top_token_ids: Tensor


def _finish_without_rows(step: _Step) -> None:
    for counter in (
        step.last_valid_offset,
        step.num_generated_tokens,
        step.num_verified_tokens,
        step.batch_confidence_error,
    ):
        counter.zero_()


def _count(step: _Step, num_steps: int) -> None:
    row = torch.arange(step.row_to_req.shape[0], dtype=torch.int32)
    places = row - step.ftp.index_select(0, step.row_to_req)
    generated = verify.step_counts(step.effective_accept, places, num_steps)
    step.num_generated_tokens.copy_(generated)
    verified = verify.step_counts(step.is_verify, places, num_steps, fold=True)
    step.num_verified_tokens.copy_(verified)


def _compare(step: _Step) -> None:
    predicted = step.confidence_pool.index_select(0, step.mtp_info_read_rows)
    error = verify.confidence_error(step.accept_probs, predicted, step.is_verify, FreeOrder())
    step.batch_confidence_error.copy_(error)
    accepted = verify.Accepted(step.effective_token_ids, step.effective_accept, step.is_final)
    segments = (step.row_to_req, step.ftp, step.seqlen_q)
    step.emitted_stop_token.copy_(verify.emitted_stop(accepted, step.stop_token_ids, *segments))


def _chunks(count: int, width: int) -> list[slice]:
    step = max(1, _CHUNK_ELEMENTS // max(1, width))
    return [slice(first, first + step) for first in range(0, count, step)]


def _check_steps(name: str, num_steps: int) -> None:
    if num_steps < 1:
        raise ConfigError(f"{name}: num_steps is {num_steps}, it must be positive")

"""Candidate blocks of the indexer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops.candidates import block_scores, candidate_entries, expand_candidates

_WORKSPACE_ELEMENTS = 1 << 22
"""Logits reduced at once."""


def _check(name: str, block_size: int) -> None:
    if block_size < 1:
        raise ConfigError(f"{name}: block_size is {block_size}, it must be positive")


@cache
def candidate_block_max_tl(
    max_model_len: int, block_size: int
) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """Largest logit of every block; the last valid block scores +inf.

    Kernel: ``logits [r, max_model_len] bf16``, ``valid_lens [r] i32``,
    ``-> block_scores [r, ceil(max_model_len/block_size)] bf16`` (unspecified behind the valid
    blocks), ``-> valid_blocks [>= r] i32``.
    """
    _check("candidate_block_max", block_size)
    step = max(1, _WORKSPACE_ELEMENTS // max(1, max_model_len))

    def kernel(logits: Tensor, valid_lens: Tensor, scores: Tensor, valid_blocks: Tensor) -> None:
        for start in range(0, logits.shape[0], step):
            rows = slice(start, min(start + step, logits.shape[0]))
            best, count = block_scores(logits[rows], valid_lens[rows], block_size)
            scores[rows] = best
            valid_blocks[rows] = count

    return kernel


@cache
def get_candidate_compact_lens_tl(
    topk_blocks: int, block_size: int
) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Valid entries inside the candidate blocks of a row.

    Kernel: ``candidate_blocks [r, topk_blocks] i32``, ``valid_lens [r] i32``,
    ``-> compact_lens [r] i32``.
    """
    _check("get_candidate_compact_lens", block_size)

    def kernel(candidate_blocks: Tensor, valid_lens: Tensor, compact_lens: Tensor) -> None:
        compact_lens.copy_(candidate_entries(candidate_blocks, valid_lens, block_size))

    return kernel


@cache
def restore_candidate_indices_inplace_tl(
    topk_tokens: int, topk_blocks: int, block_size: int, has_offset: bool
) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Positions inside the concatenated candidate blocks to entries, in place; others become -1.

    Kernel: ``<-> compact_indices [r, topk_tokens] i32``, ``candidate_blocks [r, topk_blocks] i32``,
    ``output_idx_offset [r] i32`` (ignored unless ``has_offset``).
    """
    _check("restore_candidate_indices_inplace", block_size)

    def kernel(
        compact_indices: Tensor, candidate_blocks: Tensor, output_idx_offset: Tensor
    ) -> None:
        entries = expand_candidates(compact_indices, candidate_blocks, block_size)
        if has_offset:
            moved = entries + output_idx_offset[:, None]
            entries = torch.where(entries < 0, entries, moved)
        compact_indices.copy_(entries)

    return kernel

"""Token masks of grammars."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from torch import Tensor

from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.sampling.masks import apply_bitmask

__all__ = ["apply_token_bitmask_by_step_inplace_tl"]


@cache
def apply_token_bitmask_by_step_inplace_tl(
    vocab_size: int, has_ftp: bool
) -> Callable[[Tensor, Tensor, Tensor, Tensor | None, int], None]:
    """Set the logits of forbidden tokens to ``-inf``, in place.

    Kernel: ``<-> logits [R, >= vocab_size] f32``, ``bitmask [r, words] i32`` (bit ``i`` of word
    ``j`` is 1 for an allowed token ``32 j + i``), ``indices [k] i32`` (the requests to treat),
    ``ftp [r] i32`` (first row of each request; without it request ``i`` is row ``i``), ``step``
    int: the row of the request, which is left out if it has fewer.
    """
    if vocab_size < 1:
        raise ConfigError(
            f"apply_token_bitmask_by_step_inplace: vocab_size is {vocab_size}, it must be positive"
        )

    def kernel(
        logits: Tensor, bitmask: Tensor, indices: Tensor, ftp: Tensor | None, step: int
    ) -> None:
        requests = indices.tolist()
        rows = requests
        if has_ftp and ftp is not None:
            ends = [*ftp.tolist()[1:], logits.shape[0]]
            first = ftp.tolist()
            pairs = [(r, first[r] + step) for r in requests if first[r] + step < ends[r]]
            requests, rows = [r for r, _ in pairs], [row for _, row in pairs]
        if not rows:
            return
        edited = logits[rows, :vocab_size]
        apply_bitmask(edited, bitmask[requests], range(len(rows)))
        logits[rows, :vocab_size] = edited

    return kernel

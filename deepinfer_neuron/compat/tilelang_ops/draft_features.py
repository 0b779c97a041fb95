"""Features of the trunk that drafts start from."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from torch import Tensor

from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops.arithmetic import free_arithmetic
from deepinfer_neuron.ops.hyper import stream_mean

_WORKSPACE_ELEMENTS = 1 << 20
"""Elements averaged at once, so that intermediates stay in cache."""


@cache
def dflash_input_store_tl(n_embed: int, hc_mult: int) -> Callable[[Tensor, Tensor], None]:
    """Mean over the residual streams.

    Kernel: ``x [n, hc_mult, n_embed] bf16``, ``-> out [n, n_embed] bf16``.
    """
    if n_embed < 1 or hc_mult < 1:
        raise ConfigError(
            f"dflash_input_store: n_embed {n_embed} and hc_mult {hc_mult} must be positive"
        )
    step = max(1, _WORKSPACE_ELEMENTS // (n_embed * hc_mult))

    def kernel(x: Tensor, out: Tensor) -> None:
        for start in range(0, x.shape[0], step):
            rows = slice(start, start + step)
            out[rows] = stream_mean(x[rows], free_arithmetic())

    return kernel

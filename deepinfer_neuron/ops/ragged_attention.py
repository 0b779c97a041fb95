"""Full attention inside each of several segments that lie one behind the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_neuron.errors import ConfigError


def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Sequence[int],
    key_ends: Sequence[int],
    scale: float | None,
) -> Tensor:
    """Softmax attention of every token over the keys of its own segment.

    Args:
        query: ``[T, h, d]``.
        key: ``[S, h, d]``.
        value: ``[S, h, d]``.
        query_ends: where each segment of the queries ends, ascending, ``T`` last.
        key_ends: the same of the keys.
        scale: of the scores; ``None`` is ``1 / sqrt(d)``.

    Returns:
        type of the query ``[T, h, d]``, fp32 inside and rounded once; a segment without keys
        gives zeros.

    Raises:
        ConfigError: the ends do not cover the tokens.
    """
    for name, ends, tokens in (
        ("query", query_ends, query.shape[0]),
        ("key", key_ends, key.shape[0]),
    ):
        bounds = [0, *ends]
        if bounds != sorted(bounds) or bounds[-1] != tokens or len(ends) != len(key_ends):
            raise ConfigError(
                f"{name} segments end at {list(ends)[:8]}, there are {tokens} tokens; give "
                "as many ascending ends for queries as for keys, the last one being that number."
            )
    out = torch.zeros_like(query)
    starts = zip([0, *query_ends], query_ends, [0, *key_ends], key_ends, strict=False)
    for begin, end, key_begin, key_end in starts:
        if begin == end or key_begin == key_end:
            continue
        attended = F.scaled_dot_product_attention(
            _heads_first(query[begin:end]),
            _heads_first(key[key_begin:key_end]),
            _heads_first(value[key_begin:key_end]),
            scale=scale,
        )
        out[begin:end] = attended[0].transpose(0, 1)
    return out


def _heads_first(x: Tensor) -> Tensor:
    """``[n, h, d]`` to fp32 ``[1, h, n, d]``."""
    return x.to(torch.float32).transpose(0, 1)[None]

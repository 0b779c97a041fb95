"""Averages over residual streams."""

from __future__ import annotations

import torch
from torch import Tensor


def stream_mean(x: Tensor) -> Tensor:
    """Mean of the streams: fp32 sum, first stream first, times ``fp32(1 / M)``, rounded once.

    Args:
        x: bf16 ``[n, M, D]``.

    Returns:
        bf16 ``[n, D]``; the stream itself if there is one.
    """
    streams = x.unbind(1)
    if len(streams) == 1:
        return streams[0]
    total = streams[0].to(torch.float32)
    for stream in streams[1:]:
        total = total + stream
    return total.mul_(1.0 / len(streams)).to(torch.bfloat16)

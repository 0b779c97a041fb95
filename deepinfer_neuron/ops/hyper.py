"""Hyper-connections: ``M`` residual streams, mixed by coefficients computed from the trunk.

A site (attention or feed-forward) collapses the streams with the ``pre`` of the *previous* site,
runs its block, and expands with its own ``post`` and ``comb``. Coefficients stay fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer_neuron.ops.arithmetic import Arithmetic
from deepinfer_neuron.ops.norm import inverse_rms


class Mix(NamedTuple):
    """Coefficients of a site, fp32: ``pre`` and ``post`` ``[n, M]``, ``comb`` ``[n, M, M]``."""

    pre: Tensor
    post: Tensor
    comb: Tensor


def mix_coefficients(
    trunk: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_eps: float,
    eps: float,
    iterations: int,
    arithmetic: Arithmetic,
) -> Mix:
    """Coefficients of one site.

    ``z = fma(fn . R / rms(R), scale, base)``; ``pre = sigmoid(z) + eps``,
    ``post = 2 sigmoid(z)``, ``comb = sinkhorn(z)``.

    Args:
        trunk: activations ``[n, M, D]``.
        fn: fp32 ``[M (M + 2), M D]``.
        base: fp32 ``[M (M + 2)]``: ``M`` pre, ``M`` post, ``M x M`` comb by rows.
        scale: fp32 ``[3]``: pre, post, comb.
        norm_eps: epsilon of the RMS.
        eps: epsilon of ``pre`` and of the Sinkhorn divisions.
        iterations: Sinkhorn rounds.
        arithmetic: order of the reductions.
    """
    streams = trunk.shape[1]
    flat = trunk.flatten(1).to(torch.float32)
    projected = arithmetic.order.matmul_wide(flat, fn)
    projected = projected * inverse_rms(flat, norm_eps, arithmetic)[:, None]
    widths = (streams, streams, streams * streams)
    factor = torch.cat([part.expand(n) for part, n in zip(scale.split(1), widths, strict=True)])
    z = arithmetic.fused(projected, factor, base)
    pre, post, comb = z.split(widths, dim=1)
    sigmoid = arithmetic.order.sigmoid
    return Mix(
        sigmoid(pre.contiguous()) + eps,
        2.0 * sigmoid(post.contiguous()),
        sinkhorn(comb.unflatten(1, (streams, streams)), eps, iterations, arithmetic),
    )


def sinkhorn(x: Tensor, eps: float, iterations: int, arithmetic: Arithmetic) -> Tensor:
    """Near doubly stochastic matrices: fp32 ``[n, M, M]``, rows are input streams.

    Softmax over each row, plus ``eps``, columns normalized; then ``iterations - 1`` times rows and
    columns. Every division adds ``eps`` to the sum.
    """
    total = arithmetic.order.sum
    x = arithmetic.order.exp(x - x.amax(dim=2, keepdim=True))
    x = x / total(x)[:, :, None] + eps
    for step in range(iterations):
        if step:
            x = x.div_(total(x).add_(eps)[:, :, None])
        x = x.div_(total(x.mT).add_(eps)[:, None, :])
    return x


def _wide(x: Tensor, arithmetic: Arithmetic) -> Tensor:
    """A factor of :func:`_fused`, widened once for a whole loop."""
    return x.to(torch.float64 if arithmetic.wide else torch.float32)


def _fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """fp32 ``a * b + c``, rounded once if ``a`` and ``b`` are fp64."""
    if a.dtype == torch.float32:
        return a * b + c
    return torch.addcmul(c.to(torch.float64), a, b).to(torch.float32)


def collapse(trunk: Tensor, pre: Tensor, arithmetic: Arithmetic) -> Tensor:
    """``sum_m pre[m] * trunk[m]``: ``[n, M, D]`` and ``[n, M]`` to activations ``[n, D]``.

    Fused multiply-adds in fp32, stream 0 first, one rounding at the end.
    """
    wide, weight = _wide(trunk, arithmetic), _wide(pre, arithmetic)
    total = (wide[:, 0] * weight[:, 0, None]).to(torch.float32)
    for stream in range(1, trunk.shape[1]):
        total = _fused(wide[:, stream], weight[:, stream, None], total)
    return arithmetic.round(total)


def stream_mean(trunk: Tensor, arithmetic: Arithmetic) -> Tensor:
    """``(sum_m trunk[m]) / M``: ``[n, M, D]`` to activations ``[n, D]``.

    Summed in fp32, stream 0 first, one rounding at the end; a single stream stays as it is.
    """
    if trunk.shape[1] == 1:
        return trunk[:, 0]
    total = trunk[:, 0].to(torch.float32)
    for stream in range(1, trunk.shape[1]):
        total = total + trunk[:, stream].to(torch.float32)
    return arithmetic.round(total * (1.0 / trunk.shape[1]))


def expand(out: Tensor, trunk: Tensor, mix: Mix, arithmetic: Arithmetic) -> Tensor:
    """New streams ``post[j] * out + sum_i comb[i, j] * trunk[i]``, one rounding each.

    Args:
        out: the block's output ``[n, D]``.
        trunk: streams before the site ``[n, M, D]``.
        mix: this site's coefficients.
        arithmetic: rounding of the streams.

    Returns:
        activation dtype ``[n, M, D]``.
    """
    wide, comb = _wide(trunk, arithmetic), _wide(mix.comb, arithmetic)
    total = mix.post[:, :, None] * out[:, None, :].to(torch.float32)
    for stream in range(trunk.shape[1]):
        total = _fused(wide[:, stream, None, :], comb[:, stream, :, None], total)
    return arithmetic.round(total)

"""Attention over window keys and selected far keys, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tools.train_demo.kernels import Block, call


class Attend(Function):
    """Attention of every query over its window and its selected far keys, with a sink.

    ``query [B, T, H, Dh]``, ``near [B, T, Dh]``, ``far [B, m, Dh]`` (``m`` may be 0), ``mask``
    uint8 ``[B, T, m]``, ``sink [H]``. Keys are values. Queries go through in blocks of one window,
    which see at most two windows of near keys and no far key behind the block.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        near: Tensor,
        far: Tensor,
        mask: Tensor,
        sink: Tensor,
        window: int,
        ratio: int,
        scale: float,
    ) -> Tensor:
        batch, length, heads, width = query.shape
        out = torch.empty_like(query)
        saved = []
        for start in range(0, length, window):
            block, keys = _block(near, far, mask, start, window, ratio, heads)
            q = query[:, start : start + window].reshape(batch, -1, width)
            p = torch.bmm(q, keys.transpose(1, 2))
            rest = torch.empty(batch, q.shape[1])
            call("softmax_forward", p.dtype, p, _mask_at(mask, start), sink, scale, rest, block)
            out[:, start : start + window] = torch.bmm(p, keys).view(batch, -1, heads, width)
            saved += [p, rest]
        ctx.save_for_backward(query, near, far, mask, *saved)
        ctx.numbers = (window, ratio, scale, len(sink))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, near, far, mask, *saved = ctx.saved_tensors
        window, ratio, scale, heads = ctx.numbers
        batch, length, _, width = query.shape
        gq, gnear = torch.empty_like(query), torch.zeros_like(near)
        gfar, gsink = torch.zeros_like(far), torch.zeros(heads)
        for number, start in enumerate(range(0, length, window)):
            block, keys = _block(near, far, mask, start, window, ratio, heads)
            p, rest = saved[2 * number], saved[2 * number + 1]
            q = query[:, start : start + window].reshape(batch, -1, width)
            g = grad[:, start : start + window].reshape(batch, -1, width)
            gkeys = torch.bmm(p.transpose(1, 2), g)
            gp = torch.bmm(g, keys.transpose(1, 2))
            call("softmax_backward", p.dtype, p, gp, rest, scale, gsink, block)
            gq[:, start : start + window] = torch.bmm(gp, keys).view(batch, -1, heads, width)
            gkeys = gkeys + torch.bmm(gp.transpose(1, 2), q)
            gnear[:, block.first_near : block.first_near + block.near] += gkeys[:, : block.near]
            gfar[:, : block.far] += gkeys[:, block.near :]
        return gq, gnear, gfar, None, gsink, None, None, None


def _block(
    near: Tensor, far: Tensor, mask: Tensor, start: int, window: int, ratio: int, heads: int
) -> tuple[Block, Tensor]:
    """Geometry and keys ``[B, near + far, Dh]`` of the queries from ``start`` on."""
    stop = min(start + window, near.shape[1])
    first = max(start - window, 0)
    count = min(stop // ratio, far.shape[1]) if ratio else 0
    keys = torch.cat((near[:, first:stop], far[:, :count]), 1)
    entries = far.shape[1]
    block = Block(
        len(near),
        stop - start,
        heads,
        stop - first,
        count,
        start,
        first,
        window,
        entries,
        entries * near.shape[1],
    )
    return block, keys


def _mask_at(mask: Tensor, start: int) -> Tensor:
    """The mask from the first query of a block on (its strides stay those of the whole)."""
    flat = mask.view(-1)
    return flat[start * mask.shape[2] :] if mask.numel() else flat

"""Differentiable operations of the training network, on top of the fused loops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tools.train_demo import kernels
from tools.train_demo.kernels import call

MIX = 24
"""Coefficients of a hyper-connection site with four streams: 4 pre, 4 post, 16 comb."""


class Mix(Function):
    """Coefficients ``[T, 24]`` fp32 of a site from the projected trunk ``[T, 24]``."""

    @staticmethod
    def forward(
        ctx: Any,
        projected: Tensor,
        inverse: Tensor,
        scale: Tensor,
        base: Tensor,
        iterations: int,
        eps: float,
    ) -> Tensor:
        out = torch.empty(projected.shape, dtype=torch.float32)
        ctx.save_for_backward(projected, inverse, scale, base)
        ctx.numbers = (iterations, eps)
        call(
            "mix_forward",
            projected.dtype,
            projected,
            inverse,
            scale,
            base,
            out,
            len(projected),
            iterations,
            eps,
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        projected, inverse, scale, base = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (projected, inverse, scale, base)]
        call(
            "mix_backward",
            projected.dtype,
            projected,
            inverse,
            scale,
            base,
            grad.contiguous(),
            *grads,
            len(projected),
            *ctx.numbers,
        )
        return (*grads, None, None)


class Collapse(Function):
    """Weighted sum of the streams, normed ``[T, D]``, and the inverse RMS of the trunk ``[T]``."""

    @staticmethod
    def forward(
        ctx: Any, trunk: Tensor, mix: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        tokens, _, width = trunk.shape
        normed = torch.empty(tokens, width, dtype=trunk.dtype)
        flat, norm = torch.empty(tokens), torch.empty(tokens)
        call(
            "collapse_forward",
            trunk.dtype,
            trunk,
            mix,
            weight,
            normed,
            flat,
            norm,
            tokens,
            width,
            eps,
        )
        ctx.save_for_backward(trunk, mix, weight, flat, norm)
        return normed, flat

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_flat: Tensor) -> tuple[Tensor | None, ...]:
        trunk, mix, weight, flat, norm = ctx.saved_tensors
        tokens, _, width = trunk.shape
        grads = [torch.empty_like(x) for x in (trunk, mix, weight)]
        call(
            "collapse_backward",
            trunk.dtype,
            trunk,
            mix,
            weight,
            flat,
            norm,
            grad.contiguous(),
            grad_flat.contiguous(),
            *grads,
            tokens,
            width,
        )
        return (*grads, None)


class Expand(Function):
    """New streams ``[T, 4, D]`` from a block's output ``[T, D]`` and the old streams."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, trunk: Tensor, mix: Tensor) -> Tensor:
        result = torch.empty_like(trunk)
        call("expand_forward", trunk.dtype, out, trunk, mix, result, len(out), out.shape[1])
        ctx.save_for_backward(out, trunk, mix)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        out, trunk, mix = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (out, trunk, mix)]
        call(
            "expand_backward",
            trunk.dtype,
            out,
            trunk,
            mix,
            grad.contiguous(),
            *grads,
            len(out),
            out.shape[1],
        )
        return tuple(grads)


class Engram(Function):
    """Streams ``[T, 4, D]`` plus the gated value of ``kv [T, 5, D]`` (four keys, one value).

    ``weight`` ``[4, D]`` is the product of query and key weights.
    """

    @staticmethod
    def forward(ctx: Any, trunk: Tensor, kv: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(trunk)
        tokens, _, width = trunk.shape
        call("engram_forward", trunk.dtype, trunk, kv, weight, out, tokens, width, eps)
        ctx.save_for_backward(trunk, kv, weight)
        ctx.eps = eps
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        trunk, kv, weight = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (trunk, kv, weight)]
        call(
            "engram_backward",
            trunk.dtype,
            trunk,
            kv,
            weight,
            grad.contiguous(),
            *grads,
            len(trunk),
            trunk.shape[2],
            ctx.eps,
        )
        return (*grads, None)


class Norm(Function):
    """RMS norm of the last axis with an fp32 weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        width = x.shape[-1]
        rows = x.numel() // width
        y, inverse = torch.empty_like(x), torch.empty(rows)
        call("norm_forward", x.dtype, x, weight, y, inverse, rows, width, eps)
        ctx.save_for_backward(x, weight, inverse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        gx, gw = torch.empty_like(x), torch.empty_like(weight)
        width = x.shape[-1]
        call(
            "norm_backward",
            x.dtype,
            x,
            weight,
            inverse,
            grad.contiguous(),
            gx,
            gw,
            x.numel() // width,
            width,
        )
        return gx, gw, None


class Rope(Function):
    """Rotary embedding of the last channels of ``[B, P, H, D]`` (or ``[B, P, D]``).

    ``cosine`` and ``sine`` are ``[P, R/2]``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor, direction: float) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        ctx.direction = direction
        return _turn(x, cosine, sine, direction)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine = ctx.saved_tensors
        return _turn(grad.contiguous(), cosine, sine, -ctx.direction), None, None, None


def _turn(x: Tensor, cosine: Tensor, sine: Tensor, direction: float) -> Tensor:
    y, width = torch.empty_like(x), x.shape[-1]
    heads = x.shape[2] if x.dim() == 4 else 1
    call(
        "rope",
        x.dtype,
        x,
        cosine,
        sine,
        y,
        x.numel() // width,
        heads,
        len(cosine),
        width,
        2 * cosine.shape[1],
        direction,
    )
    return y


class Quantize(Function):
    """A run-time quantizer in the forward direction, the identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number_format: int) -> Tensor:
        return quantized(x, number_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


def quantized(x: Tensor, number_format: int) -> Tensor:
    """Values of ``x`` in a run-time number format, grouped along the last axis."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    group = 16 if number_format == kernels.COMPRESSED_KEY else 32
    call("quantize_rows", x.dtype, x.contiguous(), y, x.numel() // group, number_format)
    return y


class SwiGLU(Function):
    """Clamped SwiGLU of ``[N, 2F]`` times a factor per row, quantized when asked: ``[N, F]``."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, share: Tensor, limit: float, quantize: bool) -> Tensor:
        rows, width = h.shape[0], h.shape[1] // 2
        y = torch.empty(rows, width, dtype=h.dtype)
        call("swiglu_forward", h.dtype, h, share, y, rows, width, limit, int(quantize))
        ctx.save_for_backward(h, share)
        ctx.limit = limit
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        h, share = ctx.saved_tensors
        gh, gs = torch.empty_like(h), torch.empty_like(share)
        width = h.shape[1] // 2
        call(
            "swiglu_backward",
            h.dtype,
            h,
            share,
            grad.contiguous(),
            gh,
            gs,
            len(h),
            width,
            ctx.limit,
        )
        return gh, gs, None, None


class Grouped(Function):
    """Rows sorted by expert times their expert's matrix: ``[N, K] x [E, O, K] -> [N, O]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        y = x.new_empty(len(x), weight.shape[1])
        at = 0
        for expert, count in enumerate(counts):
            if count:
                torch.mm(x[at : at + count], weight[expert].t(), out=y[at : at + count])
            at += count
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        gx, gw = torch.empty_like(x), torch.zeros_like(weight)
        at = 0
        for expert, count in enumerate(ctx.counts):
            if count:
                rows = slice(at, at + count)
                torch.mm(grad[rows], weight[expert], out=gx[rows])
                torch.mm(grad[rows].t(), x[rows], out=gw[expert])
            at += count
        return gx, gw, None


class Gather(Function):
    """Rows of ``x`` by index, where each row is taken ``repeat`` times in all.

    ``order`` lists the taken places (row times repeat plus turn) and ``place`` is its inverse.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor, repeat: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.repeat = repeat
        return x[order // repeat]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        return grad[place].view(-1, ctx.repeat, grad.shape[1]).sum(1), None, None, None


class Scatter(Function):
    """Sum of the ``repeat`` rows of every token; the way back of :class:`Gather`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, place: Tensor, repeat: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.numbers = (repeat, y.dtype)
        return y[place].view(-1, repeat, y.shape[1]).sum(1, dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        repeat, dtype = ctx.numbers
        return grad.to(dtype)[order // repeat], None, None, None


class CrossEntropy(Function):
    """Mean cross-entropy of hidden rows under a head, in slices that keep memory small.

    Returns the loss and, without gradient, loss and argmax of every row. Targets below 0 do not
    count.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, target: Tensor, rows: int = 2048
    ) -> tuple[Tensor, Tensor, Tensor]:
        used = max(int((target >= 0).sum()), 1)
        losses, best = torch.empty(len(hidden)), torch.empty(len(hidden), dtype=torch.int64)
        gh, gw = torch.empty_like(hidden), torch.zeros(head.shape, dtype=torch.float32)
        for at in range(0, len(hidden), rows):
            part = slice(at, at + rows)
            logits = hidden[part] @ head.t()
            call(
                "cross_entropy",
                logits.dtype,
                logits,
                target[part],
                losses[part],
                best[part],
                len(logits),
                logits.shape[1],
                1.0,
            )
            torch.mm(logits, head, out=gh[part])
            gw += logits.t() @ hidden[part]
        ctx.save_for_backward(gh, gw)
        ctx.used = used
        ctx.mark_non_differentiable(losses, best)
        return losses.sum() / used, losses, best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gh, gw = ctx.saved_tensors
        factor = grad / ctx.used
        return gh * factor.to(gh.dtype), (gw * factor).to(gh.dtype), None, None

"""From logits to the distribution of the next token, and a draw from it.

Every function treats a row by itself; a reduction over the vocabulary is an integer sum or goes
through the :class:`~deepinfer_neuron.ops.arithmetic.Order`, so with a fixed order a row gives the
same bits alone and in any batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_neuron.ops.arithmetic import Order
from deepinfer_neuron.ops.philox import draw_words

WEIGHT_BITS = 31
"""A probability becomes a weight of this many bits; below ``2^-31`` a token is never drawn."""

_WORD = 0xFFFFFFFF
_MASS_BITS = 62
_MOST_SLOTS = 4096
_FIRST_PREFIX = 1024
_RANK_BLOCK = 32
_INFINITY = math.inf
_UNDERFLOW = -87.0


@dataclass(frozen=True)
class Transform:
    """What turns logits into a distribution, one entry per row.

    Attributes:
        temperatures: divisors of the logits, from 1e-5.
        min_ps: smallest probability relative to the largest one; 0 is off.
        top_ps: probability mass to keep; 1 is off.
        top_ks: number of tokens to keep; -1, and anything from the vocabulary size, is off.
    """

    temperatures: Sequence[float]
    min_ps: Sequence[float]
    top_ps: Sequence[float]
    top_ks: Sequence[int]


@dataclass(frozen=True)
class Distribution:
    """Log-probabilities and probabilities after a :class:`Transform`, fp32 ``[n, V]``.

    A removed token has ``-inf`` and 0.
    """

    logprobs: Tensor
    probabilities: Tensor


def argmax(logits: Tensor) -> Tensor:
    """Lowest id among the largest values of a row: fp32 ``[n, V]`` on the host to int64 ``[n]``.

    A row with a NaN gives the first NaN.
    """
    # NumPy's kernel is vectorized, torch's is not.
    return torch.from_numpy(logits.numpy().argmax(-1))


def leading(values: Tensor, count: int) -> Tensor:
    """Ids of the largest values in rank order: value descending, id ascending among equals.

    Args:
        values: fp32 ``[n, V]`` without NaN; ``+0`` and ``-0`` are equal.
        count: 1 to ``V``.

    Returns:
        int64 ``[n, count]``.
    """
    width = values.shape[-1]
    if count > width // _RANK_BLOCK:
        return _ranked(values, count)
    # As many values as there are blocks are at least the smallest of the leading block maxima.
    whole = values[:, : width // _RANK_BLOCK * _RANK_BLOCK]
    maxima = whole.unflatten(-1, (-1, _RANK_BLOCK)).amax(-1)
    bounds = maxima.topk(count, dim=-1).values.amin(-1)
    return torch.stack([_leading_of_row(r, b, count) for r, b in zip(values, bounds, strict=True)])


def _leading_of_row(values: Tensor, bound: Tensor, count: int) -> Tensor:
    """:func:`leading` of one row, fp32 ``[V]``, of which ``count`` values reach the bound."""
    ids = torch.from_numpy(np.flatnonzero((values >= bound).numpy()))
    return ids[_ranked(values[ids][None], count)[0]]


def _ranked(values: Tensor, count: int) -> Tensor:
    """:func:`leading` by sorting integers in which the id breaks ties."""
    bits = (values + 0.0).view(torch.int32)
    # The bits of an fp32, with those of a negative one reversed, are ordered like the numbers.
    descending = ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))
    keys = (descending.to(torch.int64) << 32) | torch.arange(values.shape[-1])
    if 8 * count > values.shape[-1]:
        # One axis at a time: only then does torch sort with vector instructions.
        return torch.stack([row.sort().values[:count] for row in keys]) & _WORD
    return keys.topk(count, dim=-1, largest=False).values & _WORD


def log_softmax(
    logits: Tensor,
    temperatures: Sequence[float],
    order: Order,
    min_ps: Sequence[float] | None = None,
) -> Tensor:
    """``(l - max) / T - ln(sum(exp((l - max) / T)))``, all in fp32.

    The maximum is subtracted before the multiplication by ``1 / T``: at the temperature 1e-5 the
    other order would round away differences between logits near the maximum.

    Args:
        logits: fp32 ``[n, V]``; a row whose maximum is not finite gives NaN.
        temperatures: ``n`` divisors.
        order: who orders the sum.
        min_ps: tokens whose probability is below this share of the largest one are removed before
            the sum; 0 keeps all, and so does ``None`` for every row.

    Returns:
        fp32 ``[n, V]``.
    """
    divisors = torch.tensor(temperatures, dtype=torch.float32)
    inverse = torch.ones_like(divisors) / divisors
    x = (logits - logits.amax(-1, keepdim=True)) * inverse[:, None]
    if min_ps is not None and any(min_ps):
        floors = [math.log(p) if p > 0.0 else -_INFINITY for p in min_ps]
        x = x.masked_fill(x < torch.tensor(floors, dtype=torch.float32)[:, None], -_INFINITY)
    return x - _log(order.sum(exponential(order, x)))[:, None]


def distribution(
    logits: Tensor, transform: Transform, order: Order, *, probabilities: bool = True
) -> Distribution:
    """Apply temperature, min-p, top-k and top-p to logits.

    Args:
        logits: fp32 ``[n, V]``, the largest of each row finite.
        transform: the settings of the rows.
        order: who orders the sums.
        probabilities: ``False`` leaves them out (an empty ``[n, 0]``) where only log-probabilities
            are read.
    """
    logprobs = log_softmax(logits, transform.temperatures, order, transform.min_ps)
    filtered: dict[int, tuple[Tensor, Tensor]] = {}
    limits = zip(transform.top_ps, transform.top_ks, strict=True)
    for row, (top_p, top_k) in enumerate(limits):
        if top_p < 1.0 or 0 < top_k < logits.shape[1]:
            filtered[row] = keep(logits[row], logprobs[row], top_p, top_k, order)
    for row, (ids, kept) in filtered.items():
        logprobs[row] = -_INFINITY
        logprobs[row, ids] = kept
    if not probabilities:
        return Distribution(logprobs, logprobs[:, :0])
    if not filtered:
        return Distribution(logprobs, exponential(order, logprobs))
    values = torch.zeros_like(logprobs)
    plain = [row for row in range(logits.shape[0]) if row not in filtered]
    if plain:
        values[plain] = exponential(order, logprobs[plain])
    for row, (ids, kept) in filtered.items():
        values[row, ids] = exponential(order, kept)
    return Distribution(logprobs, values)


def keep(
    logits: Tensor, logprobs: Tensor, top_p: float, top_k: int, order: Order
) -> tuple[Tensor, Tensor]:
    """The tokens that top-p and top-k leave, with their probabilities divided by their sum.

    Tokens are ranked by logit descending, id ascending. A token stays if the probabilities of the
    ranks before it sum to at most ``top_p`` and its rank is below ``top_k``. So the token that
    crosses ``top_p`` stays, the first always stays, and of equal logits the lower ids do. Sums are
    taken over probabilities in units of ``2^-62``, where no order of additions can matter.

    Args:
        logits: fp32 ``[V]``, for the ranking.
        logprobs: fp32 ``[V]``, log-softmax of the row; ``-inf`` never stays.
        top_p: in (0, 1], used as the nearest fp32; 1 is off.
        top_k: number of tokens; -1, and anything from ``V``, is off.
        order: who orders the sum of what stays.

    Returns:
        int64 ``[k]`` ids by rank and fp32 ``[k]`` log-probabilities.
    """
    width = logits.shape[0]
    limit = top_k if 0 < top_k < width else width
    bound = int(float(np.float32(top_p)) * 2.0**_MASS_BITS)
    # A model's distribution seldom needs more ranks than the first try.
    prefix = min(limit, _FIRST_PREFIX) if top_p < 1.0 else limit
    while True:
        ids = leading(logits[None], prefix)[0]
        kept = logprobs[ids]
        stays = int((kept > -_INFINITY).sum())
        if top_p < 1.0:
            masses = (exponential(order, kept).to(torch.float64) * 2.0**_MASS_BITS).to(torch.int64)
            stays = min(stays, int((masses.cumsum(0) - masses <= bound).sum()))
        if stays < prefix or prefix == limit:
            break
        prefix = limit
    kept = kept[:stays]
    return ids[:stays], kept - _log(order.sum(exponential(order, kept)))


def fixed_point_weights(probabilities: Tensor) -> Tensor:
    """``min(trunc(p * 2^31), 2^31 - 1)``: fp32 of at least 0 to int64, same shape."""
    weights = (probabilities * 2.0**WEIGHT_BITS).to(torch.int64)
    return weights.clamp_max_(2**WEIGHT_BITS - 1)


def fixed_point_draw(weights: Tensor, words: Tensor) -> Tensor:
    """One index per row, drawn in proportion to integer weights.

    The 64-bit number ``x1 * 2^32 + x0`` of the first two random words, modulo the sum of the row,
    selects by the inverse of the cumulative distribution. Columns are ordered by ``(j mod S,
    j div S)``: a slot is found among the prefix sums of ``S`` slot sums, then a column in that
    slot. ``S`` is 4096 from 8192 columns on, else the smallest power of two from 64 to 2048 that
    covers the columns (2048 when none does).

    Args:
        weights: int64 ``[n, V]`` of at least 0, row sums below 2^32.
        words: int64 ``[n, 4]`` random words, see :func:`deepinfer_neuron.ops.philox.draw_words`.

    Returns:
        int64 ``[n]``; -1 for a row of zeros.
    """
    rows, width = weights.shape
    slots = _slots(width)
    groups = -(-width // slots)
    table = F.pad(weights, (0, groups * slots - width)).view(rows, groups, slots)
    # For a single row the sum over groups has a much faster kernel with two axes.
    sums = table[0].sum(0)[None] if rows == 1 else table.sum(1)
    ends = sums.cumsum(-1)
    total = ends[:, -1]
    target = _remainder(words[:, 0], words[:, 1], total.clamp_min(1))
    slot = _first_above(ends, target)
    within = target - (ends - sums).gather(-1, slot[:, None])[:, 0]
    column = table.gather(-1, slot[:, None, None].expand(rows, groups, 1))[..., 0]
    group = _first_above(column.cumsum(-1), within)
    return (slot + group * slots).where(total > 0, -1)


def random_sampling(
    probabilities: Tensor, seeds: Tensor, positions: Tensor, case: int = 0
) -> Tensor:
    """Draw one token per row, see :func:`fixed_point_draw`.

    Args:
        probabilities: fp32 ``[n, V]`` of at least 0, row sums at most 1 up to rounding.
        seeds: int64 ``[n]``, bits of unsigned seeds.
        positions: int64 ``[n]``, index of the drawn token in its sequence.
        case: purpose of the draw.

    Returns:
        int64 ``[n]``; -1 for a row without a probability of at least ``2^-31``.
    """
    words = draw_words(seeds, positions, case)
    return fixed_point_draw(fixed_point_weights(probabilities), words)


def sum_smaller_probs(of: Distribution, tokens: Tensor, order: Order) -> Tensor:
    """Probability of drawing a token at most as probable as the given one.

    Among tokens of equal probability those up to the given id count, itself included.

    Args:
        of: the distribution of ``n`` rows.
        tokens: int64 ``[n]``; a negative id gives 0.
        order: who orders the sums.

    Returns:
        fp32 ``[n]``.
    """
    column = tokens.clamp_min(0)[:, None]
    own = of.logprobs.gather(-1, column)
    earlier = torch.arange(of.logprobs.shape[1]) <= column
    counts = (of.logprobs < own) | ((of.logprobs == own) & earlier)
    return order.sum(of.probabilities.where(counts, 0.0)).where(tokens >= 0, 0.0)


def _slots(width: int) -> int:
    if width >= 2 * _MOST_SLOTS:
        return _MOST_SLOTS
    return int(min(max(64, 1 << (width - 1).bit_length()), _MOST_SLOTS // 2))


def _remainder(low: Tensor, high: Tensor, divisor: Tensor) -> Tensor:
    """``(high * 2^32 + low) mod divisor`` for a divisor below 2^32, 16 bits at a time."""
    rest = high % divisor
    rest = ((rest << 16) | (low >> 16)) % divisor
    return ((rest << 16) | (low & 0xFFFF)) % divisor


def _first_above(ends: Tensor, target: Tensor) -> Tensor:
    """Index of the first prefix sum above the target, the last one if there is none: ``[n]``."""
    index = torch.searchsorted(ends, target[:, None], right=True)[:, 0]
    return index.clamp_max(ends.shape[-1] - 1)


def exponential(order: Order, x: Tensor) -> Tensor:
    """Exponential of fp32 values; 0 below -87, where results stop being normal numbers.

    Exponentials that underflow take torch thirty times as long.
    """
    if x.numel() == 0 or not bool(x.amin() < _UNDERFLOW):
        return order.exp(x)
    result: Tensor = order.exp(x.clamp_min(_UNDERFLOW)).masked_fill_(x < _UNDERFLOW, 0.0)
    return result


def _log(x: Tensor) -> Tensor:
    """Natural logarithm of positive fp32 values in fp64, rounded once."""
    return x.to(torch.float64).log().to(torch.float32)

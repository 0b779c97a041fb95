"""Cases of the operators on drafts: their inputs, their pool, and what becomes of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from benchmarks.operator_cases import (
    BF16,
    INT32,
    NEXTN,
    WINDOW,
    Case,
    Draw,
    Segments,
    Sizes,
    nbytes,
    segments,
)
from deepinfer_neuron.compat import tilelang_ops as ops

RING = 2 * WINDOW
STREAMS = 4
MARKOV = 256
KEYS = 192
"""Columns of the key lists of drafts: window and block, padded."""

TOP = 20
"""Log-probabilities returned per token."""

_TEMPERATURE = 1.3


def dflash_input_store(rows: int, sizes: Sizes) -> Case:
    """Mean over four streams."""
    x = Draw(31).normal(rows, STREAMS, sizes.hidden, dtype=BF16)
    out = torch.zeros(rows, sizes.hidden, dtype=BF16)
    kernel = ops.dflash_input_store_tl(sizes.hidden, STREAMS)

    def ours() -> tuple[Tensor, ...]:
        kernel(x, out)
        return (out,)

    def plain() -> tuple[Tensor, ...]:
        return (x.to(torch.float32).mean(1).to(BF16),)

    return Case(ours, plain, nbytes(x, out), close=2**-8)


def get_fused_dflash_get_input(rows: int, sizes: Sizes) -> Case:
    """One request per row, some of them padding."""
    draw, block = Draw(32), NEXTN + 1
    positions = draw.ints(0, 1000, rows)
    slots = draw.distinct(rows, rows) * RING + positions % RING
    first = torch.where(draw.flags(rows) & draw.flags(rows), -1, draw.distinct(rows, rows))
    accepted = draw.ints(0, block, rows)
    shapes = [((rows, block), INT32)] * 3 + [((rows, block), torch.bool)] * 2
    outs = [torch.zeros(s, dtype=t) for s, t in (*shapes, ((rows * block, KEYS), INT32))]
    kernel = ops.get_fused_dflash_get_input_tl(RING, KEYS, True, True)
    inputs = (slots, positions, first, accepted)

    def ours() -> list[Tensor]:
        kernel(*inputs, *outs, WINDOW + block, WINDOW)
        return outs

    def plain() -> list[Tensor]:
        valid, row = (first >= 0)[:, None], first.clamp(min=0)
        last = (positions[row] + accepted)[:, None]
        base = (slots[row] // RING * RING)[:, None]
        own = last + 1 + torch.arange(block, dtype=INT32)
        column = torch.arange(KEYS, dtype=INT32)
        key = last - WINDOW + 1 + column
        seen = valid & (key >= 0) & (column < WINDOW + block)
        keys = torch.where(seen, base + key % RING, -1)
        zeros = torch.zeros(rows, block, dtype=INT32)
        return [
            torch.where(valid, base + own % RING, -1),
            torch.where(valid, own, 0),
            zeros,
            valid.repeat(1, block),
            zeros.to(torch.bool),
            torch.repeat_interleave(keys, block, 0),
        ]

    return Case(ours, plain, nbytes(*inputs, *outs))


def confidence_head_fused(rows: int, sizes: Sizes) -> Case:
    """Hidden states beside Markov embeddings, one output."""
    draw = Draw(33)
    hidden = draw.normal(rows, sizes.hidden, dtype=BF16)
    markov = draw.normal(rows, MARKOV, dtype=BF16)
    weight = (draw.normal(sizes.hidden + MARKOV) / math.sqrt(sizes.hidden)).to(BF16)
    out = torch.zeros(rows)
    kernel = ops.confidence_head_fused_tl(sizes.hidden, MARKOV, True)

    def ours() -> tuple[Tensor, ...]:
        kernel(hidden, markov, weight, out, _TEMPERATURE)
        return (out,)

    def plain() -> tuple[Tensor, ...]:
        logit = torch.cat((hidden, markov), 1).to(torch.float32) @ weight.to(torch.float32)
        return (torch.sigmoid((logit / _TEMPERATURE).clamp(-60.0, 60.0)),)

    return Case(ours, plain, nbytes(hidden, markov, weight, out), close=1e-5)


def copy_dflash_decode_input(rows: int, sizes: Sizes) -> Case:
    """Nine arrays, half of whose rows are padding."""
    draw = Draw(34)
    types = (INT32, INT32, INT32, INT32, torch.float32, torch.float32, INT32, torch.uint64, INT32)
    sources = [draw.ints(0, 1000, rows).to(t) for t in types]
    paddings = [draw.ints(0, 1000, rows).to(t) for t in types]
    outs, buffers = ([torch.zeros(2 * rows, dtype=t) for t in types] for _ in range(2))
    kernel = ops.copy_dflash_decode_input_tl(True)

    def ours() -> list[Tensor]:
        kernel(*sources, *paddings, *outs)
        return outs

    def plain() -> list[Tensor]:
        for target, source, padding in zip(buffers, sources, paddings, strict=True):
            count = source.shape[0]
            target[:count] = source
            target[count:] = padding[: target.shape[0] - count]
        return buffers

    return Case(ours, plain, nbytes(*sources, *paddings, *outs), in_place=len(outs))


def store_mtp_info(rows: int, sizes: Sizes) -> Case:
    """Short lists of three drafts per request; one request has none."""
    draw = Draw(35)
    slots = draw.distinct(rows, rows)
    shapes = ((), (sizes.topk,), (sizes.topk,), ())
    types = (INT32, torch.float32, INT32, torch.float32)
    pairs = list(zip(shapes, types, strict=True))
    values = [draw.ints(0, 1000, rows, NEXTN, *s).to(t) for s, t in pairs]
    pools = [[torch.zeros(rows * NEXTN, *s, dtype=t) for s, t in pairs] for _ in range(2)]
    kernel = ops.store_mtp_info_tl(NEXTN, sizes.topk, True, True)

    def ours() -> list[Tensor]:
        kernel(slots, *values, *pools[0])
        return pools[0]

    def plain() -> list[Tensor]:
        kept = slots != 0
        for pool, value in zip(pools[1], values, strict=True):
            pool.unflatten(0, (-1, NEXTN))[slots[kept]] = value[kept]
        return pools[1]

    return Case(ours, plain, 2 * nbytes(*values) + nbytes(slots), in_place=len(values))


def compute_seqlens_q_by_confidence_rates(rows: int, sizes: Sizes) -> Case:
    """Half of the rows that all drafts together would take."""
    draw = Draw(36)
    remap = torch.where(draw.flags(rows), draw.distinct(rows, rows), -1)
    rates = draw.uniform(rows, NEXTN)
    cumulative, lengths = torch.zeros(rows, NEXTN), torch.zeros(rows, dtype=INT32)
    total = rows + rows * NEXTN // 2
    kernel = ops.compute_seqlens_q_by_confidence_rates_tl(NEXTN)

    def ours() -> tuple[Tensor, ...]:
        kernel(remap, rates, cumulative, lengths, total)
        return cumulative, lengths

    def plain() -> tuple[Tensor, ...]:
        known = torch.cumprod(rates[remap.clamp(min=0)], 1)
        survival = torch.where((remap >= 0)[:, None], known, 0.0)
        best = torch.argsort(survival.flatten(), descending=True, stable=True)[: total - rows]
        return survival, 1 + torch.bincount(best // NEXTN, minlength=rows)

    return Case(ours, plain, nbytes(remap, rates, cumulative, lengths), close=1e-6)


def prepare_verification_metadata(rows: int, sizes: Sizes) -> Case:
    """Request and place of every row."""
    seg = segments(rows)
    outs = [torch.zeros(rows, dtype=t) for t in (INT32, INT32, torch.bool)]
    kernel = ops.prepare_verification_metadata_tl(NEXTN + 1)

    def ours() -> list[Tensor]:
        kernel(seg.first, seg.lengths, *outs)
        return outs

    def plain() -> list[Tensor]:
        request = torch.repeat_interleave(seg.lengths)
        step = torch.arange(rows) - seg.first[request]
        return [request, step, step < seg.lengths[request] - 1]

    return Case(ours, plain, nbytes(seg.first, seg.lengths, *outs))


def expand_sampling_params(rows: int, sizes: Sizes) -> Case:
    """Five values of every request, for its rows."""
    draw, seg = Draw(37), segments(rows)
    types = (torch.float32, torch.float32, INT32, INT32, torch.uint64)
    values = [draw.ints(0, 1000, seg.count).to(t) for t in types]
    outs = [torch.zeros(rows, dtype=t) for t in types]
    kernel = ops.expand_sampling_params_tl()

    def ours() -> list[Tensor]:
        kernel(*values, seg.request, seg.step, *outs)
        return outs

    def plain() -> list[Tensor]:
        request = seg.request
        seeds = values[4].view(torch.int64)[request].view(torch.uint64)
        settings = [value[request] for value in values[:3]]
        return [*settings, values[3][request] + seg.step * 10_000_019, seeds]

    return Case(ours, plain, nbytes(*values, seg.request, seg.step, *outs))


def map_lookup(rows: int, sizes: Sizes) -> Case:
    """Log-probabilities by token; half of the tokens are in the lists."""
    draw = Draw(38)
    keys = torch.stack([draw.distinct(2 * sizes.topk, sizes.topk) for _ in range(rows)])
    values, wanted = draw.normal(rows, sizes.topk), draw.ints(0, 2 * sizes.topk, rows, 1)
    out = torch.zeros(rows, 1)
    kernel = ops.map_lookup_tl(sizes.topk)

    def ours() -> tuple[Tensor, ...]:
        kernel(keys, values, wanted, out)
        return (out,)

    def plain() -> tuple[Tensor, ...]:
        equal = keys == wanted
        value = values.gather(1, equal.to(INT32).argmax(1, keepdim=True))
        return (torch.where(equal.any(1, keepdim=True), value, -math.inf),)

    return Case(ours, plain, nbytes(keys, values, wanted, out))


def remap_draft_topk(rows: int, sizes: Sizes) -> Case:
    """Short lists, half of whose tokens are in the other one."""
    draw, k = Draw(39), sizes.topk
    keys = torch.stack([draw.distinct(2 * k, k) for _ in range(rows)])
    target = torch.stack([draw.distinct(2 * k, k) for _ in range(rows)])
    values, drafts = draw.normal(rows, k), draw.ints(0, 2 * k, rows)
    source = draw.distinct(rows, rows)
    outs = [torch.zeros(rows, k), *(torch.zeros(rows, dtype=INT32) for _ in range(2))]
    kernel = ops.remap_draft_topk_tl(k, sizes.vocab)
    inputs = (keys, values, drafts, target, source)

    def ours() -> list[Tensor]:
        kernel(*inputs, *outs)
        return outs

    def plain() -> list[Tensor]:
        aligned = []
        for wanted, own, value in zip(target, keys[source], values[source], strict=True):
            equal = wanted[:, None] == own
            aligned.append(torch.where(equal, value, -math.inf).amax(1))
        hits = target == drafts[source][:, None]
        column = torch.where(hits.any(1), hits.to(INT32).argmax(1), -1)
        return [torch.stack(aligned), column, torch.arange(rows)]

    return Case(ours, plain, nbytes(*inputs, *outs))


def _judging(seg: Segments) -> Tensor:
    """Whether each row judges a draft."""
    return seg.step + 1 < seg.lengths[seg.request]


def get_accept_result(rows: int, sizes: Sizes) -> Case:
    """Half of the drafts are good; most tokens are forced."""
    draw, seg = Draw(40), segments(rows)
    good, verifies = draw.flags(rows), _judging(seg)
    golden, tokens = draw.ints(-1, 3, rows), draw.ints(0, 3, rows)
    drafts, source = draw.ints(0, 3, rows), draw.distinct(rows, rows)
    outs = [torch.zeros(rows, dtype=t) for t in (INT32, torch.bool, torch.bool)]
    kernel = ops.get_accept_result_tl(True)
    inputs = (good, golden, drafts, source, tokens, verifies, seg.first, seg.request)

    def ours() -> list[Tensor]:
        kernel(*inputs, *outs)
        return outs

    def plain() -> list[Tensor]:
        forced = golden != -1
        emitted = torch.where(forced, golden, tokens)
        passes = torch.where(forced, golden == drafts[source], good) & verifies
        step = torch.arange(rows) - seg.first[seg.request]
        runs = torch.zeros(seg.first.shape[0], int(step.max()) + 1, dtype=INT32)
        runs[seg.request, step] = passes.to(INT32)
        runs = runs.cumprod(1)
        final = step == runs.sum(1)[seg.request]
        return [emitted, runs[seg.request, step] > 0, final]

    return Case(ours, plain, nbytes(*inputs, *outs))


def finalize_verification(rows: int, sizes: Sizes) -> Case:
    """All optional results, twenty log-probabilities per token."""
    draw, seg = Draw(41), segments(rows)
    verifies, n = _judging(seg), seg.count
    runs = [int(draw.ints(0, length, 1)) for length in seg.lengths.tolist()]
    counts = torch.tensor(runs, dtype=INT32)
    accept, final = seg.step < counts[seg.request], seg.step == counts[seg.request]
    tokens, top_ids = draw.ints(0, 9, rows), draw.ints(0, 9, rows, TOP)
    emitted = (tokens, draw.normal(rows), draw.uniform(rows), draw.normal(rows, TOP), top_ids)
    probs, pool, source = draw.uniform(rows), draw.uniform(rows), draw.distinct(rows, rows)
    stops = draw.ints(-1, 9, n, 2)
    inputs = (accept, final, *emitted, seg.first, seg.lengths, seg.request, verifies, probs, pool)
    heads = [torch.zeros(size, dtype=INT32) for size in (n, NEXTN + 1, NEXTN + 1)]
    heads += [torch.zeros(1), torch.zeros(n, dtype=torch.bool)]
    outs = heads + [torch.zeros(m, *x.shape[1:], dtype=x.dtype) for m in (n, rows) for x in emitted]
    kernel = ops.finalize_verification_tl(True, True, NEXTN + 1, 2)

    def ours() -> list[Tensor]:
        kernel(*inputs, source, stops, *outs)
        return outs

    def plain() -> list[Tensor]:
        step = torch.arange(rows) - seg.first[seg.request]
        taken = torch.bincount(seg.request[accept], minlength=n)
        generated, judged = (
            torch.bincount(step[of], minlength=NEXTN + 1) for of in (accept, verifies)
        )
        error = torch.where(verifies, (probs - pool[source]).abs(), 0.0).sum()[None]
        own = stops[seg.request]
        hit = ((own == tokens[:, None]) & (own != -1)).any(1) & (accept | final)
        ends = torch.zeros(n, dtype=torch.bool)
        ends[seg.request[hit]] = True
        last = seg.first + taken
        kept = [
            torch.where(accept.view(-1, *[1] * (x.dim() - 1)), x, -1 if x is tokens else 0)
            for x in emitted
        ]
        return [taken, generated, judged, error, ends, *(x[last] for x in emitted), *kept]

    return Case(ours, plain, nbytes(*inputs, source, stops, *outs), close=1e-5)

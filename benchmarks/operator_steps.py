"""Cases of the operators on the layout of a step: metadata, carried tokens, parallel layouts."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.operator_cases import (
    INT32,
    NEXTN,
    PAGE,
    WINDOW,
    Case,
    Draw,
    Segments,
    Sizes,
    nbytes,
    prefix,
    segments,
)
from deepinfer_neuron.compat import tilelang_ops as ops

RING = 2 * WINDOW
RANKS = 8
NGRAM = 3
_SENTINEL, _PAD = 5, 6
_PLACEHOLDER_QUERY = 998244353


def _rows_of(lengths: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Request of every row, and its place there."""
    request = torch.repeat_interleave(lengths)
    return request, torch.arange(request.shape[0]) - (ends - lengths)[request]


def prepare_v4_decode_metadata(rows: int, sizes: Sizes) -> Case:
    """One row per sequence, ratios 1 and 2."""
    draw, pages = Draw(21), sizes.pages
    one = torch.ones(rows, dtype=INT32)
    context = draw.ints(2, sizes.context, rows)
    tables, state = draw.ints(0, 1 << 16, rows * pages), draw.distinct(rows, rows)
    offsets = prefix(one * pages)
    placeholder = draw.flags(rows) & draw.flags(rows)
    row, flag = ((rows,), INT32), ((rows,), torch.bool)
    pairs, per_ratio = ((rows, 2), INT32), ((2, rows), INT32)
    kinds = [row, flag, flag, flag, row, ((1, rows), INT32), ((1, rows, 2), INT32), pairs]
    kinds += [row, row, row, per_ratio, per_ratio]
    outs = [torch.zeros(shape, dtype=dtype) for shape, dtype in kinds]
    inputs = (one, context, one.cumsum(0).to(INT32), tables, offsets, state, placeholder)
    kernel = ops.prepare_v4_decode_metadata_tl(
        1, pages, WINDOW, RING, PAGE, False, (1, 2), (1,), (2,)
    )

    def ours() -> list[Tensor]:
        kernel(*inputs, *outs)
        return outs

    def plain() -> list[Tensor]:
        return _plain_metadata(*inputs, pages)

    looked_up = 2 * nbytes(one)
    return Case(ours, plain, nbytes(*inputs, *outs) - nbytes(tables) + looked_up)


def _plain_metadata(
    lengths: Tensor,
    context: Tensor,
    ends: Tensor,
    tables: Tensor,
    offsets: Tensor,
    state: Tensor,
    placeholder: Tensor,
    pages: int,
) -> list[Tensor]:
    request, step = _rows_of(lengths, ends)
    at = (context - lengths)[request] + step
    seen, ring, fake = at + 1, state[request], placeholder[request]
    length = torch.clamp(seen, max=WINDOW)
    window = torch.stack((ring * RING + (seen - length) % RING, length), 1)
    dense = torch.stack((torch.arange(at.shape[0]) * (pages * PAGE), seen), 1)
    places, slots = [], []
    for ratio in (1, 2):
        complete = seen % ratio == 0
        page, key = PAGE // ratio, at // ratio
        block = tables[offsets[request] + key // page]
        places.append(torch.where(complete, key * ratio, 0))
        slots.append(torch.where(complete, block * page + key % page, -1))
    none = torch.zeros_like(fake)
    queries = torch.where(fake, _PLACEHOLDER_QUERY, request)
    first = [at, ~fake, none, none, seen, (seen // 2)[None], dense[None], window]
    last = [queries, ring, torch.stack(places), torch.stack(slots)]
    return [*first, ring * RING + at % RING, *last]


def copy_block_tables(rows: int, sizes: Sizes) -> Case:
    """Tables of different lengths, up to the longest sequence's."""
    draw = Draw(22)
    one = torch.ones(rows, dtype=INT32)
    ends = one.cumsum(0).to(INT32)
    lengths = draw.ints(1, sizes.pages + 1, rows)
    offsets = prefix(lengths)
    tables = draw.ints(0, 1 << 16, int(offsets[-1]))
    outs = [torch.zeros(rows, sizes.pages, dtype=INT32) for _ in range(2)]
    kernel = ops.copy_block_tables_tl(1, sizes.pages)

    def ours() -> tuple[Tensor, ...]:
        kernel(one, ends, tables, offsets, outs[0])
        return (outs[0],)

    def plain() -> tuple[Tensor, ...]:
        row, starts = 0, offsets.tolist()
        for count, first, last in zip(one.tolist(), starts, starts[1:], strict=False):
            outs[1][row : row + count, : last - first] = tables[first:last]
            row += count
        return (outs[1],)

    return Case(ours, plain, 2 * nbytes(tables) + nbytes(one, ends, offsets), in_place=1)


def _remap(draw: Draw, count: int) -> Tensor:
    """Places of sequences in the last step; half of them are new."""
    return torch.where(draw.flags(count), draw.distinct(count, count), -1)


def _current(fresh: Tensor, sampled: Tensor, drafts: Tensor, remap: Tensor) -> Tensor:
    carried = torch.cat((sampled[:, None], drafts), 1)[remap.clamp(min=0)]
    return torch.where((remap < 0)[:, None], fresh, carried)


def gather_input_ids_zos(rows: int, sizes: Sizes) -> Case:
    """Half of the sequences continue."""
    draw, seg = Draw(23), segments(rows)
    fresh = draw.ints(0, sizes.vocab, seg.count, NEXTN + 1)
    sampled, drafts = draw.ints(0, 99, seg.count), draw.ints(0, 99, seg.count, NEXTN)
    remap = _remap(draw, seg.count)
    out = torch.zeros(rows, dtype=INT32)
    kernel = ops.gather_input_ids_zos_tl(NEXTN + 1)
    inputs = (fresh, sampled, drafts, remap, seg.lengths, seg.ends)

    def ours() -> tuple[Tensor, ...]:
        kernel(*inputs, out)
        return (out,)

    def plain() -> tuple[Tensor, ...]:
        return (_current(fresh, sampled, drafts, remap)[_rows_of(seg.lengths, seg.ends)],)

    return Case(ours, plain, nbytes(*inputs, out))


def _plain_history(tokens: Tensor, start: int, rejected: Tensor, seg: Segments) -> Tensor:
    """Tokens before each row, newest first, hidden from the sentinel on."""
    request, step = _rows_of(seg.lengths, seg.ends)
    hidden = torch.zeros(step.shape[0], dtype=torch.bool)
    columns = []
    for back in range(NGRAM):
        place = step - back
        skipped = torch.where(place < 0, rejected[request], 0)
        token = tokens[request, start + place - skipped]
        hidden = hidden | (token == _SENTINEL)
        columns.append(torch.where(hidden, _PAD, token))
    return torch.stack(columns, 1)


def gather_engram_tokens_zos(rows: int, sizes: Sizes) -> Case:
    """Compressed ids of three tokens per row."""
    draw, seg = Draw(24), segments(rows)
    n = seg.count
    window, fresh = draw.ints(0, 99, n, NEXTN + NGRAM - 1), draw.ints(0, 99, n, NEXTN + 1)
    sampled, drafts = draw.ints(0, sizes.vocab, n), draw.ints(0, sizes.vocab, n, NEXTN)
    accepted, remap = draw.ints(0, NEXTN + 1, n), _remap(draw, n)
    lookup = draw.ints(0, 99, sizes.vocab)
    out = torch.zeros(rows, NGRAM, dtype=INT32)
    kernel = ops.gather_engram_tokens_zos_tl(NEXTN + 1, NGRAM, _PAD, _SENTINEL)
    inputs = (window, fresh, sampled, drafts, accepted, remap)

    def ours() -> tuple[Tensor, ...]:
        kernel(*inputs, lookup, seg.lengths, seg.ends, out)
        return (out,)

    def plain() -> tuple[Tensor, ...]:
        tokens = torch.cat((window, _current(fresh, lookup[sampled], lookup[drafts], remap)), 1)
        rejected = NEXTN - torch.where(remap < 0, 0, accepted[remap.clamp(min=0)])
        return (_plain_history(tokens, window.shape[1], rejected, seg),)

    looked_up = nbytes(sampled, drafts)
    return Case(ours, plain, nbytes(*inputs, seg.lengths, seg.ends, out) + looked_up)


def compute_seqlens_k_zos(rows: int, sizes: Sizes) -> Case:
    """One sequence per row."""
    draw = Draw(25)
    start = draw.ints(0, 1000, rows)
    lengths = [start.clone(), start.clone()]
    new, accepted = draw.ints(1, NEXTN + 2, rows), draw.ints(0, NEXTN + 1, rows)
    remap = _remap(draw, rows)
    kernel = ops.compute_seqlens_k_zos_tl(NEXTN)

    def ours() -> tuple[Tensor, ...]:
        kernel(lengths[0], new, remap, accepted)
        return (lengths[0],)

    def plain() -> tuple[Tensor, ...]:
        rejected = torch.where(remap >= 0, NEXTN - accepted[remap.clamp(min=0)], 0)
        lengths[1] += new - rejected
        return (lengths[1],)

    return Case(ours, plain, 2 * nbytes(start) + nbytes(new, remap, accepted), in_place=1)


def _sequences(rows: int) -> list[int]:
    """Four sequences of different lengths, or one if there are few rows."""
    if rows < 4 * RANKS:
        return [rows]
    quarter = rows // 4
    return [quarter + 3, quarter - 3, quarter + 1, rows - 3 * quarter - 1]


def _dealt(length: int, base: int) -> tuple[Tensor, Tensor]:
    """Owner and row of every token of a sequence whose rows begin at ``base``."""
    block = -(-length // (2 * RANKS))
    token = torch.arange(length)
    number = token // block
    late = number >= RANKS
    owner = torch.where(late, 2 * RANKS - 1 - number, number)
    return owner, base + torch.where(late, block, 0) + token % block


def _blocks(lengths: list[int]) -> list[int]:
    """Rows of a rank per sequence."""
    return [2 * -(-length // (2 * RANKS)) for length in lengths]


def prepare_cp_mirror(rows: int, sizes: Sizes) -> Case:
    """Eight ranks, ratios 1 and 2, seen from rank 3."""
    given, rank = _sequences(rows), 3
    longer = [length + 40 + 3 * number for number, length in enumerate(given)]
    count, scratch = sum(_blocks(given)), torch.zeros(1, dtype=INT32)
    tables = [prefix(torch.tensor(n)) for n in (given, longer)]
    outs = [torch.zeros(shape, dtype=INT32) for shape in ((rows,), (count,), *[(2, count)] * 2)]
    kernel = ops.prepare_cp_mirror_tl(RANKS, (1, 2))

    def ours() -> list[Tensor]:
        kernel(*tables, scratch, *outs, rank)
        return outs

    def plain() -> list[Tensor]:
        lengths, known = (table.diff().tolist() for table in tables)
        reverse, index = [], torch.full((count,), -1)
        ranges = torch.zeros(2, 2, count, dtype=torch.int64)
        base, first, keys = 0, 0, [0, 0]
        for length, total, size in zip(lengths, known, _blocks(lengths), strict=True):
            owner, row = _dealt(length, base)
            reverse.append(owner * count + row)
            mine = torch.nonzero(owner == rank)[:, 0]
            index[row[mine]] = first + mine
            for number, ratio in enumerate((1, 2)):
                ranges[:, number, base : base + size] = keys[number]
                ranges[1, number, row[mine]] += (total - length + mine + 1) // ratio
                keys[number] += max(1, total // ratio)
            base, first = base + size, first + length
        return [torch.cat(reverse), index, *ranges]

    return Case(ours, plain, nbytes(*tables, *outs))


def yoco_cp_boundary_fused(rows: int, sizes: Sizes) -> Case:
    """The last eight tokens of every sequence."""
    given, rank = _sequences(rows), 3
    tails = [min(8, length) for length in given]
    tables = [prefix(torch.tensor(n)) for n in (given, tails)]
    width, scratch = sum(tails), torch.zeros(1, dtype=INT32)
    outs = [torch.zeros(width, dtype=INT32) for _ in range(2)]
    kernel = ops.yoco_cp_boundary_fused_tl(RANKS)

    def ours() -> list[Tensor]:
        kernel(*tables, scratch, *outs, rank)
        return outs

    def plain() -> list[Tensor]:
        lengths, last = (table.diff().tolist() for table in tables)
        base, owners, places = 0, [], []
        for length, kept, size in zip(lengths, last, _blocks(lengths), strict=True):
            owner, row = _dealt(length, base)
            owners.append(owner[length - kept :])
            places.append(row[length - kept :])
            base += size
        owner, row = torch.cat(owners), torch.cat(places)
        reverse, rows_here = torch.zeros(width, dtype=torch.int64), torch.full((width,), -1)
        for number in range(RANKS):
            mine = torch.nonzero(owner == number)[:, 0]
            mine = mine[torch.argsort(row[mine])]
            reverse[mine] = number * width + torch.arange(mine.shape[0])
            if number == rank:
                rows_here[: mine.shape[0]] = row[mine]
        return [rows_here, reverse]

    return Case(ours, plain, nbytes(*tables, *outs))

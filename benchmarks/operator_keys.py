"""Cases of the operators on key caches, their indices, and their states."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.operator_cases import (
    BF16,
    HEAD,
    INT32,
    PAGE,
    RECORD,
    WINDOW,
    Case,
    Draw,
    Layout,
    Sizes,
    nbytes,
    prefix,
    quantized,
)
from deepinfer_neuron.compat import tilelang_ops as ops

RING = 2 * WINDOW
BLOCK = 8
"""Keys of a candidate block."""

CANDIDATES = 2048
STATE_LAYERS = 8
STATE_RING = 8


def candidate_block_max(rows: int, sizes: Sizes) -> Case:
    """Logits of all compressed keys, reduced block by block."""
    draw = Draw(1)
    width = sizes.context
    logits = draw.normal(rows, width, dtype=BF16)
    visible = draw.ints(1, width + 1, rows)
    blocks = -(-width // BLOCK)
    best, count = torch.zeros(rows, blocks, dtype=BF16), torch.zeros(rows, dtype=INT32)
    kernel = ops.candidate_block_max_tl(width, BLOCK)

    def ours() -> tuple[Tensor, ...]:
        kernel(logits, visible, best, count)
        return best, count

    def plain() -> tuple[Tensor, ...]:
        padded = F.pad(logits, (0, blocks * BLOCK - width), value=-math.inf)
        largest = padded.unflatten(1, (blocks, BLOCK)).amax(2)
        used = (visible + BLOCK - 1) // BLOCK
        return largest.scatter(1, used[:, None].to(torch.int64) - 1, math.inf), used

    return Case(ours, plain, nbytes(logits, visible, best, count))


def _chosen(draw: Draw, rows: int, sizes: Sizes) -> Tensor:
    """Numbers of candidate blocks."""
    blocks = sizes.context // BLOCK
    count = min(CANDIDATES, blocks)
    return torch.stack([draw.distinct(blocks, count) for _ in range(rows)])


def get_candidate_compact_lens(rows: int, sizes: Sizes) -> Case:
    """Visible entries of the chosen blocks."""
    draw = Draw(2)
    blocks = _chosen(draw, rows, sizes)
    visible = draw.ints(1, sizes.context + 1, rows)
    out = torch.zeros(rows, dtype=INT32)
    kernel = ops.get_candidate_compact_lens_tl(blocks.shape[1], BLOCK)

    def ours() -> tuple[Tensor, ...]:
        kernel(blocks, visible, out)
        return (out,)

    def plain() -> tuple[Tensor, ...]:
        inside = torch.clamp(visible[:, None] - blocks * BLOCK, 0, BLOCK)
        return (torch.where(blocks >= 0, inside, 0).sum(1).to(INT32),)

    return Case(ours, plain, nbytes(blocks, visible, out))


def restore_candidate_indices_inplace(rows: int, sizes: Sizes) -> Case:
    """Places in the chosen blocks to entries; both include a copy of the places."""
    draw = Draw(3)
    blocks = _chosen(draw, rows, sizes)
    places = draw.ints(-1, blocks.shape[1] * BLOCK, rows, sizes.topk)
    offset = draw.ints(0, 1000, rows)
    out = torch.zeros_like(places)
    kernel = ops.restore_candidate_indices_inplace_tl(sizes.topk, blocks.shape[1], BLOCK, True)

    def ours() -> tuple[Tensor, ...]:
        out.copy_(places)
        kernel(out, blocks, offset)
        return (out,)

    def plain() -> tuple[Tensor, ...]:
        compact = places.clone()
        number = (compact.clamp(min=0) // BLOCK).to(torch.int64)
        entries = blocks.gather(1, number) * BLOCK + compact % BLOCK + offset[:, None]
        return (torch.where(compact < 0, -1, entries),)

    return Case(ours, plain, 5 * nbytes(places) + nbytes(offset))


def compress_and_update_state_decode(rows: int, sizes: Sizes) -> Case:
    """One token per request; about half of them complete a pair."""
    draw = Draw(4)
    score, latent = draw.normal(2, rows, HEAD).unbind(0)
    start = draw.normal(rows, STATE_RING, 2, HEAD)
    states = (start.clone(), start.clone())
    slots = draw.distinct(rows, rows)
    lengths = draw.ints(2, 1000, rows)
    out = torch.zeros(rows, HEAD, dtype=BF16)
    kernel = ops.compress_and_update_state_decode_tl(HEAD, 2)

    def ours() -> tuple[Tensor, ...]:
        kernel(score, latent, states[0], slots, lengths, out)
        return out, states[0]

    def plain() -> tuple[Tensor, ...]:
        state, slot, at = states[1], slots.to(torch.int64), lengths.to(torch.int64) - 1
        state[slot, at % STATE_RING] = torch.stack((score, latent), 1)
        pair = torch.stack((state[slot, (at - 1) % STATE_RING], state[slot, at % STATE_RING]), 1)
        mixed = (torch.softmax(pair[:, :, 0], 1) * pair[:, :, 1]).sum(1).to(BF16)
        return torch.where((lengths % 2 == 0)[:, None], mixed, 0.0), state

    completed = int((lengths % 2 == 0).sum()) * 2 * HEAD * 4
    moved = 2 * nbytes(score, latent) + completed + nbytes(out)
    return Case(ours, plain, moved, in_place=1, close=2**-8)


def compress_and_update_state_prefill(rows: int, sizes: Sizes) -> Case:
    """A chunk of one request, whose first pair began before it; both include its restoration."""
    draw = Draw(5)
    score, latent = draw.normal(2, rows, HEAD).unbind(0)
    start = draw.normal(2, STATE_RING, 2, HEAD)
    states = (start.clone(), start.clone())
    old, slot = WINDOW + 1, 1
    before = (slot, (old - 1) % STATE_RING)
    count = (old + rows) // 2 - old // 2
    one = torch.ones(1, dtype=INT32)
    slots = one * slot
    tables = [prefix(one * n) for n in (rows, old + rows, count)]
    owner = torch.zeros(count, dtype=INT32)
    out = torch.zeros(count, HEAD, dtype=BF16)
    kernel = ops.compress_and_update_state_prefill_tl(HEAD, 2, False)

    def ours() -> tuple[Tensor, ...]:
        states[0][before] = start[before]
        kernel(score, latent, states[0], slots, owner, *tables, None, out)
        return out, states[0]

    def plain() -> tuple[Tensor, ...]:
        states[1][before] = start[before]
        return _plain_chunk(score, latent, states[1], slots, tables, count), states[1]

    token = nbytes(start[before])
    moved = nbytes(score, latent, out) + (3 + min(rows, STATE_RING)) * token
    return Case(ours, plain, moved, in_place=1, close=2**-8)


def _plain_chunk(
    score: Tensor, latent: Tensor, state: Tensor, slots: Tensor, tables: list[Tensor], count: int
) -> Tensor:
    """Request by request."""
    out = torch.zeros(count, HEAD, dtype=BF16)
    starts, ends, entries = (table.tolist() for table in tables)
    for number, slot in enumerate(slots.tolist()):
        rows = slice(starts[number], starts[number + 1])
        new = rows.stop - rows.start
        old = ends[number + 1] - ends[number] - new
        fresh = torch.stack((score[rows], latent[rows]), 1)
        carried = state[slot, (old - 1) % STATE_RING, None][: old % 2]
        pairs = torch.cat((carried, fresh))
        pairs = pairs[: pairs.shape[0] // 2 * 2].unflatten(0, (-1, 2))
        first = entries[number]
        mixed = (torch.softmax(pairs[:, :, 0], 1) * pairs[:, :, 1]).sum(1)
        out[first : first + pairs.shape[0]] = mixed.to(BF16)
        kept = torch.arange(max(0, new - STATE_RING), new)
        state[slot, (old + kept) % STATE_RING] = fresh[kept]
    return out


def gather(rows: int, sizes: Sizes) -> Case:
    """Embeddings of tokens; a few indices may lie outside the table."""
    draw = Draw(6)
    table = draw.normal(sizes.table, sizes.hidden, dtype=BF16)
    index = draw.ints(-1, sizes.table, rows)
    out = torch.zeros(rows, sizes.hidden, dtype=BF16)
    kernel = ops.gather_tl(sizes.hidden, BF16, INT32, sizes.hidden)

    def ours() -> tuple[Tensor, ...]:
        kernel(table, index, out)
        return (out,)

    def plain() -> tuple[Tensor, ...]:
        inside = (index >= 0) & (index < table.shape[0])
        return (torch.where(inside[:, None], table[torch.where(inside, index, 0)], 0.0),)

    note = f"table of {sizes.table} rows"
    return Case(ours, plain, 2 * nbytes(out) + nbytes(index), note=note)


def store_kv_cache(rows: int, sizes: Sizes) -> Case:
    """Window keys, quantized and stored."""
    draw = Draw(7)
    keys = draw.normal(rows, HEAD, dtype=BF16)
    blocks = 2 * -(-rows // PAGE)
    caches = [torch.zeros(blocks, PAGE, RECORD, dtype=torch.uint8) for _ in range(2)]
    slots = draw.distinct(blocks * PAGE, rows)
    kernel = ops.store_kv_cache_tl(Layout(), PAGE)

    def ours() -> tuple[Tensor, ...]:
        kernel(keys, caches[0], slots)
        return (caches[0],)

    def plain() -> tuple[Tensor, ...]:
        kept = slots >= 0
        caches[1].view(-1, RECORD)[slots[kept]] = torch.cat(quantized(keys[kept]), 1)
        return (caches[1],)

    return Case(ours, plain, nbytes(keys, slots) + rows * RECORD, in_place=1)


def load_paged_kv_cache(rows: int, sizes: Sizes) -> Case:
    """One page of window keys per row, as values."""
    draw, page = Draw(8), min(PAGE, sizes.topk)
    cache = torch.cat(quantized(draw.normal(rows, page, HEAD, dtype=BF16)), 2)
    column = torch.arange(rows, dtype=INT32)
    begin, end = torch.zeros_like(column), torch.full_like(column, page)
    pieces = torch.stack((draw.distinct(rows, rows), begin, end, column * page), 1)
    out = torch.zeros(rows * page, HEAD, dtype=BF16)
    kernel = ops.load_paged_kv_cache_tl(Layout(), page)

    def ours() -> tuple[Tensor, ...]:
        kernel(pieces, out, out, cache[..., :HEAD], cache[..., HEAD:])
        return (out,)

    def plain() -> tuple[Tensor, ...]:
        loaded = torch.zeros_like(out)
        for block, first, last, at in pieces.tolist():
            record = cache[block, first:last]
            values = record[:, :HEAD].view(torch.float8_e4m3fn).to(torch.float32)
            scale = torch.exp2(record[:, HEAD:].to(torch.float32) - 127.0)
            values = (values.unflatten(1, (*scale.shape[1:], -1)) * scale[..., None]).flatten(1)
            loaded[at : at + last - first] = values.to(BF16)
        return (loaded,)

    return Case(ours, plain, nbytes(cache, out, pieces))


def load_kv_index(rows: int, sizes: Sizes) -> Case:
    """Ring slots of the window of every row."""
    draw = Draw(9)
    ranges = torch.stack((draw.ints(0, 64 * RING, rows), draw.ints(1, WINDOW + 1, rows)), 1)
    out = torch.zeros(rows, WINDOW, dtype=INT32)
    kernel = ops.load_kv_index_tl(WINDOW, RING, False)

    def ours() -> tuple[Tensor, ...]:
        kernel(ranges, out, None)
        return (out,)

    def plain() -> tuple[Tensor, ...]:
        offset, length = ranges[:, :1], ranges[:, 1:]
        column = torch.arange(WINDOW, dtype=INT32)
        index = offset // RING * RING + (offset + column) % RING
        return (torch.where(column < length, index, -1),)

    return Case(ours, plain, nbytes(ranges, out))


def convert_kv_index(rows: int, sizes: Sizes) -> Case:
    """Chosen keys to cache rows; both include a copy of the choice."""
    draw = Draw(10)
    chosen = draw.ints(0, sizes.context, rows, 1, sizes.topk)
    lengths = draw.ints(1, 2 * sizes.topk, rows, 1)
    tables = draw.ints(0, 1 << 20, rows, sizes.pages)
    out = torch.zeros_like(chosen)
    kernel = ops.convert_kv_index_tl(1, sizes.topk, sizes.pages, PAGE)

    def ours() -> tuple[Tensor, ...]:
        out.copy_(chosen)
        kernel(out, lengths, tables)
        return (out,)

    def plain() -> tuple[Tensor, ...]:
        tokens = chosen.clone()[:, 0]
        entry = tables.gather(1, (tokens // PAGE).to(torch.int64))
        inside = torch.arange(sizes.topk, dtype=INT32) < lengths
        return (torch.where(inside, entry * PAGE + tokens % PAGE, -1)[:, None],)

    return Case(ours, plain, 5 * nbytes(chosen) + nbytes(lengths))


def expand_swa_index(rows: int, sizes: Sizes) -> Case:
    """Two ranges of keys per row."""
    draw = Draw(11)
    starts, lengths = draw.ints(0, 10000, rows, 2), draw.ints(0, WINDOW + 1, rows, 2)
    pivots = torch.stack((starts, lengths), 2).flatten(1)
    width = 2 * WINDOW
    out = torch.zeros(rows, width, dtype=INT32)
    kernel = ops.expand_swa_index_tl(width)

    def ours() -> tuple[Tensor, ...]:
        kernel(pivots, out)
        return (out,)

    def plain() -> tuple[Tensor, ...]:
        offset, length, second, more = pivots[:, :, None].unbind(1)
        column = torch.arange(width, dtype=INT32)
        behind = torch.where(column < length + more, second + column - length, -1)
        return (torch.where(column < length, offset + column, behind),)

    return Case(ours, plain, nbytes(pivots, out))


def kv_index_cat(rows: int, sizes: Sizes) -> Case:
    """Window rows beside compressed ones."""
    draw = Draw(12)
    window = draw.ints(-1, 1000, rows, WINDOW)
    entries = draw.ints(-1, 1000, rows, sizes.topk)
    out = torch.zeros(rows, WINDOW + sizes.topk, dtype=INT32)
    left, right = out.split((WINDOW, sizes.topk), 1)
    kernel = ops.kv_index_cat_tl("int32", WINDOW, sizes.topk, out.shape[1])

    def ours() -> tuple[Tensor, ...]:
        kernel(window, entries, left, right, 5000, 300)
        return (out,)

    def plain() -> tuple[Tensor, ...]:
        return (torch.cat((window, torch.where(entries == -1, -1, entries + 5300)), 1),)

    return Case(ours, plain, nbytes(window, entries, out))


def _state_copy(rows: int, *, to_cache: bool) -> Case:
    """As many positions as rows, between the ring of a request and that of the cache."""
    draw = Draw(13)
    size, end = max(rows, PAGE), 3 * max(rows, PAGE) + 5
    own = draw.ints(0, 256, STATE_LAYERS, rows, RECORD, dtype=torch.uint8)
    kept = draw.ints(0, 256, STATE_LAYERS, size, RECORD, dtype=torch.uint8)
    pairs = [(own.clone(), kept.clone()) for _ in range(2)]
    factory = ops.load_state_to_cache_tl if to_cache else ops.select_state_slice_tl
    kernel = factory(size, rows, STATE_LAYERS, RECORD)

    def ours() -> tuple[Tensor, ...]:
        kernel(*pairs[0], end)
        return pairs[0]

    def plain() -> tuple[Tensor, ...]:
        ring, cache = pairs[1]
        position = torch.arange(end - ring.shape[1], end)
        here, there = position % ring.shape[1], position % cache.shape[1]
        if to_cache:
            cache[:, there] = ring[:, here]
        else:
            ring[:, here] = cache[:, there]
        return ring, cache

    return Case(ours, plain, 2 * nbytes(own), in_place=2, note=f"{STATE_LAYERS} layers")


def load_state_to_cache(rows: int, sizes: Sizes) -> Case:
    """Recent keys of a request into the cache."""
    return _state_copy(rows, to_cache=True)


def select_state_slice(rows: int, sizes: Sizes) -> Case:
    """Recent keys out of the cache."""
    return _state_copy(rows, to_cache=False)

"""Cases of the operators on rows of channels, logits and pixels."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.operator_cases import (
    BF16,
    HEAD,
    INT32,
    PAGE,
    RECORD,
    ROPE,
    Case,
    Draw,
    Layout,
    Sizes,
    nbytes,
    quantized,
)
from deepinfer_neuron.compat import tilelang_ops as ops
from deepinfer_neuron.ops.philox import draw_words

EPS = 1e-20
PATCH = 14
RATIO = 3
VISION = 1024
TOP_P = 0.95
_IMAGE = 7

_WINDOW_KEY: dict[str, Any] = {
    "do_norm": True,
    "norm_eps": EPS,
    "do_rope": True,
    "rotary_dim": ROPE,
    "rope_offset": HEAD - ROPE,
    "positions_dtype": "int32",
    "is_neox": False,
    "conjugate": False,
    "do_hadamard": False,
    "hadamard_scale": 1.0,
    "cast_fmt": "e4m3",
    "num_per_channels": 32,
    "round_sf": True,
    "sf_format": "ue8m0",
    "return_bf16": False,
    "bf16_stage": "transform",
    "return_quant": False,
}


def norm(rows: int, sizes: Sizes) -> Case:
    """Norm of the sum with a residual."""
    draw = Draw(51)
    x, residual = (draw.normal(1, rows, sizes.hidden, dtype=BF16) for _ in range(2))
    weight = draw.normal(sizes.hidden, dtype=BF16)
    y, total = torch.zeros_like(x), torch.zeros_like(x)
    kernel = ops.norm_tl(sizes.hidden, "bfloat16", "bfloat16", has_residual=True, eps=EPS)

    def ours() -> tuple[Tensor, ...]:
        kernel(x, y, weight, residual, total, y, y, y)
        return y, total

    def plain() -> tuple[Tensor, ...]:
        summed = x + residual
        return _plain_norm(summed, weight), summed

    return Case(ours, plain, nbytes(x, residual, weight, y, total), close=2**-8)


def _plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return (wide * scale * weight.to(torch.float32)).to(BF16)


def fused_norm_rope_hadamard_cast_store_kvcache(rows: int, sizes: Sizes) -> Case:
    """A window key: norm, rotation of the last channels, cast, store."""
    draw = Draw(52)
    x, weight = draw.normal(rows, 1, HEAD, dtype=BF16), draw.normal(HEAD, dtype=BF16)
    position = draw.ints(0, 1000, rows)
    angle = torch.arange(1000)[:, None] * torch.pow(1e4, -torch.arange(0, ROPE, 2) / ROPE)
    turns = torch.cat((angle.cos(), angle.sin()), 1)
    blocks = 2 * -(-rows // PAGE)
    caches = [torch.zeros(blocks, PAGE, RECORD, dtype=torch.uint8) for _ in range(2)]
    slots = draw.distinct(blocks * PAGE, rows)
    kernel = ops.fused_norm_rope_hadamard_cast_store_kvcache_tl(
        1, HEAD, cache_layout=Layout(), block_size=PAGE, small_batch=rows < 64, **_WINDOW_KEY
    )

    def ours() -> tuple[Tensor, ...]:
        kernel(x, weight, position, turns, None, None, None, None, caches[0], slots)
        return (caches[0],)

    def plain() -> tuple[Tensor, ...]:
        y = _plain_norm(x[:, 0], weight)
        cos, sin = turns[position].chunk(2, 1)
        even, odd = y[:, -ROPE::2].to(torch.float32), y[:, -ROPE + 1 :: 2].to(torch.float32)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), 2).flatten(1)
        y = torch.cat((y[:, :-ROPE], turned.to(BF16)), 1)
        kept = slots >= 0
        caches[1].view(-1, RECORD)[slots[kept]] = torch.cat(quantized(y[kept]), 1)
        return (caches[1],)

    moved = nbytes(x, weight, position, slots) + rows * (4 * ROPE + RECORD)
    return Case(ours, plain, moved, in_place=1, differing=1e-3)


def _logits(draw: Draw, rows: int, sizes: Sizes) -> tuple[Tensor, str]:
    """Logits about as uneven as those of a model, and what to say about their size."""
    vocab, note = sizes.vocab_of(rows)
    return draw.normal(rows, vocab) * 6.0, note


def _plain_draw(probabilities: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Integer weights in the order of the slots, and a search in their sums."""
    vocab = probabilities.shape[1]
    slots = 4096 if vocab >= 8192 else min(max(64, 1 << (vocab - 1).bit_length()), 2048)
    weights = (probabilities * 2.0**31).to(torch.int64).clamp(max=2**31 - 1)
    token = torch.arange(-(-vocab // slots) * slots).view(-1, slots).t().flatten()
    token = token[token < vocab]
    sums = weights[:, token].cumsum(1)
    words = draw_words(seeds.view(torch.int64), positions).tolist()
    targets = [
        (word[1] << 32 | word[0]) % total
        for word, total in zip(words, sums[:, -1].tolist(), strict=True)
    ]
    return token[torch.searchsorted(sums, torch.tensor(targets)[:, None], right=True)[:, 0]]


def _kept(logprobs: Tensor, tokens: Tensor) -> Tensor:
    """Whether tokens have a probability."""
    return logprobs.gather(1, tokens[:, None].to(torch.int64))[:, 0] > -math.inf


def random_sampling(rows: int, sizes: Sizes) -> Case:
    """A fresh token per row."""
    draw = Draw(53)
    logits, note = _logits(draw, rows, sizes)
    probabilities = torch.softmax(logits, 1)
    seeds, positions = draw.ints(0, 1 << 30, rows).to(torch.uint64), draw.ints(0, 1000, rows)
    out = torch.zeros(rows, dtype=INT32)
    kernel = ops.random_sampling_tl(probabilities.shape[1], False)

    def ours() -> tuple[Tensor, ...]:
        kernel(probabilities, seeds, positions, out)
        return (out,)

    def plain() -> tuple[Tensor, ...]:
        return (_plain_draw(probabilities, seeds, positions),)

    return Case(ours, plain, nbytes(probabilities, seeds, positions, out), note=note)


def sum_smaller_probs(rows: int, sizes: Sizes) -> Case:
    """Mass of the tokens that are at most as likely as the sampled one."""
    draw = Draw(54)
    logits, note = _logits(draw, rows, sizes)
    logprobs = torch.log_softmax(logits, 1)
    tokens = torch.where(draw.flags(rows), logprobs.argmax(1), draw.ints(0, logits.shape[1], rows))
    tokens, out = tokens.to(INT32), torch.zeros(rows)
    kernel = ops.sum_smaller_probs_tl(logits.shape[1])

    def ours() -> tuple[Tensor, ...]:
        kernel(logprobs, tokens, out)
        return (out,)

    def plain() -> tuple[Tensor, ...]:
        column = tokens.to(torch.int64)[:, None]
        own = logprobs.gather(1, column)
        tied = (logprobs == own) & (torch.arange(logprobs.shape[1]) <= column)
        return (torch.where((logprobs < own) | tied, logprobs.exp(), 0.0).sum(1),)

    return Case(ours, plain, nbytes(logprobs, tokens, out), close=1e-5, note=note)


def fused_sample(rows: int, sizes: Sizes) -> Case:
    """Temperature and top-p, then a draw; no drafts.

    A draw depends on the last bit of every probability, so what is compared is only whether the
    drawn tokens are among those kept; equal probabilities give equal draws in ``random_sampling``.
    A token more or less at the bound of top-p moves the others by its small share.
    """
    draw = Draw(55)
    logits, note = _logits(draw, rows, sizes)
    temperatures, top_p = 0.5 + draw.uniform(rows), torch.full((rows,), TOP_P)
    top_k, positions = torch.full((rows,), -1, dtype=INT32), draw.ints(0, 1000, rows)
    seeds, none = draw.ints(0, 1 << 30, rows).to(torch.uint64), torch.zeros(rows)
    logprobs, out = torch.zeros_like(logits), torch.zeros(rows, dtype=INT32)
    kernel = ops.fused_sample_tl(logits.shape[1], True, False)
    settings = (temperatures, top_p, top_k, positions, seeds)
    unused = (none, None, none, none, none, none, 0, none)

    def ours() -> tuple[Tensor, ...]:
        kernel(logits, *settings, none, logprobs, out, *unused)
        return logprobs, _kept(logprobs, out)

    def plain() -> tuple[Tensor, ...]:
        everything = torch.log_softmax(logits / temperatures[:, None], 1)
        _, ids = torch.sort(logits, dim=1, descending=True, stable=True)
        ranked = everything.gather(1, ids)
        masses = ranked.to(torch.float64).exp()
        kept = masses.cumsum(1) - masses <= top_p[:, None]
        ranked = torch.where(kept, ranked, -math.inf)
        ranked = ranked - torch.logsumexp(ranked, 1, keepdim=True)
        result = torch.full_like(logits, -math.inf).scatter(1, ids, ranked)
        return result, _kept(result, _plain_draw(result.exp(), seeds, positions))

    moved = nbytes(logits, *settings, logprobs, out)
    return Case(ours, plain, moved, close=3e-4, differing=1e-5, note=note)


def apply_token_bitmask_by_step_inplace(rows: int, sizes: Sizes) -> Case:
    """Half of the tokens of every row."""
    draw = Draw(56)
    start, note = _logits(draw, rows, sizes)
    vocab = start.shape[1]
    logits = [start.clone(), start.clone()]
    bits = draw.ints(-(1 << 31), 1 << 31, rows, -(-vocab // 32), dtype=torch.int64).to(INT32)
    requests = draw.distinct(rows, rows)
    kernel = ops.apply_token_bitmask_by_step_inplace_tl(vocab, False)

    def ours() -> tuple[Tensor, ...]:
        kernel(logits[0], bits, requests, None, 0)
        return (logits[0],)

    def plain() -> tuple[Tensor, ...]:
        allowed = (bits[requests][:, :, None] >> torch.arange(32, dtype=INT32)) & 1
        forbidden = allowed.flatten(1)[:, :vocab] == 0
        logits[1][requests] = logits[1][requests].masked_fill_(forbidden, -math.inf)
        return (logits[1],)

    return Case(ours, plain, 2 * nbytes(start) + nbytes(bits, requests), in_place=1, note=note)


def _grid(count: int) -> tuple[int, int]:
    """Width and height of so many squares, as close to each other as possible."""
    height = next(h for h in range(math.isqrt(count), 0, -1) if count % h == 0)
    return count // height, height


def rgb_pad_to_patches(rows: int, sizes: Sizes) -> Case:
    """One image with a small margin; as many patches as rows."""
    draw = Draw(57)
    columns, lines = _grid(rows)
    width, height = columns * PATCH - 3, lines * PATCH - 6
    raw = draw.ints(0, 256, height * width * 3, dtype=torch.uint8)
    starts, ends = torch.tensor([0, raw.shape[0]]), torch.tensor([0, rows], dtype=INT32)
    size = torch.tensor([[width, height]], dtype=INT32)
    grid = torch.tensor([[columns, lines]], dtype=INT32)
    out, buffer = (torch.zeros(rows, 3, PATCH, PATCH, dtype=BF16) for _ in range(2))
    kernel = ops.rgb_pad_to_patches_tl(PATCH)

    def ours() -> tuple[Tensor, ...]:
        kernel(raw, starts, size, grid, ends, 0.5, 0.5, 127.0, out)
        return (out,)

    def plain() -> tuple[Tensor, ...]:
        images = zip(starts.tolist(), size.tolist(), grid.tolist(), ends.tolist(), strict=False)
        for byte, (w, h), (across, down), first in images:
            page = torch.full((down * PATCH, across * PATCH, 3), 127, dtype=torch.uint8)
            left, top = round((across * PATCH - w) / 2), round((down * PATCH - h) / 2)
            pixels = raw[byte : byte + h * w * 3].view(h, w, 3)
            page[top : top + h, left : left + w] = pixels
            values = ((page.to(torch.float32) / 255.0 - 0.5) / 0.5).to(BF16)
            patches = values.view(down, PATCH, across, PATCH, 3).permute(0, 2, 4, 1, 3)
            target = buffer[first : first + down * across]
            target.unflatten(0, (down, across)).copy_(patches)
        return (buffer,)

    return Case(ours, plain, nbytes(raw, out), in_place=1, close=2**-8)


def replace_input_embeds(rows: int, sizes: Sizes) -> Case:
    """Half of the tokens belong to images, a few are padding."""
    draw = Draw(58)
    ids = torch.where(draw.flags(rows), _IMAGE, draw.ints(0, 6, rows)).to(INT32)
    ordinal = (ids == _IMAGE).cumsum(0).to(INT32)
    start = draw.normal(rows, sizes.hidden, dtype=BF16)
    embeds = [start.clone(), start.clone()]
    images = draw.normal(int(ordinal[-1]), sizes.hidden, dtype=BF16)
    pad_ids, pads = torch.tensor([2, 4], dtype=INT32), draw.normal(2, sizes.hidden, dtype=BF16)
    kernel = ops.replace_input_embeds_tl(sizes.hidden)

    def ours() -> tuple[Tensor, ...]:
        kernel(embeds[0], ids, images, _IMAGE, ordinal, pad_ids, pads)
        return (embeds[0],)

    def plain() -> tuple[Tensor, ...]:
        for number, row in enumerate(pads):
            embeds[1][ids == pad_ids[number]] = row
        rows_of_images = ids == _IMAGE
        embeds[1][rows_of_images] = images[ordinal[rows_of_images] - 1]
        return (embeds[1],)

    padded = int((ids == 2).sum() + (ids == 4).sum()) * 2 * sizes.hidden
    moved = 2 * nbytes(images) + padded + nbytes(ids, ordinal, pads)
    return Case(ours, plain, moved, in_place=1)


def batch_downsample(rows: int, sizes: Sizes) -> Case:
    """Means of squares of nine patches of one image; as many squares as rows."""
    draw = Draw(59)
    columns, lines = _grid(rows)
    features = draw.normal(rows * RATIO**2, VISION, dtype=BF16)
    image, grid = torch.zeros(rows, dtype=torch.int64), torch.tensor([[columns, lines]]) * RATIO
    ends = [torch.tensor([0, rows]), torch.tensor([0, features.shape[0]])]
    out, buffer = (torch.zeros(rows, VISION, dtype=BF16) for _ in range(2))
    kernel = ops.batch_downsample_tl(RATIO, VISION, True, BF16)

    def ours() -> tuple[Tensor, ...]:
        kernel(features, image, grid, *ends, None, out)
        return (out,)

    def plain() -> tuple[Tensor, ...]:
        merged, patch = (table.tolist() for table in ends)
        for number, (width, height) in enumerate(grid.tolist()):
            patches = features[patch[number] : patch[number + 1]].to(torch.float32)
            channels = patches.unflatten(0, (height, width)).permute(2, 0, 1)
            squares = F.avg_pool2d(
                channels[None], RATIO, ceil_mode=True, count_include_pad=False
            ).permute(0, 2, 3, 1)
            buffer[merged[number] : merged[number + 1]] = squares.flatten(0, 2)
        return (buffer,)

    return Case(ours, plain, nbytes(features, image, out), in_place=1, close=2**-8)

"""Image operators against loops over pixels and patches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_neuron.compat.tilelang_ops import (
    batch_downsample_tl,
    replace_input_embeds_tl,
    rgb_pad_to_patches_tl,
)
from deepinfer_neuron.errors import ConfigError
from tests.compat.guards import Guarded, guarded_rows, integers
from tests.ops.number_formats import bf16, normal, random_bytes, same_bits

BF16, I32 = torch.bfloat16, torch.int32


def starts(counts: list[int], dtype: torch.dtype) -> Tensor:
    return torch.tensor([sum(counts[:n]) for n in range(len(counts) + 1)], dtype=dtype)


IMAGES = [
    ((12, 8), (3, 2)),
    ((9, 7), (3, 2)),
    ((10, 5), (3, 2)),
    ((11, 8), (3, 3)),
    ((1, 1), (1, 1)),
    ((3, 20), (1, 5)),
    ((7, 4), (4, 4)),
]
"""Pixels and patches (width, height) with patches of four pixels: all four parities of margins."""


@pytest.mark.parametrize("images", [IMAGES, IMAGES[1:2], [((0, 0), (0, 0)), *IMAGES[2:4]], []])
@pytest.mark.parametrize("pad", [127.0, 0.9])
def test_patches(images: list[tuple[tuple[int, int], tuple[int, int]]], pad: float) -> None:
    size, mean, std = 4, 0.48, 0.27
    total = sum(w * h for _, (w, h) in images)
    raw = random_bytes((sum(3 * w * h for (w, h), _ in images),), 1)
    expected = np.zeros((total, 3, size, size), dtype=np.float32)
    patch = first = 0
    for (width, height), (across, down) in images:
        canvas = np.full((down * size, across * size, 3), int(pad), dtype=np.uint8)
        left, top = round((across * size - width) / 2), round((down * size - height) / 2)
        pixels = raw[first : first + 3 * width * height].view(height, width, 3).numpy()
        canvas[top : top + height, left : left + width] = pixels
        first += 3 * width * height
        for y in range(down):
            for x in range(across):
                part = canvas[y * size : (y + 1) * size, x * size : (x + 1) * size]
                value = part.transpose(2, 0, 1).astype(np.float32) / np.float32(255)
                expected[patch] = (value - np.float32(mean)) / np.float32(std)
                patch += 1
    out = Guarded(expected.shape, (3 * size * size + 8, size * size, size, 1), BF16, 8)
    rgb_pad_to_patches_tl(size)(
        raw,
        starts([3 * w * h for (w, h), _ in images], torch.int64),
        torch.tensor([real for real, _ in images], dtype=I32).view(-1, 2),
        torch.tensor([grid for _, grid in images], dtype=I32).view(-1, 2),
        starts([w * h for _, (w, h) in images], I32),
        mean,
        std,
        pad,
        out.view,
    )
    assert same_bits(out.view, torch.from_numpy(bf16(expected)).to(BF16))
    assert out.intact()


def test_patches_in_several_parts() -> None:
    """More patches than are made at once, without padding."""
    across, down, size = 60, 40, 14
    raw = random_bytes((down * size, across * size, 3), 2)
    out = torch.empty(across * down, 3, size, size, dtype=BF16)
    rgb_pad_to_patches_tl(size)(
        raw.flatten(),
        torch.tensor([0, raw.numel()]),
        torch.tensor([[across * size, down * size]], dtype=I32),
        torch.tensor([[across, down]], dtype=I32),
        torch.tensor([0, across * down], dtype=I32),
        0.0,
        1.0,
        0.0,
        out,
    )
    tiles = raw.view(down, size, across, size, 3).permute(0, 2, 4, 1, 3).reshape(out.shape)
    top = torch.full_like(tiles, 255, dtype=torch.float32)
    assert same_bits(out, (tiles.float() / top).to(BF16))


@pytest.mark.parametrize("tokens", [0, 1, 200])
@pytest.mark.parametrize("pads", [0, 1, 8])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_embeddings(tokens: int, pads: int, share: float) -> None:
    """Image rows in order, padding rows by id, other rows untouched."""
    image, hidden = 99, 24
    ids = integers((tokens,), 0, 2 * pads + 3, 1)
    ids[torch.rand(tokens, generator=torch.Generator().manual_seed(2)) < share] = image
    offset = (ids == image).cumsum(0).to(I32)
    images, pad_embeds = (
        normal((max(1, int((ids == image).sum())), hidden), 3),
        normal((pads, hidden), 4),
    )
    pad_ids = torch.arange(1, pads + 1, dtype=I32) * 2
    embeds = guarded_rows(tokens, hidden, BF16)
    embeds.view.copy_(normal((tokens, hidden), 5))
    expected, seen = embeds.view.clone(), 0
    for row, token in enumerate(ids.tolist()):
        if token == image:
            expected[row] = images[seen]
            seen += 1
        elif token in pad_ids.tolist():
            expected[row] = pad_embeds[pad_ids.tolist().index(token)]
    replace_input_embeds_tl(hidden)(embeds.view, ids, images, image, offset, pad_ids, pad_embeds)
    assert same_bits(embeds.view, expected)
    assert embeds.intact()


CROPS = [[6, 9], [7, 5], [0, 0], [1, 1], [3, 3], [2, 10]]


def squares(crops: list[list[int]], ratio: int) -> list[tuple[int, list[list[int]]]]:
    """(image, rows of cell numbers, -1 outside) of every square."""
    out, first = [], 0
    for image, (width, height) in enumerate(crops):
        for top in range(0, height, ratio):
            for left in range(0, width, ratio):
                cells = [
                    [
                        first + y * width + x if y < height and x < width else -1
                        for x in range(left, left + ratio)
                    ]
                    for y in range(top, top + ratio)
                ]
                out.append((image, cells))
        first += width * height
    return out


@pytest.mark.parametrize("crops", [CROPS, CROPS[2:3], [[54, 54]]])
@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_downsampling(crops: list[list[int]], ratio: int, dtype: torch.dtype) -> None:
    """Squares cut by the border, empty images; both the concatenation and the mean."""
    dim, expected = 20, squares(crops, ratio)
    counts = [w * h for w, h in crops]
    merged = [-(-w // ratio) * -(-h // ratio) for w, h in crops]
    features = normal((sum(counts), dim), 1, dtype)
    arguments = (
        features,
        torch.tensor([image for image, _ in expected], dtype=torch.int64),
        torch.tensor(crops),
        starts(merged, torch.int64),
        starts(counts, torch.int64),
    )
    concat = torch.full((len(expected), dim, ratio, ratio), 7, dtype=dtype)
    batch_downsample_tl(ratio, dim, False, dtype)(*arguments, concat, None)
    pooled = guarded_rows(len(expected), dim, dtype)
    batch_downsample_tl(ratio, dim, True, dtype)(*arguments, None, pooled.view)
    for row, (_, cells) in enumerate(expected):
        plain = torch.zeros(dim, ratio, ratio, dtype=dtype)
        for y, line in enumerate(cells):
            for x, cell in enumerate(line):
                if cell >= 0:
                    plain[:, y, x] = features[cell]
        assert same_bits(concat[row], plain)
        valid = [cell for line in cells for cell in line if cell >= 0]
        mean = features[valid].double().mean(0)
        tolerance = 1e-6 if dtype == torch.float32 else 2.0**-8
        assert ((pooled.view[row].double() - mean).abs() <= mean.abs() * tolerance + 1e-6).all()
    assert pooled.intact()


def test_downsampling_in_several_parts() -> None:
    """More squares than are merged at once: a square of one patch is that patch."""
    features = normal((3000, 512), 1)
    image = torch.zeros(3000, dtype=torch.int64)
    ends = torch.tensor([0, 3000])
    out = torch.empty_like(features)
    batch_downsample_tl(1, 512, True, BF16)(
        features, image, torch.tensor([[60, 50]]), ends, ends, None, out
    )
    assert same_bits(out, features)


def test_bad_static_arguments() -> None:
    for call in (
        lambda: rgb_pad_to_patches_tl(0),
        lambda: replace_input_embeds_tl(0),
        lambda: batch_downsample_tl(0, 4, True, BF16),
        lambda: batch_downsample_tl(3, 0, True, BF16),
    ):
        with pytest.raises(ConfigError):
            call()

"""Images to patches, patches to fewer patches, and their place among the tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_neuron.ops.gather import gather_rows


@dataclass(frozen=True)
class RawImages:
    """RGB images as bytes, rows of pixels of three channels, each to be centred in its grid.

    Attributes:
        raw: uint8 ``[bytes]``.
        starts: int64 ``[n + 1]`` first byte of every image.
        sizes: int32 ``[n, 2]`` width and height in pixels.
        grids: int32 ``[n, 2]`` width and height in patches.
        patch_starts: int32 ``[n + 1]`` first patch of every image.
    """

    raw: Tensor
    starts: Tensor
    sizes: Tensor
    grids: Tensor
    patch_starts: Tensor


def pixel_values(mean: float, std: float) -> Tensor:
    """bf16 ``[256]``: ``(v / 255 - mean) / std`` in three fp32 operations, then one rounding."""
    value = torch.arange(256, dtype=torch.float32)
    # Tensors on both sides: a division by a number may become a product.
    scaled = value / torch.full_like(value, 255.0) - torch.full_like(value, mean)
    return (scaled / torch.full_like(value, std)).to(torch.bfloat16)


def image_patches(images: RawImages, patch: Tensor, size: int, values: Tensor, pad: int) -> Tensor:
    """Patches of padded images.

    An image lies in its grid with ``round((grid - size) / 2)`` pixels before it, halves to even;
    around it is the byte ``pad``.

    Args:
        images: the images; at least one.
        patch: int64 ``[P]`` patch numbers: images in order, then rows, then columns.
        size: side of a patch in pixels.
        values: ``[256]`` value of every byte.
        pad: byte around the images.

    Returns:
        ``[P, 3, size, size]`` in the dtype of ``values``.
    """
    image = torch.searchsorted(images.patch_starts[1:].to(torch.int64), patch, right=True)
    image = image.clamp(max=images.sizes.shape[0] - 1)
    sizes, grids = images.sizes.to(torch.int64), images.grids.to(torch.int64)
    margin = _half_to_even(grids * size - sizes)[image]
    wide = grids[image, 0].clamp(min=1)
    place = patch - images.patch_starts[image]
    step = torch.arange(size, device=patch.device)
    x = (place.remainder(wide) * size - margin[:, 0])[:, None] + step
    y = (place.div(wide, rounding_mode="floor") * size - margin[:, 1])[:, None] + step
    width, height = sizes[image, 0, None], sizes[image, 1, None]
    inside = ((y >= 0) & (y < height))[:, :, None] & ((x >= 0) & (x < width))[:, None, :]
    first = images.starts[image, None] + y * width * 3
    at = (first[:, :, None] + x[:, None, :] * 3).masked_fill_(~inside, 0)
    channel = torch.arange(3, device=patch.device)[:, None, None]
    at, inside = at[:, None] + channel, inside[:, None].expand(-1, 3, -1, -1)
    if images.raw.shape[0] < 3:
        return values[pad].expand(at.shape).clone()
    byte = images.raw.index_select(0, at.flatten()).view(at.shape)
    byte = byte.masked_fill_(~inside, pad)
    return values.index_select(0, byte.flatten().to(torch.int32)).view(at.shape)


def _half_to_even(x: Tensor) -> Tensor:
    """``x / 2`` rounded to the nearest integer, halves to even; int64."""
    low = x.div(2, rounding_mode="floor")
    return low + (x.remainder(2) & low.remainder(2))


def place_embeddings(
    embeddings: Tensor,
    ids: Tensor,
    images: Tensor,
    image_id: int,
    ordinal: Tensor,
    pad_ids: Tensor,
    pads: Tensor,
) -> None:
    """Write image and padding embeddings over those of their tokens, in place.

    Args:
        embeddings: ``[T, H]``.
        ids: int32 ``[T]``.
        images: ``[I, H]``, one row per image token, in order.
        image_id: id of an image token.
        ordinal: int32 ``[T]``: image tokens up to and including this one.
        pad_ids: int32 ``[p]``, few.
        pads: ``[p, H]``, row ``j`` for id ``pad_ids[j]``; of equal ids the first counts.
    """
    for number in range(pad_ids.shape[0] - 1, -1, -1):
        rows = (ids == pad_ids[number]).nonzero()[:, 0]
        embeddings[rows] = pads[number]
    rows = (ids == image_id).nonzero()[:, 0]
    embeddings[rows] = images.index_select(0, ordinal[rows] - 1)


@dataclass(frozen=True)
class PatchGrids:
    """Patches of images before and after merging squares of ``ratio`` by ``ratio``.

    Attributes:
        grids: int64 ``[n, 2]`` width and height in patches.
        starts: int64 ``[n + 1]`` first patch of every image.
        merged_starts: int64 ``[n + 1]`` first merged patch of every image.
        ratio: side of a square.
    """

    grids: Tensor
    starts: Tensor
    merged_starts: Tensor
    ratio: int


def square_cells(grids: PatchGrids, image: Tensor, merged: Tensor) -> Tensor:
    """Patches of merged squares, row by row.

    Args:
        grids: the images.
        image: int64 ``[N]`` image of each square.
        merged: int64 ``[N]`` number of each square among all.

    Returns:
        int64 ``[N, ratio * ratio]``, -1 outside the image.
    """
    width, height = grids.grids[image].unbind(1)
    across = (width + (grids.ratio - 1)).div(grids.ratio, rounding_mode="floor").clamp(min=1)
    place = merged - grids.merged_starts[image]
    step = torch.arange(grids.ratio, device=image.device)
    row = (place.div(across, rounding_mode="floor") * grids.ratio)[:, None] + step
    column = (place.remainder(across) * grids.ratio)[:, None] + step
    inside = (row < height[:, None])[:, :, None] & (column < width[:, None])[:, None, :]
    cell = (grids.starts[image, None] + row * width[:, None])[:, :, None] + column[:, None, :]
    return cell.masked_fill_(~inside, -1).flatten(1)


def concatenate_cells(features: Tensor, cells: Tensor) -> Tensor:
    """Features of squares, channel first: ``[P, C]`` and ``[N, m]`` to ``[N, C, m]``."""
    return gather_rows(features, cells).mT


def pool_cells(features: Tensor, cells: Tensor) -> Tensor:
    """Mean over the cells inside the image: fp32 sum times ``fp32(1 / count)``, rounded once.

    Args:
        features: ``[P, C]``.
        cells: int64 ``[N, m]``, -1 for none.

    Returns:
        ``[N, C]``, dtype of the features; zero without cells.
    """
    total = torch.zeros(cells.shape[0], features.shape[1], device=features.device)
    for column in cells.unbind(1):
        total += gather_rows(features, column)
    count = (cells >= 0).sum(1).clamp(min=1).to(torch.float32)
    return total.mul_(count.reciprocal()[:, None]).to(features.dtype)

"""Images to patches, patches to fewer patches, and their place among the tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_neuron.ops.gather import gather_rows

_WORKSPACE_ELEMENTS = 1 << 19
"""Elements of patches made at once, so that intermediates stay in cache."""


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


def write_patches(out: Tensor, images: RawImages, size: int, values: Tensor, pad: int) -> None:
    """Cut padded images into patches, in place.

    An image lies in its grid with ``round((grid - size) / 2)`` pixels before it, halves to even;
    around it is the byte ``pad``.

    Args:
        out: ``[P, 3, size, size]``, dtype of ``values``: images in order, then rows, then columns.
        images: the images.
        size: side of a patch in pixels.
        values: ``[256]`` value of every byte.
        pad: byte around the images.
    """
    if images.sizes.shape[0] == 0:
        return
    # With padding on both sides, every row of a patch that holds a pixel is a slice of the bytes.
    framed = F.pad(images.raw, (3 * size, 3 * size), value=pad)
    rows, table = framed.unfold(0, 3 * size, 1), _image_table(images, size)
    ends = images.patch_starts[1:].to(torch.int64)
    step = max(1, _WORKSPACE_ELEMENTS // (3 * size * size))
    for start in range(0, out.shape[0], step):
        part = out[start : start + step]
        patch = torch.arange(start, start + part.shape[0], device=out.device)
        image = torch.searchsorted(ends, patch, right=True).clamp_(max=ends.shape[0] - 1)
        pixels = _patch_bytes(rows, table.index_select(0, image), patch, size, pad)
        picked = values.index_select(0, pixels.flatten().to(torch.int32))
        part.copy_(picked.view(-1, size, size, 3).permute(0, 3, 1, 2))


def _image_table(images: RawImages, size: int) -> Tensor:
    """int64 ``[n, 8]``: left and top margin, width, height, bytes per row of pixels, patches per
    row, place of the first byte behind the padding, first patch."""
    sizes, grids = images.sizes.to(torch.int64), images.grids.to(torch.int64)
    margins = _half_to_even(grids * size - sizes)
    first = (images.starts[:-1, None] + 3 * size, images.patch_starts[:-1, None])
    return torch.cat((margins, sizes, 3 * sizes[:, :1], grids[:, :1].clamp(min=1), *first), 1)


def _patch_bytes(rows: Tensor, table: Tensor, patch: Tensor, size: int, pad: int) -> Tensor:
    """Bytes of patches, channel last.

    Args:
        rows: uint8 ``[bytes + 3 * size + 1, 3 * size]``, what begins ``3 * size`` before each byte.
        table: int64 ``[P, 8]``, row of :func:`_image_table` of each patch.
        patch: int64 ``[P]``, their numbers.
        size: side of a patch.
        pad: byte around the images.

    Returns:
        uint8 ``[P, size, 3 * size]``.
    """
    margins, sizes, stride, across, byte, first = table.split((2, 2, 1, 1, 1, 1), 1)
    place = patch[:, None] - first
    patches = (place.remainder(across), place.div(across, rounding_mode="floor"))
    corner = torch.cat(patches, 1) * size - margins
    pixel = corner[:, :, None] + torch.arange(size, device=patch.device)
    inside = (pixel >= 0) & (pixel < sizes[:, :, None])
    at = byte + 3 * corner[:, :1] + pixel[:, 1] * stride
    # The first row is all padding. Rows that lie outside altogether hold no pixel either.
    at = at.clamp_(0, rows.shape[0] - 1).where(inside[:, 1], 0)
    # Bits, because masked copies of bytes are several times slower.
    kept = inside[:, :1].repeat_interleave(3, 2).to(torch.uint8) * 255
    pixels = rows.index_select(0, at.flatten()).view(-1, size, 3 * size)
    return pixels.bitwise_and_(kept).bitwise_or_((255 - kept) & pad)


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
    size = grids.grids.index_select(0, image)
    width = size[:, :1]
    across = (width + (grids.ratio - 1)).div(grids.ratio, rounding_mode="floor").clamp(min=1)
    place = (merged - grids.merged_starts.index_select(0, image))[:, None]
    corner = torch.cat((place.remainder(across), place.div(across, rounding_mode="floor")), 1)
    patch = (corner * grids.ratio)[:, :, None] + torch.arange(grids.ratio, device=image.device)
    column, row = patch.unbind(1)
    across_inside, down_inside = (patch < size[:, :, None]).unbind(1)
    inside = down_inside[:, :, None] & across_inside[:, None, :]
    first = grids.starts.index_select(0, image)[:, None] + row * width
    return (first[:, :, None] + column[:, None, :]).masked_fill_(~inside, -1).flatten(1)


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
    # One gather, then additions in the order of the cells.
    for cell in gather_rows(features, cells).unbind(1):
        total += cell
    count = (cells >= 0).sum(1).clamp(min=1).to(torch.float32)
    return total.mul_(count.reciprocal()[:, None]).to(features.dtype)

"""Image operators on small examples; loops over pixels are in ``tests/compat``."""

from __future__ import annotations

import numpy as np
import torch

from deepinfer_neuron.ops.image_patches import (
    PatchGrids,
    RawImages,
    concatenate_cells,
    pixel_values,
    place_embeddings,
    pool_cells,
    square_cells,
    write_patches,
)
from tests.ops.number_formats import bf16, same_bits


def test_pixel_values() -> None:
    byte = np.arange(256, dtype=np.float32)
    for mean, std in ((0.5, 0.5), (0.48145466, 0.26862954)):
        value = (byte / np.float32(255) - np.float32(mean)) / np.float32(std)
        assert same_bits(pixel_values(mean, std), torch.from_numpy(bf16(value)).bfloat16())


def test_one_pixel_in_its_patch() -> None:
    """A margin of half a pixel rounds to the even number 0, one and a half to 2."""
    for size, place in ((2, 0), (4, 2)):
        images = RawImages(
            torch.tensor([10, 20, 30], dtype=torch.uint8),
            torch.tensor([0, 3]),
            torch.tensor([[1, 1]]),
            torch.tensor([[1, 1]]),
            torch.tensor([0, 1]),
        )
        patch = torch.zeros(1, 3, size, size, dtype=torch.int64)
        write_patches(patch, images, size, torch.arange(256), 7)
        expected = torch.full((3, size, size), 7)
        expected[:, place, place] = torch.tensor([10, 20, 30])
        assert torch.equal(patch[0], expected)


def test_images_without_pixels_are_padding() -> None:
    images = RawImages(
        torch.empty(0, dtype=torch.uint8),
        torch.tensor([0, 0]),
        torch.tensor([[0, 0]]),
        torch.tensor([[2, 1]]),
        torch.tensor([0, 2]),
    )
    patches = torch.zeros(2, 3, 2, 2, dtype=torch.int64)
    write_patches(patches, images, 2, torch.arange(256), 9)
    assert torch.equal(patches, torch.full((2, 3, 2, 2), 9))


def test_embeddings() -> None:
    """An id given twice for padding takes the first row; an image id wins over padding."""
    rows = torch.zeros(5, 1)
    place_embeddings(
        rows,
        torch.tensor([8, 5, 6, 8, 1]),
        torch.tensor([[10.0], [20.0]]),
        8,
        torch.tensor([1, 1, 1, 2, 2]),
        torch.tensor([5, 8, 5]),
        torch.tensor([[1.0], [2.0], [3.0]]),
    )
    assert rows.flatten().tolist() == [10, 1, 0, 20, 0]


def test_squares() -> None:
    """A grid of 3 by 2 behind another patch: squares of two, the second cut off."""
    grids = PatchGrids(
        torch.tensor([[1, 1], [3, 2]]), torch.tensor([0, 1, 7]), torch.tensor([0, 1, 3]), 2
    )
    cells = square_cells(grids, torch.tensor([1, 1]), torch.tensor([1, 2]))
    assert cells.tolist() == [[1, 2, 4, 5], [3, -1, 6, -1]]
    features = torch.arange(14.0).view(7, 2)
    assert concatenate_cells(features, cells)[1].tolist() == [[6, 0, 12, 0], [7, 0, 13, 0]]
    assert pool_cells(features, cells).tolist() == [[6, 7], [9, 10]]
    assert pool_cells(features, torch.full((1, 4), -1)).tolist() == [[0, 0]]

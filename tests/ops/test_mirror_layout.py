"""The mirror layout on two short sequences."""

from __future__ import annotations

import torch

from deepinfer_neuron.ops.mirror_layout import (
    block_lengths,
    boundary_ordinals,
    key_ranges,
    mirror_index,
    mirror_places,
    mirror_rows,
)

LENGTHS = torch.tensor([7, 1])
"""With two ranks: blocks of 2 (0-1, 2-3, 4-5, 6) and of 1 (one token in the first)."""


def test_places() -> None:
    places = mirror_places(LENGTHS, LENGTHS, 2)
    assert block_lengths(LENGTHS, 2).tolist() == [2, 1]
    assert mirror_rows(LENGTHS, 2) == 6
    assert places.owner.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    assert places.row.tolist() == [0, 1, 0, 1, 2, 3, 2, 4]
    assert mirror_index(places, 0, 6).tolist() == [0, 1, 6, -1, 7, -1]
    assert mirror_index(places, 1, 7).tolist() == [2, 3, 4, 5, -1, -1, -1]


def test_key_ranges() -> None:
    """Ratio 2, three old tokens in the first sequence: 5 compressed keys, then 1."""
    places = mirror_places(LENGTHS, LENGTHS, 2)
    index = mirror_index(places, 0, 6)
    first, behind = key_ranges(places, index, LENGTHS, LENGTHS + torch.tensor([3, 0]), 2, (2,))
    assert first.tolist() == [[0, 0, 0, 0, 5, 5]]
    assert behind.tolist() == [[2, 2, 5, 0, 5, 5]]


def test_last_tokens() -> None:
    """The last three of the first sequence and the second: rank 1 lists two, rank 0 two."""
    places = mirror_places(LENGTHS, torch.tensor([3, 1]), 2)
    assert places.local.tolist() == [4, 5, 6, 0]
    ordinal, order = boundary_ordinals(places, 2, mirror_rows(LENGTHS, 2))
    assert ordinal.tolist() == [0, 1, 0, 1]
    assert order.tolist() == [2, 3, 0, 1]

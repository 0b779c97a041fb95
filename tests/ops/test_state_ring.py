"""Copies between rings."""

from __future__ import annotations

import torch

from deepinfer_neuron.ops.state_ring import copy_between_rings


def ring(*rows: int) -> torch.Tensor:
    return torch.tensor(rows).view(1, -1, 1)


def test_copies_by_position() -> None:
    """Positions 5, 6, 7: rows 0, 1, 2 of five, rows 2, 0, 1 of three."""
    target = ring(0, 0, 0)
    copy_between_rings(ring(10, 11, 12, 13, 14), target, 8, 3)
    assert target.flatten().tolist() == [11, 12, 10]


def test_the_last_positions_win() -> None:
    """A target of two takes the last two of four."""
    target = ring(0, 0)
    copy_between_rings(ring(10, 11, 12, 13), target, 5, 4)
    assert target.flatten().tolist() == [10, 13]


def test_nothing_to_copy() -> None:
    target = ring(7, 8)
    copy_between_rings(ring(1, 2), target, 5, 0)
    assert target.flatten().tolist() == [7, 8]

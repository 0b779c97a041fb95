"""Compression with a ring of recent tokens, on small numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_neuron.ops.arithmetic import free_arithmetic
from deepinfer_neuron.ops.compress import pool_pairs
from deepinfer_neuron.ops.compress_state import (
    Chunk,
    compress_chunk,
    compress_step,
    pool_block,
    remember_chunk,
)
from tests.ops.number_formats import normal, same_bits


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_pooling_is_that_of_the_model() -> None:
    a, b = normal((5, 2, 8), 1, torch.float32), normal((5, 2, 8), 2, torch.float32)
    assert same_bits(pool_block([a, b]), pool_pairs(a, b, free_arithmetic()))
    assert same_bits(pool_block([a]), a[:, 1].to(torch.bfloat16))


def test_one_sequence_in_two_chunks() -> None:
    """Five tokens as 3 + 2: the pair (2, 3) is made of the ring and of the second chunk."""
    score, value = torch.zeros(5, 1), torch.tensor([[1.0], [3.0], [5.0], [7.0], [9.0]])
    ring = torch.full((2, 4, 2, 1), -9.0)
    first = Chunk(i32(1), i32(0), i32(0, 3), i32(0, 3), i32(0, 1), None)
    assert compress_chunk(score[:3], value[:3], ring, first, 2).tolist() == [[2.0]]
    remember_chunk(score[:3], value[:3], ring, first)
    assert ring[1, :, 1, 0].tolist() == [1, 3, 5, -9]
    second = Chunk(i32(1), i32(0), i32(0, 2), i32(0, 5), i32(0, 1), None)
    assert compress_chunk(score[3:], value[3:], ring, second, 2).tolist() == [[6.0]]
    remember_chunk(score[3:], value[3:], ring, second)
    assert ring[1, :, 1, 0].tolist() == [9, 3, 5, 7]
    assert (ring[0] == -9).all()


def test_rows_of_tokens() -> None:
    """Tokens found through an index, in reverse here."""
    score, value = torch.zeros(4, 1), torch.tensor([[8.0], [6.0], [4.0], [2.0]])
    ring = torch.zeros(1, 4, 2, 1)
    chunk = Chunk(i32(0), i32(0, 0), i32(0, 4), i32(0, 4), i32(0, 2), i32(3, 2, 1, 0))
    assert compress_chunk(score, value, ring, chunk, 2).tolist() == [[3.0], [7.0]]
    remember_chunk(score, value, ring, chunk)
    assert ring[0, :, 1, 0].tolist() == [2, 4, 6, 8]


def test_a_step_sees_the_rows_beside_it() -> None:
    """Tokens 2 and 3 of one request in one step."""
    ring = torch.zeros(1, 3, 2, 1)
    out = compress_step(
        torch.zeros(2, 1), torch.tensor([[4.0], [8.0]]), ring, i32(0, 0), i32(3, 4), 2
    )
    assert out.tolist() == [[0.0], [6.0]]
    assert ring[0, :, 1, 0].tolist() == [8, 0, 4]

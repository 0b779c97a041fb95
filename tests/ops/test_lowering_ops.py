"""Every graph form lowers to StableHLO, and XLA computes what torch computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_neuron.ops import gather, graph_formats, graph_math, graph_select
from deepinfer_neuron.ops.arithmetic import graph_arithmetic
from tests.ops.number_formats import finite_e4m3_codes, normal, random_bytes, same_bits
from tests.support.lowered import check_function, within

pytestmark = pytest.mark.slow
pytest.importorskip("torch_mlir")
pytest.importorskip("jax")

CODES = torch.arange(256, dtype=torch.uint8).view(4, 64)
SCALES = random_bytes((4, 2), 1, 100, 150)
ROWS = normal((6, 64), 2)
# Without subnormal numbers, which XLA flushes on this processor.
WIDE = (normal((48, 64), 3, torch.float32) * 2.0 ** torch.arange(-90, 102, 4)[:, None]).to(
    torch.float32
)


def entries(width: int = 96) -> Tensor:
    """Score rows with ties, absent entries, and nothing at all."""
    scores = (normal((6, width), 4, torch.float32) * 2).round()
    scores[0] = -math.inf
    scores[1, 3:] = -math.inf
    scores[2] = 0.0
    scores[2, ::2] = -0.0
    scores[3] = normal((width,), 5, torch.float32)
    return scores


Case = tuple[Callable[..., Any], tuple[Any, ...]]

FORMATS: dict[str, Case] = {
    "decode_e2m1": (graph_formats.decode_e2m1, (CODES,)),
    "dequantize_fp8": (
        graph_formats.dequantize_fp8,
        (random_bytes((64, 96), 6), random_bytes((2, 3), 7, 10, 247)),
    ),
    "dequantize_fp8_edges": (
        graph_formats.dequantize_fp8,
        (random_bytes((33, 70), 8), random_bytes((2, 3), 9, 10, 247)),
    ),
    "dequantize_fp8_rows": (graph_formats.dequantize_fp8_rows, (CODES, SCALES)),
    "dequantize_fp4": (
        graph_formats.dequantize_fp4,
        (random_bytes((3, 16, 32), 10), random_bytes((3, 16, 2), 11, 2, 253)),
    ),
    "encode_e4m3": (graph_formats.encode_e4m3, (WIDE,)),
    "encode_e2m1": (graph_formats.encode_e2m1, (WIDE,)),
    "q8": (graph_formats.q8, (WIDE,)),
    "q8_codes": (graph_formats.q8_codes, (WIDE,)),
    "q8_bf16": (graph_formats.q8, (ROWS,)),
    "q4_index": (graph_formats.q4_index, (ROWS,)),
    "q4_index_codes": (graph_formats.q4_index_codes, (WIDE,)),
    "q4_cache_codes": (graph_formats.q4_cache_codes, (ROWS,)),
    "q4_cache_values": (
        graph_formats.q4_cache_values,
        (CODES, finite_e4m3_codes((4, 8), 12)),
    ),
    "pack_exponent_pairs": (graph_formats.pack_exponent_pairs, (CODES[:, :63].contiguous(),)),
}

SELECTIONS: dict[str, Case] = {
    "top_entries": (lambda x: graph_select.top_entries(x, 20), (entries(),)),
    "top_entries_all": (lambda x: graph_select.top_entries(x, 200), (entries(),)),
    "candidate_blocks": (
        lambda x, n: graph_select.candidate_blocks(x, n, 8, 5),
        (entries(90), torch.tensor([0, 3, 90, 8, 9, 64], dtype=torch.int32)),
    ),
    "candidate_mask": (
        lambda b: graph_select.candidate_mask(b, 8, 90),
        (torch.tensor([[0, 3, 11], [-1, -1, -1], [5, 6, -1]], dtype=torch.int32),),
    ),
    "first_entries": (
        lambda n: graph_select.first_entries(n, 7),
        (torch.tensor([0, 3, 7, 9], dtype=torch.int32),),
    ),
    "choose": (
        lambda x, b: graph_select.choose(x, b, 6),
        ((normal((5, 24), 13, torch.float32) * 2).round(), normal((24,), 14, torch.float32)),
    ),
    "shares": (
        lambda x, c: graph_select.shares(x, c, 2.5),
        (
            normal((2, 24), 15, torch.float32).abs(),
            torch.tensor([[0, 23, 7, 3, 2, 9], [1, 2, 3, 4, 5, 6]], dtype=torch.int32),
        ),
    ),
    "argmax": (graph_select.argmax, (entries(),)),
}

PLACES = torch.tensor([[0, 3, -1], [4, 2, 7]], dtype=torch.int32)

GATHERS: dict[str, Case] = {
    "gather_rows": (gather.gather_rows, (normal((4, 64), 16), PLACES)),
    "gather_bytes": (graph_math.gather_bytes, (graph_math.byte_words(CODES), PLACES)),
}

EXACT = FORMATS | SELECTIONS | GATHERS
GRAPH = graph_arithmetic()


@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str) -> None:
    function, args = EXACT[name]
    check_function(function, *args)


def test_codes_that_are_no_numbers() -> None:
    def numbers(a: Tensor, b: Tensor) -> bool:
        return torch.equal(a.isnan(), b.isnan()) and same_bits(
            a.masked_fill(a.isnan(), 0), b.masked_fill(b.isnan(), 0)
        )

    check_function(graph_formats.decode_e4m3, CODES, compare=numbers)
    # Scale 0 is a subnormal power, which XLA flushes.
    check_function(graph_formats.decode_ue8m0, CODES[:, 1:].contiguous(), compare=numbers)


def test_products_and_roots_round_as_the_compiler_does() -> None:
    a, b, c = (normal((8, 32), seed, torch.float32) for seed in (17, 18, 19))
    check_function(GRAPH.square_root, a.abs(), compare=within(2.0**-22))
    close = within(2.0**-22, 2.0**-20)
    check_function(GRAPH.fused, a, b, c, compare=close)
    check_function(graph_math.turn_pairs, a, b, c, c, compare=close)

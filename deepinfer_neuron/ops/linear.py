"""Matrix products with packed weights, dequantized in bounded chunks of output rows.

Dequantized fp8 and fp4 weights are exact in bf16, so a chunk is decoded, multiplied and dropped;
the split never touches the contracted axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from deepinfer_neuron.checkpoint.formats import FP8_BLOCK, dequantize_fp4, dequantize_fp8
from deepinfer_neuron.ops import graph_formats
from deepinfer_neuron.ops.arithmetic import Arithmetic


def _chunks(rows: int, columns: int, elements: int) -> Iterator[slice]:
    """Row ranges of about ``elements`` weights, starting on scale-block boundaries."""
    step = max(FP8_BLOCK, elements // max(1, columns) // FP8_BLOCK * FP8_BLOCK)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _chunked(
    x: Tensor,
    rows: int,
    columns: int,
    elements: int,
    weight: Callable[[slice], Tensor],
    arithmetic: Arithmetic,
) -> Tensor:
    parts = [arithmetic.order.linear(x, weight(part)) for part in _chunks(rows, columns, elements)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def fp8_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    arithmetic: Arithmetic,
    chunk_elements: int | None = None,
) -> Tensor:
    """``x @ w.T`` with an fp8 weight of 32 x 32 scale blocks.

    Args:
        x: activations ``[M, K]`` holding ``q8`` values.
        codes: uint8 ``[N, K]``.
        scale: uint8 ``[ceil(N/32), ceil(K/32)]``.
        arithmetic: order and dtype.
        chunk_elements: bound of the weights decoded at once, if not the arithmetic's.

    Returns:
        activation dtype ``[M, N]``: fp32 accumulation, one rounding.
    """

    def weight(part: slice) -> Tensor:
        blocks = slice(part.start // FP8_BLOCK, -(-part.stop // FP8_BLOCK))
        return decode(codes[part], scale[blocks])

    decode = graph_formats.dequantize_fp8 if arithmetic.graph else dequantize_fp8
    rows, columns = codes.shape
    elements = chunk_elements or arithmetic.elements_at_once
    return _chunked(x, rows, columns, elements, weight, arithmetic)


def fp4_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    arithmetic: Arithmetic,
    chunk_elements: int | None = None,
) -> Tensor:
    """``x @ w.T`` with a packed fp4 weight, one scale per row and 32 inputs.

    Args:
        x: activations ``[M, K]`` holding ``q8`` values.
        packed: uint8 ``[N, K/2]``.
        scale: uint8 ``[N, K/32]``.
        arithmetic: order and dtype.
        chunk_elements: bound of the weights decoded at once, if not the arithmetic's.

    Returns:
        activation dtype ``[M, N]``.
    """

    def weight(part: slice) -> Tensor:
        return decode(packed[part], scale[part])

    decode = graph_formats.dequantize_fp4 if arithmetic.graph else dequantize_fp4
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    elements = chunk_elements or arithmetic.elements_at_once
    return _chunked(x, rows, columns, elements, weight, arithmetic)


def linear(x: Tensor, weight: Tensor, arithmetic: Arithmetic) -> Tensor:
    """``x @ weight.T`` with a bf16 weight: ``[M, K] x [N, K]`` to activation dtype ``[M, N]``."""
    return arithmetic.order.linear(x, weight)


def linear_fp32(
    x: Tensor, weight: Tensor, arithmetic: Arithmetic, chunk_elements: int | None = None
) -> Tensor:
    """``x @ weight.T`` without a final rounding: ``[M, K] x [N, K]`` to fp32 ``[M, N]``.

    A bf16 weight is widened chunk by chunk.
    """
    rows, columns = weight.shape
    if weight.dtype == torch.float32:
        return arithmetic.order.matmul(x, weight)
    parts = _chunks(rows, columns, chunk_elements or arithmetic.elements_at_once)
    return torch.cat([arithmetic.order.matmul(x, weight[part]) for part in parts], dim=1)

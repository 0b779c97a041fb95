"""Scores of index keys: ``sum_h relu(q_h . k) * w_h``, fp32 with one rounding to bf16.

Keys and queries have 128 channels in four groups of 32, each with a ue8m0 scale. A score depends
on its query, its key and the order of the sums only: in fixed order the dense, paged and sparse
forms agree bit for bit wherever they score the same pair.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_neuron.checkpoint.formats import decode_ue8m0
from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops.arithmetic import Arithmetic, pairwise_sum
from deepinfer_neuron.ops.group_cast import code_values

HEAD_DIM = 128
GROUP = 32
_SCALES = HEAD_DIM // GROUP
_WORKSPACE_ELEMENTS = 1 << 22
"""Products of heads and keys alive at once: 16 MiB of fp32."""


def index_values(codes: Tensor, scale: Tensor) -> Tensor:
    """Exact values of quantized index vectors.

    Args:
        codes: e4m3 ``[..., 128]`` or int8 ``[..., 64]`` of packed e2m1.
        scale: four exponents per vector, as bytes ``[..., 4]`` or in words of any type.

    Returns:
        fp32 ``[..., 128]``.
    """
    lead = codes.shape[:-1]
    values = code_values(codes)
    if values.shape[-1] != HEAD_DIM or scale.numel() * scale.element_size() != 4 * lead.numel():
        raise ConfigError(
            f"index vectors {list(codes.shape)} with scales {list(scale.shape)} {scale.dtype} do "
            f"not hold {HEAD_DIM} channels and {_SCALES} scale bytes each; quantize them in groups "
            f"of {GROUP}."
        )
    exponents = scale.contiguous().view(-1).view(torch.uint8).view(*lead, _SCALES)
    grouped = values.view(*lead, _SCALES, GROUP) * decode_ue8m0(exponents)[..., None]
    return grouped.flatten(-2)


def head_scores(query: Tensor, keys: Tensor, weights: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Scores of every query with its keys.

    Args:
        query: fp32 ``[n, H, 128]``.
        keys: fp32 ``[m, 128]`` for all queries, or ``[n, m, 128]``, one set each.
        weights: bf16 ``[n, H]``, rows of any stride.
        arithmetic: order of the sums.

    Returns:
        bf16 ``[n, m]``.
    """
    count, heads = query.shape[:2]
    width = keys.shape[-2]
    step = max(1, _WORKSPACE_ELEMENTS // max(1, heads * width))
    if count > step:
        sets = keys.split(step) if keys.dim() == 3 else [keys] * -(-count // step)
        parts = zip(query.split(step), sets, weights.split(step), strict=True)
        return torch.cat([head_scores(q, k, w, arithmetic) for q, k, w in parts])
    if keys.dim() == 3:
        dots = arithmetic.order.matmul(query, keys)
    else:
        dots = arithmetic.order.matmul(query.flatten(0, 1), keys).unflatten(0, (count, heads))
    weighted = dots.relu() * weights.to(torch.float32)[..., None]
    return pairwise_sum(weighted.movedim(1, 0)).to(torch.bfloat16)


def index_pages(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Data and scales of a paged index cache.

    A page holds the data of all its tokens, then their scales.

    Args:
        cache: uint8 ``[pages, page, 1, 68]`` (e2m1) or ``[..., 132]`` (e4m3), any page stride.

    Returns:
        views: int8 ``[pages, page, 64]`` or e4m3 ``[pages, page, 128]``, and uint8
        ``[pages, page, 4]``.
    """
    pages, page, _, size = cache.shape
    if size not in (HEAD_DIM // 2 + _SCALES, HEAD_DIM + _SCALES):
        raise ConfigError(
            f"an index cache of {size} bytes per token is not known; use 68 (e2m1) or 132 (e4m3)."
        )
    width = size - _SCALES
    start, stride = cache.storage_offset(), cache.stride(0)
    data = cache.as_strided((pages, page, width), (stride, width, 1), start)
    scale = cache.as_strided((pages, page, _SCALES), (stride, _SCALES, 1), start + page * width)
    return data.view(torch.int8 if width < HEAD_DIM else torch.float8_e4m3fn), scale


def paged_keys(cache: Tensor, tables: Tensor, tokens: Tensor) -> Tensor:
    """Keys of logical tokens through each row's block table.

    Args:
        cache: see :func:`index_pages`.
        tables: integers ``[n, blocks]``.
        tokens: int64 ``[n, m]``; a negative one reads page 0, whatever is there.

    Returns:
        fp32 ``[n, m, 128]``.
    """
    data, scale = index_pages(cache)
    page = data.shape[1]
    pages = tables.to(torch.int64).gather(1, tokens.clamp(min=0) // page)
    pages, offset = pages.masked_fill(tokens < 0, 0), tokens.clamp(min=0) % page
    # Bytes are gathered: not every type of data can be indexed.
    chosen = data.view(torch.uint8)[pages, offset].view(data.dtype)
    return index_values(chosen, scale[pages, offset])

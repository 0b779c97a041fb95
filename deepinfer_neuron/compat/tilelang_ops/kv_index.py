"""Index rows of the window and the compressed keys."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from torch import Tensor

from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops.kv_index import (
    page_rows,
    paged_range_index,
    range_index,
    shifted_index,
    two_range_index,
)


@cache
def load_kv_index_tl(
    index_length: int, block_size: int, has_block_tables: bool
) -> Callable[[Tensor, Tensor, Tensor | None], None]:
    """Cache rows of one range per query; columns behind it are -1.

    ``block_size`` is the page size with block tables, else the ring size, else 0 for no ring.

    Kernel: ``offset_len [n, 2] i32``, ``-> kv_index [n, index_length] i32``,
    ``flat_block_tables [pages] i32`` (ignored without block tables).
    """
    if index_length < 0 or block_size < (1 if has_block_tables else 0):
        raise ConfigError(
            f"load_kv_index: index_length {index_length} and block_size {block_size} must not be "
            "negative, and block tables need a block_size of at least 1"
        )

    def kernel(offset_len: Tensor, kv_index: Tensor, flat_block_tables: Tensor | None) -> None:
        if has_block_tables:
            assert flat_block_tables is not None
            index = paged_range_index(offset_len, index_length, block_size, flat_block_tables)
        else:
            index = range_index(offset_len, index_length, block_size)
        kv_index.copy_(index)

    return kernel


@cache
def convert_kv_index_tl(
    s: int, k: int, n: int, block_size: int
) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Token numbers to cache rows, in place; columns from the context length on become -1.

    An entry of -1 inside the context stays -1.

    Kernel: ``<-> topk_idxs [b, s, k] i32``, ``context_lens [b, s] i32``,
    ``block_tables [b, n] i32``.
    """
    if block_size < 1:
        raise ConfigError(f"convert_kv_index: block_size is {block_size}, it must be positive")

    def kernel(topk_idxs: Tensor, context_lens: Tensor, block_tables: Tensor) -> None:
        topk_idxs.copy_(page_rows(topk_idxs, block_size, context_lens, block_tables))

    return kernel


@cache
def expand_swa_index_tl(width: int) -> Callable[[Tensor, Tensor], None]:
    """Rows of two ranges, one behind the other, then -1.

    Kernel: ``pivots [n, 4] i32`` (offset, length, offset, length), ``-> out [n, width] i32``.
    """
    if width < 0:
        raise ConfigError(f"expand_swa_index: width is {width}, it must not be negative")

    def kernel(pivots: Tensor, out: Tensor) -> None:
        out.copy_(two_range_index(pivots, width))

    return kernel


@cache
def kv_index_cat_tl(
    dtype: str, window_size: int, topk_tokens: int, out_stride: int
) -> Callable[[Tensor, Tensor, Tensor, Tensor, int, int], None]:
    """Window rows beside compressed rows; the latter are moved behind all window keys.

    ``out_stride`` is the row stride of the buffer that both outputs are columns of.

    Kernel: ``kv_index [q, window_size] i32``, ``kv_ca_index [q, topk_tokens] i32``,
    ``-> left [q, window_size] i32``, ``-> right [q, topk_tokens] i32``, ``total_k_swa`` int,
    ``total_k`` int.
    """
    if dtype != "int32" or out_stride < window_size + topk_tokens:
        raise ConfigError(
            f"kv_index_cat: dtype is {dtype} and out_stride {out_stride}; indices are int32 and a "
            f"row holds at least {window_size + topk_tokens} of them"
        )

    def kernel(
        kv_index: Tensor,
        kv_ca_index: Tensor,
        left: Tensor,
        right: Tensor,
        total_k_swa: int,
        total_k: int,
    ) -> None:
        left.copy_(kv_index)
        right.copy_(shifted_index(kv_ca_index, total_k_swa + total_k))

    return kernel

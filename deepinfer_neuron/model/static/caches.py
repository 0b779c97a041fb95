"""Caches as graph inputs: one contiguous tensor per layer and kind, of 32-bit words.

Gathers and scatters then move whole words, which a device does without widening the table. A
record is padded to whole words; inside it lies as in :mod:`deepinfer_neuron.cache.records`.
Block, page and slot 0 belong to padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_neuron.cache.pools import BLOCK_TOKENS, CacheShape
from deepinfer_neuron.checkpoint.config import LayerSpec, ModelConfig
from deepinfer_neuron.ops import graph_formats, quant
from deepinfer_neuron.ops.arithmetic import Arithmetic

Encode = Callable[[Tensor], tuple[Tensor, Tensor]]
Decode = Callable[[Tensor, Tensor], Tensor]

WORD = 4
"""Bytes of a word."""


class WindowCache(NamedTuple):
    """Window keys of one layer."""

    ring: Tensor
    """int32 ``[slots * ring, words]``."""
    pages: Tensor
    """int32 ``[pages * tail, words]``."""


class SourceCache(NamedTuple):
    """What a KV or index source owns besides its window."""

    entries: Tensor | None
    """int32 ``[blocks * entries, words]``: compressed keys of a KV source."""
    index_keys: Tensor | None
    """int32 ``[blocks * entries, words]``: index keys of an index-K source."""
    pairs: Tensor | None
    """fp32 ``[slots * ring, 2, D]``: open groups of a ratio-2 compressor."""


class StaticCache(NamedTuple):
    """Everything one layer remembers."""

    window: WindowCache
    source: SourceCache


class Formats(NamedTuple):
    """Conversions of the three kinds of records: values to (data, scale) and back."""

    window: tuple[Encode, Decode]
    entries: tuple[Encode, Decode]
    index_keys: tuple[Encode, Decode]


_HOST = Formats(
    (quant.q8_codes, quant.q8_values),
    (quant.q4_cache_codes, quant.q4_cache_values),
    (quant.q4_index_codes, quant.q4_index_values),
)
_GRAPH = Formats(
    (graph_formats.q8_codes, graph_formats.q8_values),
    (graph_formats.q4_cache_codes, graph_formats.q4_cache_values),
    (graph_formats.q4_index_codes, graph_formats.q4_index_values),
)


@dataclass(frozen=True)
class WordCodec:
    """Vectors of ``channels`` values as records of words, in one of the released formats.

    Attributes:
        channels: of a vector.
        data: bytes of the data section.
        scale: bytes of the scale section behind it.
        encode: values to both sections.
        decode: both sections to values.
    """

    channels: int
    data: int
    scale: int
    encode: Encode
    decode: Decode

    @property
    def words(self) -> int:
        """Words of a record."""
        return -(-(self.data + self.scale) // WORD)

    def pack(self, values: Tensor) -> Tensor:
        """``[n, channels]`` to int32 ``[n, words]``, zero bytes behind."""
        record = torch.cat(self.encode(values), dim=-1)
        return join_bytes(F.pad(record, (0, self.words * WORD - record.shape[-1])))

    def unpack(self, words: Tensor) -> Tensor:
        """int32 ``[..., words]`` to ``[..., channels]``."""
        octets = words.view(torch.uint8)
        data = octets[..., : self.data].contiguous()
        return self.decode(data, octets[..., self.data : self.data + self.scale].contiguous())


def join_bytes(octets: Tensor) -> Tensor:
    """uint8 ``[..., 4 k]`` to the int32 ``[..., k]`` of the same bytes, lowest first.

    By arithmetic: graph compilers do not reinterpret a narrow type as a wider one.
    """
    first, second, third, fourth = octets.to(torch.int32).unflatten(-1, (-1, WORD)).unbind(-1)
    high: Tensor = graph_formats.shift_left(fourth, 24)
    joined: Tensor = first | (second * (1 << 8)) | (third * (1 << 16)) | high
    return joined


@dataclass(frozen=True)
class WordCodecs:
    """The record kinds of one model."""

    window: WordCodec
    entries: WordCodec
    index: WordCodec

    @classmethod
    def of(cls, config: ModelConfig, arithmetic: Arithmetic) -> WordCodecs:
        """The released formats, in the form that the arithmetic asks for."""
        formats = _GRAPH if arithmetic.graph else _HOST
        width, index_width = config.head_dim, config.index_head_dim
        return cls(
            WordCodec(width, width, width // quant.GROUP, *formats.window),
            WordCodec(width, width // 2, width // quant.CACHE_GROUP, *formats.entries),
            WordCodec(
                index_width, index_width // 2, index_width // quant.GROUP, *formats.index_keys
            ),
        )


def allocate_window(codecs: WordCodecs, shape: CacheShape, device: torch.device) -> WindowCache:
    """Zeroed window caches of one layer."""
    words, tail = codecs.window.words, max(1, shape.page_tail)
    return WindowCache(
        torch.zeros(shape.num_slots * shape.window_ring, words, dtype=torch.int32, device=device),
        torch.zeros(shape.num_pages * tail, words, dtype=torch.int32, device=device),
    )


def allocate_static(
    codecs: WordCodecs, spec: LayerSpec, shape: CacheShape, device: torch.device
) -> StaticCache:
    """Zeroed caches of one backbone layer."""
    entries = index = pairs = None
    if spec.ratio:
        count = shape.num_blocks * (BLOCK_TOKENS // spec.ratio)
        if spec.owns_kv:
            entries = torch.zeros(count, codecs.entries.words, dtype=torch.int32, device=device)
        if spec.owns_kv and spec.ratio == 2:
            slots, width = shape.num_slots * shape.pair_ring, codecs.window.channels
            pairs = torch.zeros(slots, 2, width, dtype=torch.float32, device=device)
        if spec.owns_index_k:
            index = torch.zeros(count, codecs.index.words, dtype=torch.int32, device=device)
    return StaticCache(allocate_window(codecs, shape, device), SourceCache(entries, index, pairs))

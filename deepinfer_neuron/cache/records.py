"""Byte layouts of cached vectors.

| record | bytes | layout |
|---|---|---|
| window key | ``D + D/32`` (528 for 512) | e4m3 codes, then one ue8m0 scale per 32 channels |
| compressed key | ``D/2 + D/16`` (288 for 512) | e2m1 pairs, then one e4m3 scale per 16 channels |
| index key | ``D/2 + D/32`` (68 for 128) | e2m1 pairs, ue8m0 scales; a block holds all data first |

A :class:`Codec` turns values into such records and back. :class:`RawCodec` keeps fp32 values and
serves the arithmetic without rounding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_neuron.ops.quant import (
    CACHE_GROUP,
    GROUP,
    q4_cache_codes,
    q4_cache_values,
    q4_index_codes,
    q4_index_values,
    q8_codes,
    q8_values,
)


@dataclass(frozen=True)
class Codec(ABC):
    """Vectors of ``channels`` values as fixed-size records of two sections: data, then scales."""

    channels: int

    @property
    @abstractmethod
    def data_width(self) -> int:
        """Elements of the data section of one record."""

    @property
    @abstractmethod
    def scale_width(self) -> int:
        """Elements of the scale section of one record."""

    @property
    def width(self) -> int:
        """Elements of one record."""
        return self.data_width + self.scale_width

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the storage."""
        return torch.uint8

    @abstractmethod
    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """``[n, channels]`` values to data ``[n, data_width]`` and scales ``[n, scale_width]``."""

    @abstractmethod
    def decode(self, data: Tensor, scale: Tensor) -> Tensor:
        """The exact values ``[..., channels]`` of a data and a scale section."""

    def pack(self, values: Tensor) -> Tensor:
        """``[n, channels]`` values to interleaved records ``[n, width]``."""
        return torch.cat(self.encode(values), dim=-1)

    def unpack(self, records: Tensor) -> Tensor:
        """Interleaved records ``[..., width]`` to values ``[..., channels]``."""
        data, scale = records.split((self.data_width, self.scale_width), dim=-1)
        return self.decode(data.contiguous(), scale.contiguous())


class WindowCodec(Codec):
    """Window keys: ``q8``."""

    @property
    def data_width(self) -> int:
        """One byte per channel."""
        return self.channels

    @property
    def scale_width(self) -> int:
        """One byte per 32 channels."""
        return self.channels // GROUP

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """See :func:`q8_codes`."""
        return q8_codes(values)

    def decode(self, data: Tensor, scale: Tensor) -> Tensor:
        """See :func:`q8_values`."""
        return q8_values(data, scale)


class CompressedCodec(Codec):
    """Compressed keys: ``q4_cache``."""

    @property
    def data_width(self) -> int:
        """Half a byte per channel."""
        return self.channels // 2

    @property
    def scale_width(self) -> int:
        """One byte per 16 channels."""
        return self.channels // CACHE_GROUP

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """See :func:`q4_cache_codes`."""
        return q4_cache_codes(values)

    def decode(self, data: Tensor, scale: Tensor) -> Tensor:
        """See :func:`q4_cache_values`."""
        return q4_cache_values(data, scale)


class IndexCodec(Codec):
    """Index keys: ``q4_index``."""

    @property
    def data_width(self) -> int:
        """Half a byte per channel."""
        return self.channels // 2

    @property
    def scale_width(self) -> int:
        """One byte per 32 channels."""
        return self.channels // GROUP

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """See :func:`q4_index_codes`."""
        return q4_index_codes(values)

    def decode(self, data: Tensor, scale: Tensor) -> Tensor:
        """See :func:`q4_index_values`."""
        return q4_index_values(data, scale)


class RawCodec(Codec):
    """fp32 values as they are, without scales."""

    @property
    def data_width(self) -> int:
        """One fp32 per channel."""
        return self.channels

    @property
    def scale_width(self) -> int:
        """None."""
        return 0

    @property
    def dtype(self) -> torch.dtype:
        """fp32."""
        return torch.float32

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The values, and an empty scale section."""
        return values, values[:, :0]

    def decode(self, data: Tensor, scale: Tensor) -> Tensor:
        """The data section."""
        return data


@dataclass(frozen=True)
class CodecSet:
    """The three record kinds of one model."""

    window: Codec
    compressed: Codec
    index: Codec

    @classmethod
    def of(cls, head_dim: int, index_head_dim: int, rounding: bool) -> CodecSet:
        """The released formats, or fp32 records when nothing is rounded."""
        if not rounding:
            return cls(RawCodec(head_dim), RawCodec(head_dim), RawCodec(index_head_dim))
        return cls(WindowCodec(head_dim), CompressedCodec(head_dim), IndexCodec(index_head_dim))

"""What the cache operators read from a caller's description of a cache record."""

from __future__ import annotations

from typing import Protocol

from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops.record_cast import GroupFormat


class CacheLayout(Protocol):
    """A hashable record description: quantized channels with scales, or plain bf16 channels."""

    @property
    def quantized_dtype(self) -> str | None:
        """``e4m3``, ``e2m1``, or ``None`` for bf16."""

    @property
    def quantized_elements(self) -> int:
        """Quantized channels."""

    @property
    def elements_per_sf(self) -> int:
        """Channels per scale."""

    @property
    def bf16_elements(self) -> int:
        """Channels kept as bf16."""

    @property
    def do_cast(self) -> bool:
        """Whether loading gives bf16 values; otherwise codes and scales as stored."""

    @property
    def sf_format(self) -> str | None:
        """``ue8m0``, ``e4m3`` or ``fp32``; ``None`` for bf16."""

    @property
    def token_interleaved(self) -> bool:
        """Whether each record holds its scales; otherwise a page ends with all of them."""


def layout_format(layout: CacheLayout) -> GroupFormat | None:
    """The cast of a cache record, ``None`` for plain bf16."""
    if layout.quantized_dtype is None:
        return None
    if layout.bf16_elements:
        raise ConfigError("a cache record is either quantized or bf16, not both")
    scale = layout.sf_format or ""
    return GroupFormat(layout.quantized_dtype, layout.elements_per_sf, scale, scale == "ue8m0")

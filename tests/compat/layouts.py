"""Descriptions of cache records, as callers of the cache operators give them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """One record: quantized channels with scales, or plain bf16 channels."""

    quantized_dtype: str | None
    quantized_elements: int
    elements_per_sf: int
    bf16_elements: int
    do_cast: bool
    sf_format: str | None
    token_interleaved: bool = True
    note: str = ""

    @property
    def data_bytes(self) -> int:
        return self.quantized_elements // (1 if self.quantized_dtype == "e4m3" else 2)

    @property
    def scale_bytes(self) -> int:
        scales = self.quantized_elements // self.elements_per_sf
        return scales * (4 if self.sf_format == "fp32" else 1)

    @property
    def channels(self) -> int:
        return self.quantized_elements + self.bf16_elements


WINDOW = Layout("e4m3", 512, 32, 0, True, "ue8m0")
COMPRESSED = Layout("e2m1", 512, 16, 0, True, "e4m3")
INDEX_FP4 = Layout("e2m1", 128, 32, 0, False, "ue8m0", token_interleaved=False)
INDEX_FP8 = Layout("e4m3", 128, 32, 0, False, "ue8m0", token_interleaved=False)
INDEX_FP32 = Layout("e4m3", 128, 128, 0, False, "fp32", token_interleaved=False)
PLAIN = Layout(None, 0, 0, 64, False, None)
QUANTIZED = [WINDOW, COMPRESSED, INDEX_FP4, INDEX_FP8, INDEX_FP32]

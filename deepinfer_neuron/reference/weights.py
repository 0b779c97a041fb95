"""Checkpoint tensors as plain fp32 matrices, decoded when they are used and not kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_neuron.checkpoint.formats import (
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    expand_blocks,
)
from deepinfer_neuron.checkpoint.reader import Checkpoint


@dataclass(frozen=True)
class Weights:
    """Tensors below one name prefix, such as ``layers.3.attn.``."""

    checkpoint: Checkpoint
    prefix: str = ""

    def below(self, prefix: str) -> Weights:
        """The tensors below ``prefix`` within this prefix."""
        return Weights(self.checkpoint, self.prefix + prefix)

    def plain(self, name: str) -> Tensor:
        """A bf16 or fp32 tensor, as fp32."""
        return self.checkpoint.tensor(self.prefix + name).to(torch.float32)

    def fp8(self, name: str) -> Tensor:
        """An e4m3 matrix with one scale per 32 x 32 block: fp32 ``[N, K]``."""
        codes = self.checkpoint.tensor(f"{self.prefix}{name}.weight")
        scale = self.checkpoint.tensor(f"{self.prefix}{name}.scale")
        return decode_e4m3(codes) * expand_blocks(decode_ue8m0(scale), *codes.shape)

    def fp4(self, name: str) -> Tensor:
        """A packed e2m1 matrix with one scale per row and 32 inputs: fp32 ``[N, K]``."""
        values = decode_e2m1(self.checkpoint.tensor(f"{self.prefix}{name}.weight"))
        scale = decode_ue8m0(self.checkpoint.tensor(f"{self.prefix}{name}.scale"))
        groups: Tensor = values.unflatten(-1, (-1, 32))
        return (groups * scale[..., None]).flatten(-2)

    def engram_rows(self, rows: Tensor) -> Tensor:
        """Table rows by id, zeros for id -1: int64 ``[...]`` to fp32 ``[..., d]``."""
        wanted = rows.clamp(min=0).flatten()
        codes = self.checkpoint.rows(self.prefix + "engram.embed.weight", wanted)
        scale = self.checkpoint.rows(self.prefix + "engram.embed.scale", wanted)
        values = decode_e4m3(codes).unflatten(-1, (-1, 32)) * decode_ue8m0(scale)[..., None]
        values = values.flatten(-2).view(*rows.shape, -1)
        return torch.where(rows[..., None] < 0, 0.0, values)

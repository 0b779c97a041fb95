"""Where values lose bits: bf16, and the four run-time quantizers, as functions value -> value.

Formats are described by three numbers (mantissa bits, smallest exponent, largest value) and
rounded with ``torch.round``, which is nearest-even. With ``enabled=False`` every method returns
its input, which leaves the network's meaning alone to be compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def round_to_format(x: Tensor, mantissa_bits: int, min_exponent: int, largest: float) -> Tensor:
    """Nearest representable value of a small float format, ties to even, saturating.

    Args:
        x: fp32, any shape.
        mantissa_bits: explicit mantissa bits of the format.
        min_exponent: exponent of its smallest normal number.
        largest: its largest finite value.
    """
    _, exponent = torch.frexp(x)  # |x| = m * 2^exponent with 0.5 <= m < 1
    step_exponent = (exponent - 1).clamp(min=min_exponent) - mantissa_bits
    step = torch.ldexp(torch.ones_like(x), step_exponent)
    return (torch.round(x / step) * step).clamp(-largest, largest)


def to_e4m3(x: Tensor) -> Tensor:
    """Nearest e4m3 value."""
    return round_to_format(x, mantissa_bits=3, min_exponent=-6, largest=448.0)


def to_e2m1(x: Tensor) -> Tensor:
    """Nearest e2m1 value."""
    return round_to_format(x, mantissa_bits=1, min_exponent=0, largest=6.0)


def power_of_two_at_least(x: Tensor) -> Tensor:
    """``2^ceil(log2 x)`` for positive fp32 ``x``; exact powers of two stay as they are."""
    mantissa, exponent = torch.frexp(x)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.ldexp(torch.ones_like(x), exponent)


def _group_amax(x: Tensor, width: int, floor: float) -> Tensor:
    groups: Tensor = x.unflatten(-1, (-1, width))
    return groups.abs().amax(-1, keepdim=True).clamp(min=floor)


@dataclass(frozen=True)
class Rounding:
    """The rounding points of the network. All methods take and return fp32."""

    enabled: bool = True

    def bf16(self, x: Tensor) -> Tensor:
        """One round-to-nearest-even to bf16."""
        return x.to(torch.bfloat16).to(torch.float32) if self.enabled else x

    def activation(self, x: Tensor) -> Tensor:
        """Input of an fp8 or fp4 matrix product, and a window key: e4m3, power-of-two scale per 32.

        ``scale = 2^ceil(log2(max(amax, 1e-4) / 448))``
        """
        if not self.enabled:
            return x
        amax = _group_amax(x, 32, 1e-4)
        scale = power_of_two_at_least(amax * torch.tensor(1.0 / 448.0))
        return (to_e4m3(x.unflatten(-1, (-1, 32)) / scale) * scale).flatten(-2)

    def compressed_key(self, x: Tensor) -> Tensor:
        """Entry of the compressed cache: e2m1 with an e4m3 scale per 16 channels.

        The value is multiplied by the fp32 reciprocal of the *rounded* scale, not divided by it.
        """
        if not self.enabled:
            return x
        amax = _group_amax(x, 16, 6 * 2.0**-9)
        scale = to_e4m3((amax * torch.tensor(1.0 / 6.0)).clamp(max=448.0))
        return (to_e2m1(x.unflatten(-1, (-1, 16)) * scale.reciprocal()) * scale).flatten(-2)

    def index_operand(self, x: Tensor) -> Tensor:
        """Index query or key: e2m1 with a power-of-two scale per 32 channels."""
        if not self.enabled:
            return x
        amax = _group_amax(x, 32, 6 * 2.0**-126)
        scale = power_of_two_at_least(amax * torch.tensor(1.0 / 6.0))
        return (to_e2m1(x.unflatten(-1, (-1, 32)) / scale) * scale).flatten(-2)

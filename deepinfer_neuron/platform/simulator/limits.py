"""What the simulated device allows: sizes and counts behind the rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["off", "warn", "strict"]
"""Whether a violation is ignored, collected, or raised."""

MODES: tuple[Mode, ...] = ("off", "warn", "strict")


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes or elements, and counts per step. The defaults are those of trn2.

    Attributes:
        memory: memory of a core.
        reserved: what runtime and code take of it.
        scratch: what running graphs take of it.
        step_allocation: largest single allocation within a step.
        dequant: elements of a decoded piece of a weight.
        byte_gather: largest one-byte table that may be gathered from as it is.
        wide_gather: longest axis along which ``gather`` is right.
        one_hot: most classes of a one-hot matrix.
        constant: largest tensor constant of a graph.
        tiles: most tiles (128 x 512 x 128) of matrix products in a graph.
        graphs: most graphs of one method.
        groups: most groups of ranks in a graph.
        collective: largest collective.
        uploads, downloads: copies per step.
        download_bytes: bytes downloaded per step.
        eager: operators outside regions per step.
        regions: regions per step, or ``None`` for any number.
        load_signatures: distinct operators and shapes outside regions before the first step.
    """

    memory: int = 24 * 2**30
    reserved: int = int(0.19 * 2**30)
    scratch: int = 2**30
    step_allocation: int = 2**30
    dequant: int = 2**25
    byte_gather: int = 16 * 2**20
    wide_gather: int = 2**15
    one_hot: int = 4096
    constant: int = 2**20
    tiles: int = 5_000_000 // 4
    graphs: int = 256
    groups: int = 16
    collective: int = 2**29
    uploads: int = 1
    downloads: int = 1
    download_bytes: int = 64 * 2**10
    eager: int = 10
    regions: int | None = None
    load_signatures: int = 64

    @property
    def usable(self) -> int:
        """Bytes that tensors may take."""
        return self.memory - self.reserved - self.scratch

"""The static shape of one pass of the network over a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class PassShape:
    """Sizes that a compiled pass is made for; everything smaller is padded up to them.

    Attributes:
        sequences: S, sequences side by side.
        rows: Q, rows (tokens) of every sequence; the pass has ``sequences * rows`` rows.
        blocks: blocks in the block table of every sequence, 0 if the pass reads no paged cache.
        outputs: rows of every sequence whose logits are wanted, counted from its last live row.
    """

    sequences: int
    rows: int
    blocks: int
    outputs: int

    @property
    def total_rows(self) -> int:
        """Rows of the whole pass, padding included."""
        return self.sequences * self.rows

"""One step as the network sees it: static facts about its rows, complete at construction.

A step holds ``n`` rows (tokens). A *chunk* is the run of consecutive rows of one sequence: a part
of its prompt, or the token that decoding just produced. All index tensors are int64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """Rows ``[start, stop)`` of a step: positions ``[stop_position - rows, stop_position)``."""

    start: int
    stop: int
    stop_position: int
    """Length of the sequence once this chunk is in."""
    block_table: Tensor
    """int64 block ids of the sequence."""

    def entries(self, ratio: int) -> int:
        """Compressed entries that exist once this chunk is in."""
        return self.stop_position // ratio


@dataclass(frozen=True)
class WindowPlan:
    """Where window keys come from and where they go; the same in every layer.

    The keys of a step are ``[history | rows]``: what the rings held before, then this step's own.
    """

    history_places: Tensor
    """``[h]`` ring places read before anything is stored."""
    key_index: Tensor
    """``[n, W]`` key of each row's window, ascending positions, -1 behind."""
    store_rows: Tensor
    """``[s]`` rows whose key outlives the step."""
    store_places: Tensor
    """``[s]`` their ring places."""
    page_rows: Tensor
    """``[w]`` rows whose key a later sequence may need to continue from this prefix."""
    page_places: Tensor
    """``[w]`` their places in the window pages."""


@dataclass(frozen=True)
class EntryPlan:
    """Compressed entries completed by a step, for one ratio.

    For ratio 2 a group's tokens are found in ``[ring places read | rows]``.
    """

    rows: Tensor
    """``[e]`` for ratio 1: the row of each entry; for ratio 2: row of its last token."""
    first: Tensor
    """``[e]`` ratio 2: index of the group's first token in ``[ring | rows]``; else empty."""
    ring_read: Tensor
    """Pair-ring places holding first tokens of earlier chunks."""
    ring_store_rows: Tensor
    """Rows kept for groups that are still open, or may be rolled back."""
    ring_store_places: Tensor
    """Their pair-ring places."""
    positions: Tensor
    """``[e]`` position of each entry: that of its first token."""
    slots: Tensor
    """``[e]`` slot of each entry in the paged pools."""


@dataclass(frozen=True)
class StepTensors:
    """Everything a forward pass needs besides weights and caches."""

    token_ids: Tensor
    """``[n]``."""
    positions: Tensor
    """``[n]``."""
    engram_rows: Tensor
    """``[engram layers, n, columns]`` table rows, -1 reads nothing."""
    window: WindowPlan
    entries: Mapping[int, EntryPlan]
    """By ratio; holds the ratios that some layer compresses with."""
    chunks: tuple[Chunk, ...]
    output_rows: Tensor
    """``[o]`` rows whose logits are wanted."""


@dataclass(frozen=True)
class DraftStep:
    """Blocks of drafts, ``n`` consecutive rows per sequence, for ``s`` sequences.

    The first row of a block is the sequence's last token, which the backbone has not seen yet; the
    others hold the noise token. The keys are ``[history | rows]``: what the draft blocks' rings
    hold of the backbone's tokens, then the rows' own.
    """

    token_ids: Tensor
    """``[s * n]``."""
    positions: Tensor
    """``[s * n]``."""
    history_places: Tensor
    """``[h]`` ring places."""
    key_index: Tensor
    """``[s * n, W + n]`` keys that a row sees: up to ``W`` of history and its whole block, valid
    ones first, -1 behind."""
    block: int
    """``n``."""

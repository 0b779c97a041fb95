"""What the regions of a pass are given besides weights and caches."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class WindowRows(NamedTuple):
    """Window keys of a pass: ``[history of S sequences | n rows]``."""

    turns: Tensor
    """fp32 ``[n, R]`` rotary rows of this kind of layer."""
    keys: Tensor
    """int32 ``[n, W]`` keys that a row sees, -1 behind."""
    history: Tensor
    """int32 ``[S * (W - 1)]`` ring places."""
    places: Tensor
    """int32 ``[n]`` ring places of the rows' own keys."""
    page_places: Tensor
    """int32 ``[n]`` page places of the same."""


class RatioRows(NamedTuple):
    """What a source layer of one compression ratio needs."""

    tables: Tensor
    """int32 ``[S, B]``."""
    visible: Tensor
    """int32 ``[n]`` entries that a row may see."""
    slots: Tensor
    """int32 ``[e]`` pool slots of the entries completed."""
    turns: Tensor
    """fp32 ``[e, R]`` rotary rows at their positions."""
    rows: Tensor | None
    """Ratio 2: int32 ``[e]`` last token of each entry in ``[S | n]``."""
    first: Tensor | None
    """Ratio 2: int32 ``[e]`` first token of each entry in ``[S | n]``."""
    pair_read: Tensor | None
    """Ratio 2: int32 ``[S]`` ring places of the tokens before the pass."""
    pair_places: Tensor | None
    """Ratio 2: int32 ``[n]`` ring places of the rows."""


class OutputRows(NamedTuple):
    """Rows with logits, and the drafts they verify."""

    rows: Tensor
    """int32 ``[S * O]``."""
    proposals: Tensor
    """int32 ``[S]`` drafts of each sequence."""
    next: Tensor
    """int32 ``[S]`` position behind the first output row."""
    proposed: Tensor | None
    """int32 ``[S, O - 1]``; ``None`` where no drafts can be."""


class StaticStep(NamedTuple):
    """A pass, taken apart."""

    token_ids: Tensor
    """int32 ``[n]``."""
    plain: WindowRows
    """For window-only layers and draft layers."""
    compressed: WindowRows
    """For layers with compressed keys."""
    ratio_1: RatioRows | None
    ratio_2: RatioRows | None
    outputs: OutputRows
    engram: tuple[Tensor, ...]
    """Per Engram layer int32 ``[n, columns]``."""
    draft_history: Tensor | None
    """int32 ``[S, W + K]``."""


class Selection(NamedTuple):
    """What an index source leaves for the layers behind it."""

    keys: Tensor
    """Compressed keys ``[f, D]``."""
    places: Tensor
    """int32 ``[n, k]`` each row's selection in them, -1 behind."""


class Published(NamedTuple):
    """Everything that layers leave for those behind them within a pass.

    ``None`` where no layer has left it yet, or where this pass does not need it.
    """

    selection: Selection | None = None
    latent: Tensor | None = None
    """``[e, D]`` entries that the pass completes, before RoPE, where a later layer owns the index
    keys."""
    candidates: Tensor | None = None
    """int32 ``[n, b]`` blocks of entries inside which later index sources select, ascending, -1
    behind."""


class DraftRows(NamedTuple):
    """Keys of a draft pass: ``[history of S sequences | S * K' rows]``."""

    turns: Tensor
    """fp32 ``[S * K', R]`` rotary rows."""
    keys: Tensor
    """int32 ``[S * K', W + K']`` keys that a row sees, -1 behind."""
    history: Tensor
    """int32 ``[S * W]`` ring places."""
    golden: Tensor
    """int32 ``[S]`` newest token of each sequence."""
    token_ids: Tensor
    """int32 ``[S * K']``: it, then the noise token."""

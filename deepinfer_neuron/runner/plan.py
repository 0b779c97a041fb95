"""What the scheduler tells the executor: ranges of sequences, no tokens and no tensors.

Tokens are looked up when the step runs. A step can therefore be planned while the one before it is
still running: the token that it will produce is found in the sequence's data by then.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer_neuron.runner.sequence import SequenceData

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Admission:
    """A sequence that enters a slot with this step.

    If ``cached`` tokens were found in the prefix cache, their window keys are copied from
    ``pages`` before the step runs.
    """

    slot: int
    data: SequenceData
    cached: int
    pages: tuple[int, ...]


CONTINUE = -1
"""Beginning of a sequence that goes on from its last token, wherever that is by then."""


@dataclass(frozen=True)
class StepPlan:
    """Rows of the sequences in ``slots``, each with its block and page table."""

    slots: Ints
    """``[s]``."""
    begin: Ints
    """``[s]`` position of each sequence's first row, or :data:`CONTINUE`."""
    rows: Ints
    """``[s]`` most rows of each sequence: known tokens first, then drafts."""
    samples: NDArray[np.bool_]
    """``[s]`` whether tokens follow the rows: then they reach the sequence's last token."""
    tables: Ints
    """``[s, w]`` copies of the block tables."""
    pages: Ints
    """``[s, w]`` window page of each block."""
    admissions: tuple[Admission, ...]
    most_drafts: int | None = None
    """Drafts that all continuing sequences verify together; ``None`` for as many as there are."""

    @property
    def num_rows(self) -> int:
        """Most rows of the step."""
        return int(self.rows.sum())

"""How many drafts a step verifies, from what they promise and what rows cost on this machine."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer_neuron.runner.executor import StepResult

_RESIDUALS = 5000
_LEAST_RESIDUALS = 10
_SAMPLER_TIMES = 9
_LEAST_SAMPLER_TIMES = 5


@dataclass(frozen=True)
class StepCurve:
    """Measured time of the backbone by rows: ascending row counts and milliseconds."""

    rows: tuple[int, ...]
    milliseconds: tuple[float, ...]

    def at(self, rows: int) -> float:
        """Milliseconds of a step, interpolated: on the host rows are not padded to a size."""
        return float(np.interp(rows, self.rows, self.milliseconds))


class DraftBudget:
    """Chooses the drafts of a step so that expected tokens per second are highest.

    The time of ``b`` rows is ``curve(b) + slope * b + sampler``. The slope follows how far steps
    were from the curve (long contexts); the sampler time (head, verification, draft pass) is the
    median of recent steps with as many sequences.

    Args:
        curve: measured when the engine started.
    """

    def __init__(self, curve: StepCurve) -> None:
        self.curve = curve
        self._residuals: deque[tuple[int, float]] = deque(maxlen=_RESIDUALS)
        self._sampler: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_SAMPLER_TIMES))
        self._slope = 0.0

    def observe(self, result: StepResult, sequences: int) -> None:
        """Learn from a finished step of ``sequences`` sequences."""
        if not result.rows:
            return
        excess = 1000 * result.forward_seconds - self.curve.at(result.rows)
        self._residuals.append((result.rows, excess / result.rows))
        self._sampler[sequences].append(1000 * (result.sample_seconds + result.draft_seconds))
        if len(self._residuals) % _LEAST_RESIDUALS == 0:
            self._slope = self._median_slope()

    def milliseconds(self, rows: int, sequences: int) -> float:
        """Expected time of a step."""
        return self.curve.at(rows) + self._slope * rows + self._sampler_time(sequences)

    def drafts(self, survivals: Sequence[NDArray[np.float32]]) -> int:
        """Drafts that the sequences of a step should verify together.

        Args:
            survivals: per sequence, the chance of every draft to be accepted. They must not come
                from the drafts that the step verifies.
        """
        sequences = len(survivals)
        chances = np.sort(np.concatenate([np.empty(0, np.float32), *survivals]))[::-1]
        expected = sequences + np.concatenate(([0.0], np.cumsum(chances, dtype=np.float64)))
        best, best_rate = 0, 0.0
        for drafts, tokens in enumerate(expected.tolist()):
            rows = sequences + drafts
            if rows > self.curve.rows[-1]:
                break
            rate = tokens / self.milliseconds(rows, sequences)
            if rate > best_rate:
                best, best_rate = drafts, rate
        return best

    def _median_slope(self) -> float:
        by_rows: dict[int, list[float]] = defaultdict(list)
        for rows, value in self._residuals:
            by_rows[rows].append(value)
        medians = [statistics.median(v) for v in by_rows.values() if len(v) >= _LEAST_RESIDUALS]
        return max(0.0, statistics.median(medians)) if medians else 0.0

    def _sampler_time(self, sequences: int) -> float:
        recent = self._sampler.get(sequences, deque())
        if len(recent) >= _LEAST_SAMPLER_TIMES:
            return statistics.median(recent)
        every = [value for times in self._sampler.values() for value in times]
        return statistics.median(every) if len(every) >= _LEAST_SAMPLER_TIMES else 0.0

"""Repeating a piece of work and timing it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """How much to measure.

    Attributes:
        times: repetitions wanted.
        seconds: no new repetition starts after this long, however few there are.
    """

    times: int
    seconds: float


def durations(work: Callable[[], object], budget: Budget) -> list[float]:
    """Seconds of each repetition after one warm-up call; at least one repetition.

    The warm-up is not part of the result but counts against the budget, so slow work is measured
    once and quick work as often as was asked.
    """
    start = time.perf_counter()
    work()
    spent = time.perf_counter() - start
    return repetitions(work, Budget(budget.times, budget.seconds - spent))


def repetitions(work: Callable[[], object], budget: Budget) -> list[float]:
    """Seconds of each repetition, without a warm-up; at least one."""
    end = time.perf_counter() + budget.seconds
    taken: list[float] = []
    while not taken or (len(taken) < budget.times and time.perf_counter() < end):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return taken

"""The simulated device: its rules, its counts and its steps."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from deepinfer_neuron.errors import DeviceRuleError, PlatformError
from deepinfer_neuron.platform.simulator.counts import (
    Counts,
    GraphReport,
    SimulatorReport,
    StepKind,
    StepReport,
    Violation,
)
from deepinfer_neuron.platform.simulator.eager import Eager
from deepinfer_neuron.platform.simulator.graph_size import GraphSize
from deepinfer_neuron.platform.simulator.limits import MODES, Limits, Mode
from deepinfer_neuron.platform.simulator.memory import Ledger
from deepinfer_neuron.platform.simulator.rules import RULES

_HERE = Path(__file__).parent
_SKIPPED = (str(Path(torch.__file__).parent), str(_HERE), str(_HERE.parent / "regions.py"), "<")


class Simulator:
    """One simulated core.

    Args:
        mode: ``"strict"`` raises :class:`DeviceRuleError` where a rule is broken, ``"warn"``
            collects, ``"off"`` counts only.
        limits: sizes and counts behind the rules.
        waived: ids of rules that are not looked at.

    Raises:
        PlatformError: ``mode`` or a rule does not exist.
    """

    def __init__(
        self,
        mode: Mode = "strict",
        limits: Limits | None = None,
        waived: frozenset[str] = frozenset(),
    ) -> None:
        if mode not in MODES:
            raise PlatformError(f"mode {mode!r} is not known; use one of {', '.join(MODES)}.")
        if waived - RULES.keys():
            unknown = ", ".join(sorted(waived - RULES.keys()))
            raise PlatformError(f"there is no rule {unknown}; rules have ids such as G08.")
        self.mode = mode
        self.limits = limits or Limits()
        self.waived = waived
        self.counts = Counts()
        self.memory = Ledger(self._on_allocate)
        self.eager = Eager(self)
        self.graphs: list[GraphReport] = []
        self.sequence: list[str] = []
        self._violations: dict[Violation, None] = {}
        self._steps = 0
        self._kinds: dict[str, StepKind] = {}
        self._last: StepReport | None = None
        self._step: _OpenStep | None = None

    @property
    def checking(self) -> bool:
        """Whether rules are looked at."""
        return self.mode != "off"

    @property
    def in_step(self) -> bool:
        """Whether a step is under way."""
        return self._step is not None

    @property
    def steps(self) -> int:
        """Steps that have ended."""
        return self._steps

    def launched(self, size: GraphSize) -> None:
        """Count the work of one launch of a graph, and check that it fits.

        Raises:
            DeviceRuleError: it does not and the mode is strict.
        """
        counts = self.counts
        counts.collectives += size.collectives
        counts.collective_bytes += size.collective_bytes
        counts.flops += size.flops
        counts.graph_bytes += size.input_bytes + size.output_bytes
        counts.converted += size.converted
        needed = self.memory.now + size.output_bytes + size.temporary_bytes
        most = self.limits.memory - self.limits.reserved
        if needed > most:
            self.violate(
                "M05",
                f"{self.memory.now} bytes allocated, {size.output_bytes} of results and up to "
                f"{size.temporary_bytes} in between, {most} usable",
            )

    def violate(self, rule: str, detail: str, where: str | None = None) -> None:
        """Report that ``rule`` was broken.

        Args:
            rule: its id.
            detail: the operator with its shapes, or a count.
            where: Python location; by default the innermost frame outside torch.

        Raises:
            DeviceRuleError: the mode is strict.
        """
        if not self.checking or rule in self.waived:
            return
        violation = Violation(rule, detail, python_location() if where is None else where)
        self._violations[violation] = None
        if self._step is not None:
            self._step.violations[violation] = None
        if self.mode == "strict":
            meaning = RULES[rule]
            raise DeviceRuleError(rule, meaning.title, detail, violation.where, meaning.workaround)

    def record(self, entry: str) -> None:
        """Note a region or collective in the order of the step."""
        if self._step is not None:
            self.sequence.append(entry)

    def begin_step(self, label: str = "") -> None:
        """Begin to count a step.

        Raises:
            PlatformError: the step before was not ended.
        """
        if self._step is not None:
            raise PlatformError("a step was begun within another; end_step() comes first.")
        if self._steps == 0:
            self._check_load()
        self.sequence.clear()
        self.memory.peak = self.memory.now
        self._step = _OpenStep(label, self.counts.copy())

    def end_step(self) -> StepReport:
        """End the step and check its counts.

        Raises:
            PlatformError: no step was begun.
            DeviceRuleError: a count is above its limit and the mode is strict.
        """
        step = self._close()
        counts = self.counts.minus(step.before)
        try:
            self._check_step(counts)
        finally:
            self._last = StepReport(
                step.label,
                counts,
                self.memory.now,
                self.memory.peak,
                tuple(self.sequence),
                tuple(step.violations),
            )
            self._steps += 1
            kind = self._kinds.get(step.label, StepKind(step.label, 0, Counts()))
            together = kind.counts.plus(counts)
            self._kinds[step.label] = StepKind(step.label, kind.steps + 1, together)
            self._step = None
        return self._last

    @contextmanager
    def step(self, label: str = "") -> Iterator[None]:
        """A step as a block; what breaks it comes through."""
        self.begin_step(label)
        try:
            yield
        except BaseException:
            self._step = None
            raise
        self.end_step()

    def abandon_step(self) -> None:
        """Forget a step that failed."""
        self._step = None

    def report(self) -> SimulatorReport:
        """Everything since the device was switched on."""
        return SimulatorReport(
            self.mode,
            self.counts.copy(),
            self._steps,
            tuple(self._kinds.values()),
            self._last,
            tuple(self.graphs),
            self.memory.now,
            self.memory.peak,
            self.limits.usable,
            tuple(self._violations),
        )

    def _close(self) -> _OpenStep:
        if self._step is None:
            raise PlatformError("a step was ended that was not begun; begin_step() comes first.")
        return self._step

    def _check_load(self) -> None:
        distinct = self.eager.load_signatures
        if distinct > self.limits.load_signatures:
            self.violate("H06", f"{distinct} operators with their shapes before the first step")

    def _check_step(self, counts: Counts) -> None:
        limits = self.limits
        if counts.uploads > limits.uploads:
            self.violate("H01", f"{counts.uploads} uploads in a step, {limits.uploads} allowed")
        if counts.downloads > limits.downloads:
            detail = f"{counts.downloads} downloads in a step, {limits.downloads} allowed"
            self.violate("H01", detail)
        if counts.eager > limits.eager:
            names = ", ".join(f"{name} x{n}" for name, n in counts.by_operator.items())
            self.violate(
                "H07",
                f"{counts.eager} operators outside regions in a step, {limits.eager} allowed: "
                f"{names}",
            )
        if limits.regions is not None and counts.regions > limits.regions:
            detail = f"{counts.regions} regions in a step, {limits.regions} allowed"
            self.violate("G12", detail)

    def _on_allocate(self, size: int) -> None:
        if self.memory.now > self.limits.usable:
            self.violate(
                "M01",
                f"{self.memory.now} bytes allocated, {size} of them now, {self.limits.usable} "
                "usable",
            )
        if self.in_step and size > self.limits.step_allocation:
            detail = f"one allocation of {size} bytes, {self.limits.step_allocation} allowed"
            self.violate("M02", detail)


class _OpenStep:
    """A step that has not ended."""

    def __init__(self, label: str, before: Counts) -> None:
        self.label = label
        self.before = before
        self.violations: dict[Violation, None] = {}


def python_location() -> str:
    """File and line of the innermost frame that is neither torch's nor the simulator's."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_SKIPPED):
            return f"{name}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""

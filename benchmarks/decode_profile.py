"""Where a decode step of the engine spends its time, operator by operator.

Every public function of ``deepinfer_neuron.ops`` is replaced by a wrapper while the requests run.
A first run measures time; a second one, slower, looks at every torch operation. The time of a
function is its own: functions that it calls through a wrapper count for themselves.
Bytes are those that torch operations read and write, intermediate results included.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.engine_load import params, prompts
from deepinfer_neuron import ops
from deepinfer_neuron.llm import LLM
from deepinfer_neuron.runner.executor import Executor
from deepinfer_neuron.runner.plan import StepPlan

_OF_FEW_ROWS = frozenset(
    ("embedding", "gather", "index", "index_copy_", "index_put_", "index_select", "scatter_")
)
"""Torch operations that touch few rows of their first argument."""

LARGE = 2.0
"""A torch operation is large if it takes this many times as long as one on a single number, so that
at least half of its time is work; both are measured in the same way."""

MEMORY, DISPATCH, KERNELS = "memory", "dispatch", "kernels"
"""What may bound an operator; see :func:`bound`."""

PROMPT = 48
_PACKAGE = "deepinfer_neuron"


@dataclass
class Cost:
    """What an operator cost in the decode steps.

    Attributes:
        calls: how many there were.
        seconds: that they took, without the functions that count for themselves.
        bytes: that its torch operations touched.
        operations: seconds of each torch operation, by its name and the bytes that it touched.
    """

    calls: int = 0
    seconds: float = 0.0
    bytes: int = 0
    operations: dict[tuple[str, int], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )

    @property
    def launches(self) -> int:
        """Torch operations."""
        return sum(map(len, self.operations.values()))

    def large(self, fixed: float) -> float:
        """Share of the time of its torch operations that passes in large ones.

        Equal operations count with their median, so that interruptions do not look like work.
        """
        total = large = 0.0
        for taken in self.operations.values():
            median = statistics.median(taken)
            total += median * len(taken)
            large += median * len(taken) if median > LARGE * fixed else 0.0
        return large / total if total else 0.0


@dataclass(frozen=True)
class Share:
    """One operator in a decode step.

    Attributes:
        name: module and function.
        seconds: per step.
        calls: per step.
        part: share of the step.
        launches: torch operations per step.
        large: share of their time that passes in large ones.
        gbytes: 10^9 bytes per second.
        bound: what bounds it.
    """

    name: str
    seconds: float
    calls: float
    part: float
    launches: float
    large: float
    gbytes: float
    bound: str


@dataclass(frozen=True)
class Profile:
    """A decode step.

    Attributes:
        batch: requests that decode together.
        seconds: mean of a step.
        operators: all operators, slowest first.
    """

    batch: int
    seconds: float
    operators: tuple[Share, ...]

    @property
    def inside(self) -> float:
        """Share of the step inside of operators."""
        return sum(item.part for item in self.operators)


class Recorder:
    """Adds up what the wrapped functions cost while it is active.

    Attributes:
        counting: whether to look at torch operations, which makes the times of the operators
            meaningless.
        costs: by operator.
        steps: seconds of each decode step of the whole batch.
        fixed: seconds of torch operations on one number, measured in every step.
    """

    def __init__(self, *, counting: bool) -> None:
        self.counting = counting
        self.active = False
        self.costs: dict[str, Cost] = defaultdict(Cost)
        self.steps: list[float] = []
        self.fixed: list[float] = []
        self._stack: list[str] = []
        self._inner: list[float] = []

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, recorded."""

        @functools.wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return function(*args, **kwargs)
            self._stack.append(name)
            self._inner.append(0.0)
            started = time.perf_counter()
            try:
                result = function(*args, **kwargs)
            finally:
                taken = time.perf_counter() - started
                self._stack.pop()
                inner = self._inner.pop()
                if self._inner:
                    self._inner[-1] += taken
            cost = self.costs[name]
            cost.calls += 1
            cost.seconds += taken - inner
            return result

        return recorded

    def launched(self, name: str, moved: int, seconds: float) -> None:
        """Count a torch operation, which touched that many bytes, for the innermost function."""
        if self.active and self._stack:
            cost = self.costs[self._stack[-1]]
            cost.bytes += moved
            cost.operations[name, moved].append(seconds)

    def step(self, run: Callable[..., Any], batch: int) -> Callable[..., Any]:
        """The executor's method, recorded if the whole batch decodes."""

        def recorded(executor: Executor, plan: StepPlan) -> Any:
            decodes = len(plan.rows) == batch and bool((plan.rows == 1).all())
            self.active = decodes and not plan.admissions
            if self.active and self.counting:
                self.fixed += fixed_costs()
            started = time.perf_counter()
            try:
                with Launches(self.launched) if self.counting else nullcontext():
                    return run(executor, plan)
            finally:
                if self.active:
                    self.steps.append(time.perf_counter() - started)
                self.active = False

        return recorded


class Launches(TorchDispatchMode):
    """Reports name, bytes and seconds of every torch operation."""

    def __init__(self, report: Callable[[str, int, float], None]) -> None:
        super().__init__()
        self.report = report

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        started = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        taken = time.perf_counter() - started
        self.report(func.overloadpacket.__name__, touched(func, args, result), taken)
        return result


def fixed_costs() -> list[float]:
    """What torch operations cost before they do any work, as :class:`Launches` sees it."""
    one, taken = torch.ones(1), []
    with Launches(lambda *seen: taken.append(seen[-1])):
        for _ in range(50):
            one + 1.0
    return taken


def touched(operation: OpOverload, args: Sequence[Any], result: Any) -> int:
    """Bytes that a torch operation reads and writes; a view touches none."""
    if operation.is_view:
        return 0
    if operation.overloadpacket.__name__ in _OF_FEW_ROWS:
        return held(args[1:]) + (0 if result is args[0] else held(result))
    return held(args) + held(result)


def held(value: Any) -> int:
    """Bytes of the tensors in an argument or a result."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, list | tuple):
        return sum(held(item) for item in value)
    return 0


def operators() -> dict[FunctionType, str]:
    """Public functions of the operator modules, with their names."""
    found = {}
    for info in pkgutil.iter_modules(ops.__path__):
        module = importlib.import_module(f"{ops.__name__}.{info.name}")
        for name, value in vars(module).items():
            own = isinstance(value, FunctionType) and value.__module__ == module.__name__
            if own and not name.startswith("_") and not inspect.isgeneratorfunction(value):
                found[value] = f"{info.name}.{name}"
    return found


@contextmanager
def wrapped(recorder: Recorder, batch: int) -> Iterator[None]:
    """Replace the operators, and the executor's method, wherever the package refers to them."""
    wrappers = {function: recorder.wrap(name, function) for function, name in operators().items()}
    modules = [m for name, m in sys.modules.items() if name.split(".")[0] == _PACKAGE]
    replaced = [
        (module, name, value)
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, FunctionType) and value in wrappers
    ]
    run = Executor.run
    try:
        for module, name, value in replaced:
            setattr(module, name, wrappers[value])
        Executor.run = recorder.step(run, batch)  # type: ignore[method-assign]
        yield
    finally:
        Executor.run = run  # type: ignore[method-assign]
        for module, name, value in replaced:
            setattr(module, name, value)


def _record(directory: Path, batch: int, tokens: int, recorder: Recorder) -> Recorder:
    """Run the requests under a recorder."""
    with (
        LLM(directory, nextn=0, enable_prefix_caching=False, max_model_len=512) as llm,
        wrapped(recorder, batch),
    ):
        given = prompts(batch, PROMPT, llm.checkpoint.config.vocab_size)
        llm.generate(given, params(tokens), use_tqdm=False)  # type: ignore[arg-type]
    return recorder


def bound(gbytes: float, copy_gbytes: float, large: float) -> str:
    """What bounds an operator.

    ``memory`` if its torch operations move bytes at half the bandwidth of a copy or more, else
    ``kernels`` if at least half of their time passes in large ones, be it with arithmetic or with
    cache misses, else ``dispatch``: many small operations, whose fixed cost is most of it.
    """
    if gbytes >= 0.5 * copy_gbytes:
        return MEMORY
    return KERNELS if large >= 0.5 else DISPATCH


def profile(directory: Path, batch: int, tokens: int, copy_gbytes: float) -> Profile:
    """Decode with so many requests together, greedily.

    Args:
        directory: checkpoint.
        batch: requests.
        tokens: per request; the first comes from the prompt.
        copy_gbytes: bandwidth of a large copy.

    Raises:
        ValueError: no step decoded the whole batch.
    """
    timed = _record(directory, batch, tokens, Recorder(counting=False))
    counted = _record(directory, batch, tokens, Recorder(counting=True))
    if not timed.steps or not counted.steps:
        raise ValueError(f"no step decoded {batch} requests together")
    step, steps = statistics.mean(timed.steps), len(timed.steps)
    fixed = statistics.median(counted.fixed)
    shares = []
    for name, cost in timed.costs.items():
        seconds, other = cost.seconds / steps, counted.costs[name]
        large, gbytes = other.large(fixed), other.bytes / len(counted.steps) / seconds / 1e9
        shares.append(
            Share(
                name=name,
                seconds=seconds,
                calls=cost.calls / steps,
                part=seconds / step,
                launches=other.launches / len(counted.steps),
                large=large,
                gbytes=gbytes,
                bound=bound(gbytes, copy_gbytes, large),
            )
        )
    shares.sort(key=lambda share: -share.seconds)
    return Profile(batch, step, tuple(shares))

"""The benchmark of the operators runs, and compares equal things; its numbers do not matter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.decode_profile import (
    DISPATCH,
    KERNELS,
    MEMORY,
    Launches,
    Recorder,
    bound,
    operators,
    wrapped,
)
from benchmarks.markers import markers
from benchmarks.operator_cases import QUICK, Case, Disagreement, check
from benchmarks.operator_table import CASES, MISSING
from benchmarks.operators import NAME, main, medians
from benchmarks.timing import Budget
from deepinfer_neuron.compat import tilelang_ops
from deepinfer_neuron.model import attention
from deepinfer_neuron.ops.norm import rms_norm


def test_every_operator_has_a_case() -> None:
    assert not MISSING
    assert [f"{name}_tl" for name in CASES] == sorted(tilelang_ops.__all__)


@pytest.mark.parametrize("name", CASES)
def test_both_formulations_agree(name: str) -> None:
    for rows in (*QUICK.rows, 37):
        case = CASES[name](rows, QUICK)
        check(name, case)
        assert case.bytes > 0


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1])),
        (torch.tensor([1.0, -torch.inf]), torch.tensor([1.0, 2.0])),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan])),
        (torch.zeros(2), torch.zeros(3)),
    ],
)
def test_different_results_are_refused(left: torch.Tensor, right: torch.Tensor) -> None:
    case = Case(lambda: (left,), lambda: (right,), 1, close=0.01, differing=0.1)
    with pytest.raises(Disagreement, match="result 0"):
        check("case", case)


def test_a_missing_result_is_refused() -> None:
    with pytest.raises(Disagreement, match="1 results"):
        check("case", Case(lambda: (torch.zeros(1),), lambda: (), 1))


def test_new_results_are_copied_to_buffers_and_those_in_place_are_not() -> None:
    state = torch.zeros(2)

    def plain() -> tuple[torch.Tensor, ...]:
        return torch.ones(3, dtype=torch.int64), state

    buffered = check("case", Case(lambda: (torch.ones(3, dtype=torch.int32), state), plain, 1, 1))
    results = [buffered(), buffered()]
    assert results[0][0] is results[1][0]
    assert results[0][0].dtype == torch.int32
    assert results[0][0].tolist() == [1, 1, 1]
    assert results[0][1] is state


def test_medians_are_measured_in_turns() -> None:
    calls: list[int] = []
    works = [lambda number=number: calls.append(number) or [] for number in range(2)]
    assert all(seconds >= 0.0 for seconds in medians(works, Budget(3, 10.0)))
    assert calls == [0, 1] * 3


@pytest.mark.parametrize(
    ("gbytes", "large", "expected"),
    [(5.0, 0.1, MEMORY), (4.9, 0.5, KERNELS), (4.9, 0.4, DISPATCH)],
)
def test_the_rule_of_the_bounds(gbytes: float, large: float, expected: str) -> None:
    assert bound(gbytes, 10.0, large) == expected


def test_what_torch_operations_touch() -> None:
    seen: list[int] = []
    table, index, rows = torch.zeros(100, 4), torch.tensor([3, 5]), torch.ones(2, 4)
    with Launches(lambda _, moved, seconds: seen.append(moved)):
        _ = table + table
        _ = table[:50]
        _ = table.index_select(0, index)
        table.index_copy_(0, index, rows)
    assert seen == [3 * 1600, 0, 16 + 32, 16 + 32]


def test_large_operations_of_a_recorded_function() -> None:
    """An interruption of a small operation does not make it large."""
    recorder = Recorder(counting=True)

    def work() -> None:
        for seconds in (1.0, 1.0, 90.0):
            recorder.launched("small", 7, seconds)
        recorder.launched("large", 9, 3.0)

    recorded = recorder.wrap("work", work)
    recorded()
    assert not recorder.costs
    recorder.active = True
    recorded()
    cost = recorder.costs["work"]
    assert (cost.calls, cost.launches, cost.bytes) == (1, 4, 3 * 7 + 9)
    assert cost.large(fixed=1.0) == 0.5
    assert cost.large(fixed=2.0) == 0.0


def test_wrappers_are_taken_off_again() -> None:
    with wrapped(Recorder(counting=False), 1):
        assert attention.rms_norm is not rms_norm
    assert attention.rms_norm is rms_norm
    assert operators()[rms_norm] == "norm.rms_norm"


def test_a_quick_run_writes_its_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document, (first, last) = tmp_path / "doc.md", markers(NAME)
    document.write_text(f"before\n{first}\nstale\n{last}\nafter\n", encoding="utf-8")
    arguments = ["--preset", "nano", "--quick", "--checkpoints", str(tmp_path)]
    assert main([*arguments, "--markdown", str(document)]) == 0
    printed = capsys.readouterr().out
    for name in CASES:
        assert f"| `{name}` |" in printed
    for batch in (1, 2):
        assert f"Decode step of `nano`, batch {batch}:" in printed
    text = document.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "stale" not in text
    assert printed.strip() in text


def test_a_document_without_markers_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "doc.md"
    document.write_text("nothing\n", encoding="utf-8")
    arguments = ["--preset", "nano", "--quick", "--checkpoints", str(tmp_path)]
    assert main([*arguments, "--markdown", str(document)]) == 1
    assert "does not hold the lines" in capsys.readouterr().err

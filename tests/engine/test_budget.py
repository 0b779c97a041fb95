"""How many drafts a step verifies, and where measured step times are kept."""

from __future__ import annotations

import random
import time
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from deepinfer_neuron.engine.budget import DraftBudget, StepCurve
from deepinfer_neuron.engine.step_times import CurveFiles, curve_key, row_counts
from deepinfer_neuron.runner.executor import StepResult
from deepinfer_neuron.sampling.drafts import survival


def finished(rows: int, forward: float, sampler: float) -> StepResult:
    return StepResult((), rows, forward + sampler, forward, sampler / 2, sampler / 2)


class TestBudget:
    def test_worked_example(self) -> None:
        """Times 20 20 21 24 30 ms at 1 2 4 8 12 rows, sampler 2 ms, taken as a staircase."""
        steps = (1, 2, 3, 4, 5, 8, 9, 12)
        curve = StepCurve(steps, (20.0, 20.0, 21.0, 21.0, 24.0, 24.0, 30.0, 30.0))
        budget = DraftBudget(curve)
        for _ in range(5):
            budget.observe(finished(2, 0.020, 0.002), 2)
        first, second = survival([0.9, 0.8, 0.5, 0.4, 0.3]), survival([0.6, 0.5, 0.9, 0.9, 0.9])
        assert budget.drafts([first, second]) == 6

    def test_flat_costs_verify_everything_and_steep_ones_nothing(self) -> None:
        ones = [survival([0.5] * 5)] * 3
        flat = StepCurve((1, 18), (10.0, 10.0))
        steep = StepCurve((1, 18), (1.0, 18.0))
        assert DraftBudget(flat).drafts(ones) == 15
        assert DraftBudget(steep).drafts(ones) == 0

    def test_certain_drafts_and_hopeless_ones(self) -> None:
        curve = StepCurve((1, 24), (10.0, 20.0))
        assert DraftBudget(curve).drafts([survival([1.0] * 5)] * 4) == 20
        assert DraftBudget(curve).drafts([survival([0.0] * 5)] * 4) == 0
        assert DraftBudget(curve).drafts([survival([])] * 4) == 0

    def test_no_more_rows_than_were_measured(self) -> None:
        curve = StepCurve((1, 8), (10.0, 10.0))
        assert DraftBudget(curve).drafts([survival([1.0] * 5)] * 4) == 4
        assert DraftBudget(curve).drafts([survival([1.0] * 5)] * 9) == 0

    def test_ties_take_fewer(self) -> None:
        """Twice the tokens in twice the time is no gain."""
        curve = StepCurve((1, 2, 4), (10.0, 20.0, 40.0))
        assert DraftBudget(curve).drafts([survival([1.0, 1.0])]) == 0

    def test_long_contexts_raise_the_slope_and_fast_steps_do_not_lower_it(self) -> None:
        budget = DraftBudget(StepCurve((1, 16), (10.0, 10.0)))
        for _ in range(9):
            budget.observe(finished(4, 0.018, 0.0), 4)
        assert budget.milliseconds(4, 4) == pytest.approx(10.0)
        budget.observe(finished(4, 0.018, 0.0), 4)
        assert budget.milliseconds(4, 4) == pytest.approx(18.0)
        for _ in range(5000):
            budget.observe(finished(4, 0.001, 0.0), 4)
        assert budget.milliseconds(4, 4) == pytest.approx(10.0)

    def test_sampler_times_need_five_samples_and_prefer_the_same_size(self) -> None:
        budget = DraftBudget(StepCurve((1, 16), (10.0, 10.0)))
        for _ in range(4):
            budget.observe(finished(4, 0.010, 0.004), 4)
        assert budget.milliseconds(4, 4) == pytest.approx(10.0)
        budget.observe(finished(4, 0.010, 0.004), 4)
        assert budget.milliseconds(4, 4) == pytest.approx(14.0)
        assert budget.milliseconds(4, 9) == pytest.approx(14.0)
        budget.observe(finished(0, 0.0, 0.0), 4)
        assert budget.milliseconds(4, 4) == pytest.approx(14.0)

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(seed=st.integers(0, 1 << 32))
    def test_the_choice_is_the_best_of_all(self, seed: int) -> None:
        rng = random.Random(seed)
        rows = (1, 4, 8, 16, 40)
        curve = StepCurve(rows, tuple(rng.uniform(5, 50) for _ in rows))
        chances = [survival([rng.random() for _ in range(5)]) for _ in range(rng.randint(1, 6))]
        flat = np.sort(np.concatenate(chances))[::-1]
        count = len(chances)
        rates = [
            (count + flat[:drafts].sum(dtype=np.float64)) / curve.at(count + drafts)
            for drafts in range(len(flat) + 1)
        ]
        chosen = DraftBudget(curve).drafts(chances)
        assert rates[chosen] == pytest.approx(max(rates))


class TestFiles:
    ROWS = (1, 2, 4)
    CURVE = StepCurve(ROWS, (3.0, 4.0, 5.0))

    def test_a_curve_comes_back(self, tmp_path: Path) -> None:
        files = CurveFiles(tmp_path / "new", 3600)
        assert files.load("k", self.ROWS) is None
        files.save("k", self.CURVE)
        assert files.load("k", self.ROWS) == self.CURVE
        assert files.load("other", self.ROWS) is None
        assert not list((tmp_path / "new").glob(".*"))

    def test_the_newest_wins_and_old_ones_are_measured_again(self, tmp_path: Path) -> None:
        now = int(time.time())
        (tmp_path / f"k.a.{now - 50}").write_text("[1, 1, 1]")
        (tmp_path / f"k.b.{now - 20}").write_text("[2, 2, 2]")
        assert CurveFiles(tmp_path, 60).load("k", self.ROWS) == StepCurve(self.ROWS, (2, 2, 2))
        assert CurveFiles(tmp_path, 10).load("k", self.ROWS) is None

    @pytest.mark.parametrize(
        "content",
        [
            "",
            "[1, 2",
            "[1, 2]",
            "[0, 1, 2]",
            '["a", 1, 2]',
            "3",
            "[Infinity, 1, 1]",
            "[NaN, 1, 1]",
            '{"1": 1, "2": 2, "3": 3}',
            f"[{'1' * 400}, 1, 1]",
            "[" * 100_000,
        ],
    )
    def test_damaged_files_are_passed_over(self, tmp_path: Path, content: str) -> None:
        files = CurveFiles(tmp_path, 3600)
        (tmp_path / f"k.a.{int(time.time())}").write_text(content)
        assert files.load("k", self.ROWS) is None
        (tmp_path / f"k.b.{int(time.time()) - 5}").write_text("[1, 2, 3]")
        assert files.load("k", self.ROWS) == StepCurve(self.ROWS, (1, 2, 3))

    def test_a_file_from_the_future_never_counts(self, tmp_path: Path) -> None:
        (tmp_path / f"k.a.{int(time.time()) + 5000}").write_text("[1, 1, 1]")
        assert CurveFiles(tmp_path, 3600).load("k", self.ROWS) is None

    def test_other_files_are_left_alone(self, tmp_path: Path) -> None:
        for name in ("x.y.²", "notes", "k.a.b", "k..-5"):
            (tmp_path / name).write_text("kept")
        files = CurveFiles(tmp_path, 60)
        files.save("k", self.CURVE)
        assert files.load("k", self.ROWS) == self.CURVE
        assert len(list(tmp_path.iterdir())) == 5

    def test_expired_files_go_after_two_hours_of_grace(self, tmp_path: Path) -> None:
        now = int(time.time())
        fresh, old = tmp_path / f"k.a.{now - 3700}", tmp_path / f"k.b.{now - 60 - 7300}"
        for path in (fresh, old):
            path.write_text("[1, 1, 1]")
        CurveFiles(tmp_path, 60).save("k", self.CURVE)
        assert fresh.exists()
        assert not old.exists()

    def test_a_file_where_the_directory_should_be_is_no_error(self, tmp_path: Path) -> None:
        (tmp_path / "taken").write_text("")
        CurveFiles(tmp_path / "taken", 60).save("k", self.CURVE)

    def test_keys_tell_settings_apart(self) -> None:
        keys = {
            curve_key("a", (1, 2), "packed", "free", 1),
            curve_key("b", (1, 2), "packed", "free", 1),
            curve_key("a", (1, 4), "packed", "free", 1),
            curve_key("a", (1, 2), "expanded", "free", 1),
            curve_key("a", (1, 2), "packed", "free", 2),
            curve_key("a", (1, 2), "packed", "fixed", 1),
        }
        assert len(keys) == 6

    @pytest.mark.parametrize(
        ("most", "counts"),
        [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (64, (1, 2, 4, 8, 16, 32, 64))],
    )
    def test_row_counts(self, most: int, counts: tuple[int, ...]) -> None:
        assert row_counts(most) == counts

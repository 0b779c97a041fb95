"""The engine's benchmark runs through; its numbers are nobody's test."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import draft_speed
from benchmarks.engine_load import NAME, main
from benchmarks.markers import markers

BEGIN, END = markers(NAME)


def test_a_quick_run_writes_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = tmp_path / "doc.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    arguments = ["--preset", "nano", "--quick", "--checkpoints", str(tmp_path)]
    assert main([*arguments, "--markdown", str(document)]) == 0
    printed = capsys.readouterr().out
    for what in ("4 requests together", "asynchronous steps", "prefix cached", "planning a step"):
        assert what in printed
    text = document.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert printed.strip() in text


def test_a_document_without_markers_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "doc.md"
    document.write_text("nothing\n", encoding="utf-8")
    arguments = ["--preset", "nano", "--quick", "--checkpoints", str(tmp_path)]
    assert main([*arguments, "--markdown", str(document)]) == 1
    assert "does not hold the lines" in capsys.readouterr().err


def test_a_quick_draft_run_compares_with_its_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "doc.md"
    begin, end = markers(draft_speed.NAME)
    document.write_text(f"{begin}\n{end}\n", encoding="utf-8")
    arguments = ["--preset", "nano", "--quick", "--checkpoints", str(tmp_path)]
    assert draft_speed.main([*arguments, "--markdown", str(document)]) == 0
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in document.read_text(encoding="utf-8").splitlines()
        if line.startswith(("| 1 |", "| 2 |"))
    ]
    assert [row[1] for row in rows] == ["0.0", "0.5", "0.8", "1.0"] * 2
    assert rows[0][2] == "1.00"
    assert float(rows[3][2]) > 3
    assert "verification" in capsys.readouterr().out

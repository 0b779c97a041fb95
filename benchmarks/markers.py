"""Tables of a document that a benchmark writes itself, between a pair of comments."""

from __future__ import annotations

from pathlib import Path


def markers(name: str) -> tuple[str, str]:
    """The lines around the table of a benchmark."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def around(path: Path, name: str) -> tuple[str, str]:
    """What a document holds before and behind the markers.

    Raises:
        ValueError: it does not hold them.
    """
    first, last = markers(name)
    before, begin, rest = path.read_text(encoding="utf-8").partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(
            f"{path} does not hold the lines {first} and {last}; add them where the tables belong."
        )
    return before, after


def write_between(path: Path, name: str, text: str) -> None:
    """Replace what stands between the markers."""
    before, after = around(path, name)
    first, last = markers(name)
    path.write_text(f"{before}{first}\n\n{text}\n{last}{after}", encoding="utf-8")

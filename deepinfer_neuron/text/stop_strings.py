"""Stop strings: ending an answer at a given text, while the answer is still being written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer_neuron.errors import RequestError


def first_match(text: str, words: Sequence[str]) -> tuple[int, str] | None:
    """Start and word of the occurrence in ``text`` that ends first, or None.

    Of several occurrences with the same end, the one that starts first (the longest word) counts.
    """
    found = [(start, word) for word in words if (start := text.find(word)) >= 0]
    return min(found, key=lambda hit: (hit[0] + len(hit[1]), hit[0]), default=None)


def unfinished_match(text: str, words: Sequence[str]) -> int:
    """Length of the longest end of ``text`` with which a word begins but is not yet complete."""
    longest = min(len(text), max(map(len, words), default=1) - 1)
    return next(
        (
            length
            for length in range(longest, 0, -1)
            if any(len(word) > length and word.startswith(text[-length:]) for word in words)
        ),
        0,
    )


@dataclass(frozen=True)
class StopResult:
    """What one piece of text led to: the text to show now, and the stop string that was met."""

    text: str
    matched: str | None


class StopStrings:
    """Looks for stop strings in a text that arrives in pieces.

    The stop string that is complete first ends the answer; among those completed by the same
    character, the longest. Of two stop strings with the same start that is the shorter one. The
    outcome is therefore the same as that of a search in the whole text, however it was split, and
    a decision never waits for text that comes after it.

    Text that might turn out to be the start of a stop string is held back, less than the longest
    stop string; nothing that was shown is ever taken back.
    """

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        """Watches for the strings ``stop``; ``include`` shows the one that was met as well.

        Raises ``RequestError`` for an empty stop string, which every text would meet.
        """
        if isinstance(stop, str) or not all(isinstance(word, str) and word for word in stop):
            raise RequestError(f"stop is {stop!r}; give a sequence of strings that are not empty.")
        self._stop = tuple(stop)
        self._include = include
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that has been met, or None."""
        return self._matched

    def push(self, delta: str, final: bool = False) -> StopResult:
        """Appends ``delta`` and returns the text that has become certain.

        ``final`` says that nothing follows, so nothing is held back. Once a stop string has been
        met, all further text is dropped.
        """
        if self._matched is not None:
            return StopResult("", self._matched)
        text = self._held + delta
        hit = first_match(text, self._stop)
        if hit is None:
            held = 0 if final else unfinished_match(text, self._stop)
            shown = len(text) - held
            self._held = text[shown:]
            return StopResult(text[:shown], None)
        start, self._matched = hit
        self._held = ""
        return StopResult(text[: start + len(hit[1]) if self._include else start], self._matched)

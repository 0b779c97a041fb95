"""Stop strings, met in text that arrives in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_neuron.errors import RequestError
from deepinfer_neuron.text.stop_strings import StopResult, StopStrings


def run(stop: list[str], pieces: list[str], *, include: bool = False) -> tuple[list[str], str]:
    """Shown pieces (the last one from the end of the text) and the stop string met, or ""."""
    watcher = StopStrings(stop, include=include)
    results = [watcher.push(piece) for piece in pieces] + [watcher.push("", final=True)]
    assert watcher.matched == results[-1].matched
    return [result.text for result in results], results[-1].matched or ""


class TestPush:
    """What is shown, and when."""

    def test_without_stop_strings_text_passes(self) -> None:
        assert StopStrings(()).push("any text") == StopResult("any text", None)

    def test_text_before_the_stop_string_is_shown(self) -> None:
        assert StopStrings(["END"]).push("some END text") == StopResult("some ", "END")
        result = StopStrings(["END"], include=True).push("some END text")
        assert result == StopResult("some END", "END")

    def test_only_a_possible_start_is_held_back(self) -> None:
        shown, matched = run(["\n\nHuman:"], ["one\n", "two\n", "\n", "Hu", "man", ":x"])
        assert shown == ["one", "\ntwo", "", "", "", "", ""]
        assert matched == "\n\nHuman:"

    def test_a_wrong_start_is_shown_later(self) -> None:
        assert run(["aab"], ["aa", "aa", "c"]) == (["", "aa", "aac", ""], "")

    def test_the_end_of_the_text_shows_what_was_held_back(self) -> None:
        assert run(["abc"], ["xab"]) == (["x", "ab"], "")
        assert StopStrings(["abc"]).push("xab", final=True) == StopResult("xab", None)

    def test_nothing_follows_a_stop_string(self) -> None:
        assert run(["b"], ["ab", "more", "b"]) == (["a", "", "", ""], "b")

    @pytest.mark.parametrize(
        ("stop", "text", "shown", "matched"),
        [
            (["abcd", "bc"], "xabcd", "xa", "bc"),  # complete first, though it starts later
            (["abc", "ab"], "xabc", "x", "ab"),  # same start: the shorter is complete first
            (["c", "abc", "bc"], "xabc", "x", "abc"),  # same end: the longest
            (["y", "x"], "xy", "", "x"),
            (["x", "x"], "ax", "a", "x"),
        ],
    )
    @pytest.mark.parametrize("whole", [True, False])
    def test_the_one_complete_first_ends_the_text(
        self, stop: list[str], text: str, shown: str, matched: str, whole: bool
    ) -> None:
        pieces, found = run(stop, [text] if whole else list(text))
        assert ("".join(pieces), found) == (shown, matched)

    @pytest.mark.parametrize("stop", [[""], ["a", ""], "abc", [3]])
    def test_bad_stop_strings(self, stop: list[str]) -> None:
        with pytest.raises(RequestError, match="give a sequence of strings that are not empty"):
            StopStrings(stop)


def search(stop: list[str], text: str) -> tuple[int, str] | None:
    """The rule, tried character by character: start and stop string, or None."""
    for end in range(len(text) + 1):
        hits = [word for word in stop if text[:end].endswith(word)]
        if hits:
            longest = max(hits, key=len)
            return end - len(longest), longest
    return None


# Few letters, so that matches, near misses and overlaps are common.
@settings(deadline=None, derandomize=True, max_examples=400)
@given(
    stop=st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4),
    pieces=st.lists(st.text("ab\n", max_size=6), max_size=12),
    include=st.booleans(),
)
def test_any_split_gives_the_result_of_a_plain_search(
    stop: list[str], pieces: list[str], include: bool
) -> None:
    text = "".join(pieces)
    hit = search(stop, text)
    watcher = StopStrings(stop, include=include)
    shown, given_text = "", ""
    for piece in pieces:
        result = watcher.push(piece)
        shown, given_text = shown + result.text, given_text + piece
        if result.matched is not None:
            # It is noticed with the very piece that completes it.
            assert hit is not None
            assert len(given_text) - len(piece) < hit[0] + len(hit[1]) <= len(given_text)
            break
        assert text.startswith(shown)
        assert len(given_text) - len(shown) <= max(map(len, stop), default=1) - 1
    shown += watcher.push("", final=True).text
    if hit is None:
        assert (shown, watcher.matched) == (text, None)
    else:
        end = hit[0] + len(hit[1]) if include else hit[0]
        assert (shown, watcher.matched) == (text[:end], hit[1])

"""Numbers and text as the commands print them."""

from __future__ import annotations

import pytest

from deepinfer_neuron.cli.output import format_bytes, print_json, printable


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (41_927_384, "39.99 MiB"),
        (510_286_023_000, "475.24 GiB"),
        (5 * 2**40, "5.00 TiB"),
    ],
)
def test_bytes_are_shown_in_binary_units(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_control_characters_are_spelled_out() -> None:
    assert printable("a\x1b[31mb\r\x00\x7f\x9b") == "a\\x1b[31mb\\r\\x00\\x7f\\x9b"


def test_ordinary_text_stays_as_it_is() -> None:
    text = "line\nnext\tcell [bold] héllo 世界 🙂 \ufffd"
    assert printable(text) == text


def test_a_lone_surrogate_is_spelled_out() -> None:
    assert printable("x\ud800y") == "x\\ud800y"


def test_json_is_one_ascii_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"text": "é\n"})
    assert capsys.readouterr().out == '{"text": "\\u00e9\\n"}\n'

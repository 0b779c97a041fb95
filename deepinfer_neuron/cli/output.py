"""How the commands write for people and for programs."""

from __future__ import annotations

import json
import sys
import unicodedata

from rich.console import Console

_PIPE_WIDTH = 110


class _PlainConsole(Console):
    """A console that leaves a closed pipe to the caller instead of ending the process."""

    def on_broken_pipe(self) -> None:
        """Raise :class:`BrokenPipeError`."""
        raise BrokenPipeError


def console() -> Console:
    """A console on stdout that prints text as it is; wide enough for tables when not a terminal."""
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return _PlainConsole(width=width, markup=False, highlight=False, emoji=False)


def print_json(value: object) -> None:
    """Print ``value`` as one line of ASCII JSON, which survives any terminal encoding."""
    print(json.dumps(value))


def format_bytes(count: int) -> str:
    """``count`` bytes in the largest binary unit that keeps it at or above one."""
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.2f} {unit}"
    return f"{size / 1024:.2f} TiB"


def printable(text: str) -> str:
    """``text`` with control characters spelled out, except tab and newline.

    Generated text may hold any character, and a raw escape sequence would steer the terminal.
    """
    return "".join(_spell(character) for character in text)


def _spell(character: str) -> str:
    """``character`` itself, or its escape if it is a control character or a lone surrogate."""
    if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cs"):
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")

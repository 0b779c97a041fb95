"""Typed, bounded access to the values of one JSON object.

JSON lets a field hold anything, so every value is checked for its type before it is used: a
boolean is never an integer, a float is never an integer even when it is whole, and numbers that
are infinite, not a number, or too large for any real model are refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from deepinfer_neuron.errors import ConfigError

MAX_DIMENSION = 2**24
"""Largest tensor dimension that is believed (released models stay below 2**18)."""

MAX_INT32 = 2**31 - 1
"""Largest value of fields that are positions, table rows or bucket sizes."""

_LARGEST_FLOAT32 = 3.4e38
_SMALLEST_FLOAT32 = 1.2e-38
_SHOWN_CHARACTERS = 80
_SHOWN_ITEMS = 8
_SHOWN_BITS = 128


def describe(value: object) -> str:
    """Short text of a JSON value for an error message, whatever its size or depth."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        scalars = not any(isinstance(item, (Mapping, list)) for item in value)
        if scalars and len(value) <= _SHOWN_ITEMS:
            return "[" + ", ".join(describe(item) for item in value) + "]"
        return f"a list of {len(value)} items"
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"


def printable(text: str) -> str:
    """``text`` with control characters and lone surrogates escaped, cut to a readable length."""
    escaped = repr(text)[1:-1]
    return escaped if len(escaped) <= _SHOWN_CHARACTERS else escaped[:_SHOWN_CHARACTERS] + "…"


def is_int(value: object) -> bool:
    """Whether ``value`` is a JSON integer (``true`` and ``1.0`` are not)."""
    return isinstance(value, int) and not isinstance(value, bool)


def _same(value: object, expected: object) -> bool:
    """Equality that keeps booleans and numbers apart at every level of nested lists."""
    if isinstance(expected, list):
        return (
            isinstance(value, list)
            and len(value) == len(expected)
            and all(_same(item, wanted) for item, wanted in zip(value, expected, strict=True))
        )
    if isinstance(expected, float):
        return (is_int(value) or isinstance(value, float)) and value == expected
    return type(value) is type(expected) and value == expected


class Section:
    """One JSON object of a configuration file, with the words needed to name its fields.

    ``source`` is the file, ``path`` the position inside it (``""`` for the top level,
    ``"text_config."`` for a nested object). All readers raise :class:`ConfigError` with the file,
    the key, the value found and the value expected.
    """

    def __init__(self, source: str, path: str, values: Mapping[str, object]) -> None:
        self.source = source
        self.path = path
        self.values = values

    def error(self, key: str, expected: str) -> ConfigError:
        """The error for the present value of ``key``; the caller raises it."""
        found = f"is {describe(self.values[key])}" if key in self.values else "is missing"
        return ConfigError(f"{self.source}: {self.path}{key} {found}; expected {expected}.")

    def present(self, key: str) -> bool:
        """Whether ``key`` holds a value; an explicit ``null`` counts as absent."""
        return self.values.get(key) is not None

    def section(self, key: str) -> Section:
        """The nested object ``key``."""
        value = self.values.get(key)
        if not isinstance(value, Mapping):
            raise self.error(key, "an object")
        return Section(self.source, f"{self.path}{key}.", value)

    def fixed(self, key: str, expected: object) -> None:
        """Require ``key`` to hold exactly ``expected``."""
        if key not in self.values or not _same(self.values[key], expected):
            raise self.error(key, describe(expected))

    def fixed_or_absent(self, key: str, expected: object) -> None:
        """Require ``key`` to be absent, null, or exactly ``expected``."""
        if self.present(key):
            self.fixed(key, expected)

    def choice(self, key: str, allowed: tuple[str, ...], default: str) -> str:
        """One of the ``allowed`` strings; absent means ``default``."""
        if not self.present(key):
            return default
        value = self.values[key]
        if not isinstance(value, str) or value not in allowed:
            raise self.error(key, " or ".join(repr(name) for name in allowed))
        return value

    def boolean(self, key: str, default: bool) -> bool:
        """``true`` or ``false``; absent means ``default``."""
        if not self.present(key):
            return default
        value = self.values[key]
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def integer(self, key: str, low: int, high: int) -> int:
        """An integer in ``low..high``, both ends included."""
        value = self.values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.error(key, f"an integer from {low} to {high}")
        return value

    def positive(self, key: str, high: int = MAX_DIMENSION, default: int | None = None) -> int:
        """An integer in ``1..high``; when absent, ``default`` unless that is ``None``."""
        if default is not None and not self.present(key):
            return default
        value = self.values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
            raise self.error(key, f"a positive integer of at most {high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number that survives in 32-bit floating point, as ``float``."""
        if default is not None and not self.present(key):
            return default
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(key, "a positive finite number")
        # The comparison also refuses integers too long for float() and NaN.
        if not _SMALLEST_FLOAT32 <= value <= _LARGEST_FLOAT32:
            raise self.error(key, "a positive finite number within the range of 32-bit floats")
        return float(value)

    def integers(self, key: str, low: int, high: int, *, increasing: bool) -> tuple[int, ...]:
        """A list of integers in ``low..high``, strictly ``increasing`` if asked."""
        value = self.values.get(key)
        order = "strictly increasing " if increasing else ""
        expected = f"a list of {order}integers from {low} to {high}"
        if not isinstance(value, list):
            raise self.error(key, expected)
        items: list[int] = []
        for item in value:
            if not isinstance(item, int) or isinstance(item, bool) or not low <= item <= high:
                raise self.error(key, f"{expected}, not {describe(item)}")
            if increasing and items and item <= items[-1]:
                raise self.error(key, f"{expected}; {item} follows {items[-1]}")
            items.append(item)
        return tuple(items)

"""Checks of single request parameters; every refusal names the parameter, the value, the range."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from deepinfer_neuron.errors import RequestError


def number(name: str, value: object, low: float, high: float) -> float:
    """A finite number in ``[low, high]``, as given."""
    if (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        or not math.isfinite(value)
        or not low <= value <= high
    ):
        raise RequestError(f"{name} is {value!r}; give a number from {low:g} to {high:g}")
    return value


def integer(name: str, value: object, low: int, high: int, *, hint: str = "") -> int:
    """An integer in ``[low, high]``."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError(f"{name} is {value!r}; give an integer from {low} to {high}{hint}")
    return value


def flag(name: str, value: object) -> bool:
    """A bool."""
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {value!r}; give True or False")
    return value


def choice(name: str, value: object, allowed: tuple[str, ...]) -> str:
    """One of the allowed words."""
    if not isinstance(value, str) or value not in allowed:
        raise RequestError(f"{name} is {value!r}; give one of {', '.join(allowed)}")
    return value


def token_ids(name: str, value: object, low: int, most: int) -> tuple[int, ...]:
    """At most ``most`` integers of at least ``low``."""
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        raise RequestError(f"{name} is {value!r}; give a list of token ids")
    ids = tuple(value)
    if len(ids) > most:
        raise RequestError(f"{name} has {len(ids)} entries; give at most {most}")
    return tuple(integer(f"{name}[{place}]", i, low, 2**31 - 1) for place, i in enumerate(ids))


def strings(name: str, value: object, most: int, longest: int) -> tuple[str, ...]:
    """One text, or at most ``most`` of them; each non-empty and bounded, doubles removed."""
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Iterable) or isinstance(value, (bytes, Mapping)):
        raise RequestError(f"{name} is {value!r}; give a string or a list of strings")
    texts = []
    for text in value:
        if not isinstance(text, str) or not 0 < len(text) <= longest:
            shown = repr(text)[:80]
            raise RequestError(f"{name} holds {shown}; give strings of 1 to {longest} characters")
        texts.append(text)
    if len(texts) > most:
        raise RequestError(f"{name} has {len(texts)} entries; give at most {most}")
    return tuple(dict.fromkeys(texts))


def token_numbers(name: str, value: object, low: float, high: float, most: int) -> dict[int, float]:
    """A mapping from token ids to numbers in ``[low, high]``, sorted by id."""
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} is {value!r}; give a mapping from token ids to numbers")
    if len(value) > most:
        raise RequestError(f"{name} has {len(value)} entries; give at most {most}")
    checked = {
        integer(f"a token id in {name}", token, 0, 2**31 - 1): float(
            number(f"{name}[{token!r}]", amount, low, high)
        )
        for token, amount in value.items()
    }
    return dict(sorted(checked.items()))

"""The form that an output has to take."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from deepinfer_neuron.errors import RequestError

LONGEST_GRAMMAR = 1 << 17
"""Most characters of a grammar's text."""

DEEPEST_NESTING = 64
"""Deepest nesting of brackets in a grammar, objects and lists of a schema included."""

LARGEST_EXPANSION = 100_000
"""Most characters that a repeated part such as ``(a{3}){5}`` may stand for."""

_PARTS = re.compile(r"\\.|\[(?:\\.|[^\]])*\]|\{\d*,?\d*\}|.", re.DOTALL)
_IGNORED = frozenset(
    [
        "multipleOf",
        "dependentRequired",
        "dependentSchemas",
        "not",
        "if",
        "then",
        "else",
        "contains",
        "minContains",
        "maxContains",
        "uniqueItems",
        "$dynamicRef",
        "$anchor",
    ]
)
_NAMED_SCHEMAS = frozenset(("properties", "patternProperties", "$defs", "definitions"))

_NUL = re.compile(r"\0|\\u0000|\\x00|\\0")
_COUNT = re.compile(r"\d{1,12}")

_KINDS = ("regex", "json_schema", "json_object", "grammar", "structural_tag")


@dataclass(frozen=True, init=False)
class StructuredOutput:
    """A grammar for the output; exactly one of the first five.

    Attributes:
        kind: which of the five.
        text: the grammar's text; a schema or tag as JSON; empty for ``json_object``.
        trigger_token_ids: the output is free until these tokens have appeared one after the
            other; the grammar holds for what follows.
        bound_token_id: once this token appears, the rest of the trigger is forced.

    Raises:
        RequestError: none or several grammars, or one beyond the limits of this module.
    """

    kind: str
    text: str
    trigger_token_ids: tuple[int, ...]
    bound_token_id: int | None

    def __init__(
        self,
        *,
        regex: str | None = None,
        json_schema: str | Mapping[str, object] | None = None,
        json_object: bool = False,
        grammar: str | None = None,
        structural_tag: str | Mapping[str, object] | None = None,
        trigger_token_ids: Iterable[int] = (),
        bound_token_id: int | None = None,
    ) -> None:
        given: dict[str, object] = {
            "regex": regex,
            "json_schema": json_schema,
            "json_object": json_object or None,
            "grammar": grammar,
            "structural_tag": structural_tag,
        }
        chosen = [name for name in _KINDS if given[name] is not None]
        if len(chosen) != 1:
            named = ", ".join(chosen) or "none"
            raise RequestError(
                f"a structured output names {len(chosen)} grammars ({named}); "
                f"give one of {', '.join(_KINDS)}"
            )
        if not isinstance(trigger_token_ids, Iterable):
            raise RequestError(
                f"trigger_token_ids is a {type(trigger_token_ids).__name__}; give a list of ids"
            )
        trigger = tuple(trigger_token_ids)
        _check_tokens(trigger, bound_token_id)
        text = _text(chosen[0], given[chosen[0]])
        _check_text(chosen[0], text)
        if chosen[0] == "json_schema":
            _check_schema(json.loads(text))
        for name, value in (
            ("kind", chosen[0]),
            ("text", text),
            ("trigger_token_ids", trigger),
            ("bound_token_id", bound_token_id),
        ):
            object.__setattr__(self, name, value)


def _text(kind: str, value: object) -> str:
    if kind == "json_object":
        return ""
    if isinstance(value, Mapping) and kind in ("json_schema", "structural_tag"):
        try:
            return json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"{kind} cannot be written as JSON: {error}") from error
    if not isinstance(value, str):
        raise RequestError(f"{kind} is a {type(value).__name__}; give its text")
    if kind in ("json_schema", "structural_tag"):
        try:
            json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{kind} is not JSON: {error}") from error
    return value


def _check_schema(schema: object) -> None:
    """Refuse the keywords that the library would silently leave out."""
    if isinstance(schema, list):
        for item in schema:
            _check_schema(item)
    if not isinstance(schema, dict):
        return
    ignored = sorted(_IGNORED & schema.keys())
    if ignored:
        raise RequestError(
            f"json_schema uses {', '.join(ignored)}, which cannot be enforced; leave it out and "
            "check the result"
        )
    for key, value in schema.items():
        if key in _NAMED_SCHEMAS and isinstance(value, dict):
            _check_schema(list(value.values()))
        elif key not in ("enum", "const", "default", "examples"):
            _check_schema(value)


def _check_text(kind: str, text: str) -> None:
    if _NUL.search(text):
        # The library takes NUL for the end of the text, or dies of it.
        raise RequestError(f"{kind} holds the character NUL; leave it out")
    if len(text) > LONGEST_GRAMMAR:
        raise RequestError(
            f"{kind} has {len(text)} characters; at most {LONGEST_GRAMMAR} are allowed"
        )
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(0, depth - 1)
    if deepest > DEEPEST_NESTING:
        raise RequestError(
            f"{kind} nests brackets {deepest} deep; at most {DEEPEST_NESTING} are allowed"
        )
    if kind in ("regex", "grammar"):
        _check_repetitions(kind, text)


def _check_repetitions(kind: str, text: str) -> None:
    """Bound the size of the grammar with its repetitions written out; nested ones multiply."""
    open_groups, last = [0], 0
    for part in _PARTS.findall(text):
        if part == "(":
            open_groups[-1] += last
            open_groups.append(0)
            last = 0
        elif part == ")" and len(open_groups) > 1:
            last += open_groups.pop()
        elif part[0] == "{" and len(part) > 1:
            last *= max([1, *(int(count) for count in _COUNT.findall(part))])
        else:
            open_groups[-1] += last
            last = 1
        if last > LARGEST_EXPANSION:
            raise RequestError(
                f"{kind} stands for more than {LARGEST_EXPANSION} characters once its repetitions "
                f"are written out (at {part}); lower the counts"
            )


def _check_tokens(trigger: tuple[object, ...], bound: object) -> None:
    tokens = [*trigger] if bound is None else [*trigger, bound]
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise RequestError(f"a trigger or bound token is {token!r}; give token ids from 0")
    if bound is not None and not trigger:
        raise RequestError("bound_token_id needs trigger_token_ids; give both or neither")

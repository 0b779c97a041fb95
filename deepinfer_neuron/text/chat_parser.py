"""From the text a model writes to its reasoning, its answer and its tool calls.

The parser takes text in pieces of any size and reports at once what has become certain. What it
reports does not depend on how the text was split, except for the sizes of the reported pieces.
"""

from __future__ import annotations

import enum
import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from deepseek_recipe import SpecialToken

from deepinfer_neuron.text.stop_strings import first_match, unfinished_match

_DSML: Final = SpecialToken.Dsml.default_str()
_END_OF_REASONING: Final = SpecialToken.ThinkingEnd.default_str()

# A space belongs between the control token and the word; the previous model version wrote none,
# and called the block differently.
_OPEN_CALLS: Final = tuple(
    f"<{_DSML}{space}{word}>" for space in (" ", "") for word in ("calls", "tool_calls")
)
_CLOSE_VALUE: Final = tuple(f"</{_DSML}{space}parameter>" for space in (" ", ""))
# No "<" inside a tag: so the text up to it decides whether a tag is complete, and later text
# cannot change that.
_TAG: Final = re.compile(
    rf'<(/?){_DSML} ?(calls|tool_calls|invoke|parameter)((?:\s+\w+="[^"<]*")*)\s*>'
)
_TAG_STARTS: Final = (f"<{_DSML}", f"</{_DSML}")
_ATTRIBUTE: Final = re.compile(r'(\w+)="([^"<]*)"')
_LONGEST_TAG: Final = 1024
"""Longer tags are ignored, so that a text that only begins like one costs no time."""
_PIECE: Final = 4096
"""Long texts are read in pieces, so that the time grows with their length and no faster."""


class ParserState(enum.Enum):
    """Where the prompt leaves the model."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALLS = "calls"


@dataclass(frozen=True)
class ParserStart:
    """How to read what follows a prompt.

    ``fresh`` is false when the prompt ends inside a message to be continued, whose line feeds
    count. ``tools`` says whether tool calls are recognized; without tools, their markup is text.
    """

    state: ParserState
    fresh: bool = True
    tools: bool = True


@dataclass(frozen=True)
class ReasoningDelta:
    """More text of the reasoning."""

    text: str


@dataclass(frozen=True)
class ContentDelta:
    """More text of the answer."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A new call, the ``index``-th of the message."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallDelta:
    """More of the JSON text of the arguments of call ``index``."""

    index: int
    arguments: str


ChatEvent = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallDelta


@dataclass(frozen=True)
class ToolCall:
    """A call: ``arguments`` is the text of a JSON object.

    If the output ended inside the call, it is not ``complete`` and the text of the arguments
    breaks off; closing it would pass half an argument off as a whole one.
    """

    id: str
    name: str
    arguments: str
    complete: bool


@dataclass(frozen=True)
class ParsedMessage:
    """A message of the assistant; ``reasoning_content`` is None if it was not to reason."""

    content: str
    reasoning_content: str | None
    tool_calls: tuple[ToolCall, ...]
    finish_reason: Literal["tool_calls"] | None
    """Set once the calls are finished; otherwise the reason why generation ended holds."""

    def as_message(self) -> dict[str, object]:
        """The message in OpenAI form, as a history for the next turn needs it."""
        message: dict[str, object] = {"role": "assistant", "content": self.content}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message


def random_call_id(index: int) -> str:
    """An id for the ``index``-th call of a message that no other call of a conversation has."""
    return f"call_{index:02}_{secrets.token_hex(12)}"


@dataclass
class _OpenCall:
    """A call while it is being read."""

    id: str
    name: str
    arguments: list[str]
    complete: bool = False


class ChatParser:
    """Reads one message of the assistant, piece by piece.

    * Reasoning ends at the end-of-reasoning tag or where tool calls begin; without either,
      everything is reasoning. Further such tags are dropped.
    * Line feeds at the start of reasoning and of content are dropped, and so are those between
      content and tool calls.
    * An argument marked as string is taken as it stands; any other is JSON, or a string if it is
      not. An argument without mark counts as not a string.
    * Text between the tags of tool calls and after them is dropped.
    * At the end of the output, the start of a tag is ordinary text.
    """

    def __init__(
        self, start: ParserStart, *, new_call_id: Callable[[int], str] = random_call_id
    ) -> None:
        """Starts where the prompt ended; ``new_call_id`` makes the id of a call of given index."""
        self._new_call_id = new_call_id
        self._reasons = self._in_reasoning = start.state is ParserState.REASONING
        self._tools = start.tools
        self._tags = (_END_OF_REASONING, *(_OPEN_CALLS if start.tools else ()))
        self._skip_line_feeds = start.fresh
        self._line_feeds = 0
        self._buffer = ""
        self._events: list[ChatEvent] = []
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[_OpenCall] = []
        self._string_value = False
        self._json_value: list[str] = []
        self._closed = False
        self._step: Callable[[], bool] = {
            ParserState.REASONING: self._read_text,
            ParserState.CONTENT: self._read_text,
            ParserState.CALLS: self._read_calls,
        }[start.state]

    @property
    def finished(self) -> bool:
        """Whether the tool calls are complete, so that all further text would be dropped."""
        return self._closed

    @property
    def message(self) -> ParsedMessage:
        """The message as far as it has been read."""
        calls = tuple(
            ToolCall(call.id, call.name, "".join(call.arguments), call.complete)
            for call in self._calls
        )
        return ParsedMessage(
            "".join(self._content),
            "".join(self._reasoning) if self._reasons else None,
            calls,
            "tool_calls" if self._closed and calls else None,
        )

    def push(self, delta: str) -> list[ChatEvent]:
        """Appends text and returns what has become certain."""
        for start in range(0, len(delta), _PIECE):
            self._buffer += delta[start : start + _PIECE]
            while self._step():
                pass
        return self._taken_events()

    def flush(self) -> list[ChatEvent]:
        """Ends the output: reports what was held back. Further text is dropped."""
        if self._step == self._read_text:
            self._add_text(self._buffer)
            self._add_line_feeds()
        elif self._step == self._read_value:
            self._add_value(self._buffer)
            self._add_arguments("".join(self._json_value))
        self._step = self._drop
        self._buffer = ""
        return self._taken_events()

    def _taken_events(self) -> list[ChatEvent]:
        events, self._events = self._events, []
        return events

    # Each reader takes what it can from the buffer and says whether another look is worth it.

    def _read_text(self) -> bool:
        """Reasoning or content: up to the next tag."""
        hit = first_match(self._buffer, self._tags)
        if hit is None:
            self._add_text(
                self._take(len(self._buffer) - unfinished_match(self._buffer, self._tags))
            )
            return False
        start, tag = hit
        self._add_text(self._take(start))
        self._take(len(tag))
        if tag != _END_OF_REASONING:
            self._in_reasoning = False
            self._line_feeds = 0
            self._step = self._read_calls
        elif self._in_reasoning:
            self._in_reasoning = False
            self._skip_line_feeds = True
        return True

    def _read_calls(self) -> bool:
        """Between calls, or between the arguments of a call: up to the next tag."""
        tag = _TAG.search(self._buffer)
        if tag is None:
            self._take(len(self._buffer) - _unfinished_tag(self._buffer))
            return False
        self._take(tag.end())
        if tag.end() - tag.start() <= _LONGEST_TAG:
            attributes = dict(_ATTRIBUTE.findall(tag[3]))
            self._on_tag(tag[2], tag[1] == "/", attributes)
        return True

    def _read_value(self) -> bool:
        """An argument's value: up to its closing tag, and nothing else ends it."""
        hit = first_match(self._buffer, _CLOSE_VALUE)
        if hit is None:
            held = unfinished_match(self._buffer, _CLOSE_VALUE)
            self._add_value(self._take(len(self._buffer) - held))
            return False
        start, tag = hit
        self._add_value(self._take(start))
        self._take(len(tag))
        if self._string_value:
            self._add_arguments('"')
        else:
            value = "".join(self._json_value)
            self._add_arguments(value if _is_json(value) else _quoted(value))
            self._json_value = []
        self._step = self._read_calls
        return True

    def _drop(self) -> bool:
        """After the calls."""
        self._buffer = ""
        return False

    def _on_tag(self, word: str, closing: bool, attributes: dict[str, str]) -> None:
        """A complete tag outside values; one that makes no sense here is ignored."""
        name = attributes.get("name")
        if word == "parameter":
            if self._call_is_open and not closing and name is not None:
                self._open_value(name, attributes.get("string") == "true")
        elif word == "invoke":
            if closing or name is not None:
                self._close_call()
            if not closing and name is not None:
                self._open_call(name)
        elif closing:
            self._close_call()
            self._closed = True
            self._step = self._drop

    @property
    def _call_is_open(self) -> bool:
        return bool(self._calls) and not self._calls[-1].complete

    def _open_call(self, name: str) -> None:
        index = len(self._calls)
        call = _OpenCall(self._new_call_id(index), name, [])
        self._calls.append(call)
        self._events.append(ToolCallStart(index, call.id, name))

    def _close_call(self) -> None:
        if self._call_is_open:
            self._add_arguments("}" if self._calls[-1].arguments else "{}")
            self._calls[-1].complete = True

    def _open_value(self, name: str, is_string: bool) -> None:
        separator = ", " if self._calls[-1].arguments else "{"
        self._add_arguments(f"{separator}{_quoted(name)}: " + ('"' if is_string else ""))
        self._string_value = is_string
        self._step = self._read_value

    def _take(self, count: int) -> str:
        """Removes ``count`` characters from the front of the buffer."""
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def _add_text(self, text: str) -> None:
        """Reports text, except line feeds that may have to be dropped."""
        if self._skip_line_feeds:
            text = text.lstrip("\n")
        if not text:
            return
        self._skip_line_feeds = False
        if self._in_reasoning:
            self._reasoning.append(text)
            self._events.append(ReasoningDelta(text))
            return
        body = text.rstrip("\n") if self._tools else text
        if body:
            self._add_line_feeds()
            self._content.append(body)
            self._events.append(ContentDelta(body))
        self._line_feeds += len(text) - len(body)

    def _add_line_feeds(self) -> None:
        """Reports the line feeds that were held back because calls might have followed."""
        if self._line_feeds:
            text = "\n" * self._line_feeds
            self._content.append(text)
            self._events.append(ContentDelta(text))
            self._line_feeds = 0

    def _add_value(self, text: str) -> None:
        """Reports more of a string; JSON must be complete before it can be judged."""
        if not self._string_value:
            self._json_value.append(text)
        elif text:
            self._add_arguments(_quoted(text)[1:-1])

    def _add_arguments(self, text: str) -> None:
        if text:
            self._calls[-1].arguments.append(text)
            self._events.append(ToolCallDelta(len(self._calls) - 1, text))


def _unfinished_tag(text: str) -> int:
    """Length of the end of ``text`` that may become a tag of tool calls, 0 if none."""
    start = text.rfind("<")
    rest = text[start:] if start >= 0 else ""
    if len(rest) > _LONGEST_TAG:
        return 0
    fits = any(rest.startswith(word) or word.startswith(rest) for word in _TAG_STARTS)
    return len(rest) if fits else 0


def _quoted(text: str) -> str:
    """``text`` as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    """Whether ``text`` is one JSON value; numbers are only looked at, not computed."""
    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> object:
    """NaN and the infinities, which Python reads but JSON does not have."""
    raise ValueError(constant)

"""From a chat in OpenAI form to the conversation that the prompt encoding takes.

Everything a caller hands in is checked here; each complaint says where it was found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

from deepseek_recipe import (
    AssistantMessage,
    Conversation,
    LatestReminderMessage,
    Message,
    SystemMessage,
    ToolCall,
    ToolDefinition,
    ToolMessage,
    UserMessage,
)

from deepinfer_neuron.errors import RequestError

_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
_IMAGE_PARTS: Final = ("image", "image_url", "input_image")
_FUNCTION_NAME: Final = re.compile(r"[a-zA-Z0-9_-]+")
_EFFORTS: Final[Mapping[str, Literal["low", "high", "xhigh", "max"]]] = {
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "xhigh",
    "max": "max",
}


@dataclass(frozen=True)
class ChatOptions:
    """What shapes a prompt besides the messages, unchecked; see ``ChatFormat.render``."""

    tools: object
    tool_choice: object
    thinking: object
    reasoning_effort: object
    response_format: object
    continue_final_message: object


@dataclass(frozen=True)
class Chat:
    """A checked chat: tools the model may call, and whether the prompt opens the calls itself."""

    conversation: Conversation
    has_tools: bool
    forces_call: bool


def read_chat(messages: object, options: ChatOptions) -> Chat:
    """Checks a chat; raises ``RequestError`` for anything that cannot be rendered."""
    continues = _flag("continue_final_message", options.continue_final_message)
    thinking, effort = _thinking(options.thinking, options.reasoning_effort)
    tools = _tools(options.tools)
    tools, forced = _chosen_tools(tools, options.tool_choice)
    if forced and thinking:
        raise RequestError(
            f"tool_choice is {options.tool_choice!r}, which makes the model call a tool at once, "
            "but thinking is on. Set thinking=False, or let the model choose with 'auto'."
        )
    schema = _response_schema(options.response_format)
    checked = _messages(messages, continues)
    with _library_errors("response_format"):
        conversation = Conversation(
            checked,
            thinking_mode=thinking,
            tools=tools,
            tool_choice="required" if forced else "auto",
            reasoning_effort=effort,
            response_format="json_object" if schema == "json_object" else "text",
            response_schema=None if schema == "json_object" else schema,
        )
    return Chat(conversation, bool(tools), forced)


@contextmanager
def _library_errors(where: str) -> Iterator[None]:
    """Turns what the library refuses into a ``RequestError``."""
    try:
        yield
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise RequestError(f"{where} cannot be encoded ({error}). Change that value.") from error


def _messages(messages: object, continues: bool) -> list[Message]:
    """All messages; the last one is open if it ``continues``."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise RequestError(
            f"messages is a {type(messages).__name__}; give a list of messages, each like "
            "{'role': 'user', 'content': 'Hello'}."
        )
    if not messages:
        raise RequestError("messages is empty; give at least one message.")
    found = [_message(item, f"messages[{index}]") for index, item in enumerate(messages)]
    if not continues:
        return found
    last = found[-1]
    if not isinstance(last, AssistantMessage) or last.tool_calls:
        raise RequestError(
            "continue_final_message is set, but the last message is not an assistant message "
            "without tool_calls. Put the text to be continued there, or do not set it."
        )
    found[-1] = AssistantMessage(last.content, last.reasoning_content, prefix=True)
    return found


def _message(item: object, where: str) -> Message:
    """One message; keys that rendering does not need are ignored."""
    message = _object(item, where)
    role = message.get("role")
    if role == "assistant":
        return _assistant(message, where)
    if role not in _ROLES:
        raise RequestError(f"{where}.role is {role!r}; allowed are {', '.join(_ROLES)}.")
    content = _content(message.get("content"), f"{where}.content")
    if role == "system":
        return SystemMessage(content)
    if role == "latest_reminder":
        return LatestReminderMessage(content)
    if role == "tool":
        # No id at all is like an unknown one: such results come first.
        call_id = message.get("tool_call_id")
        return ToolMessage(
            content, "" if call_id is None else _text(call_id, f"{where}.tool_call_id")
        )
    # The model knows no developers: what they say comes from a user.
    return UserMessage(content)


def _assistant(message: Mapping[str, object], where: str) -> AssistantMessage:
    """A message of the assistant; its content may be missing beside tool calls."""
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise RequestError(f"{where}.tool_calls is a {type(calls).__name__}; give a list.")
    tool_calls = [
        _tool_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)
    ]
    content = message.get("content")
    if content is None and tool_calls:
        content = ""
    reasoning = message.get("reasoning_content")
    return AssistantMessage(
        _content(content, f"{where}.content"),
        None if reasoning is None else _text(reasoning, f"{where}.reasoning_content"),
        tool_calls or None,
    )


def _content(value: object, where: str) -> str:
    """Text, or parts of text joined by blank lines."""
    if isinstance(value, str):
        return _text(value, where)
    if not isinstance(value, Sequence) or isinstance(value, (bytes, bytearray)):
        raise RequestError(
            f"{where} is {_shown(value)}; give a string or a list of parts like "
            "{'type': 'text', 'text': 'Hello'}."
        )
    return "\n\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(value))


def _part(value: object, where: str) -> str:
    """The text of one part."""
    part = _object(value, where)
    kind = part.get("type")
    if kind in _IMAGE_PARTS:
        raise RequestError(
            f"{where} is an image; this version takes text only. Remove the part of type {kind!r}."
        )
    if kind != "text":
        raise RequestError(f"{where}.type is {_shown(kind)}; allowed is 'text'.")
    return _text(part.get("text"), f"{where}.text")


def _tool_call(value: object, where: str) -> ToolCall:
    """A call the assistant made."""
    call = _object(value, where)
    function = _object(call.get("function"), f"{where}.function")
    arguments = function.get("arguments")
    at = f"{where}.function.arguments"
    if isinstance(arguments, Mapping):
        written = json.dumps(_json_value(arguments, at), ensure_ascii=False)
    else:
        written = _unwrapped(_text(arguments, at))
    return ToolCall(
        _text(call.get("id"), f"{where}.id"),
        _text(function.get("name"), f"{where}.function.name"),
        written,
    )


def _unwrapped(arguments: str) -> str:
    """The object inside arguments that were turned into JSON twice; others as they are."""
    if not arguments.lstrip().startswith('"'):
        return arguments
    try:
        inner = json.loads(arguments)
        twice = isinstance(inner, str) and isinstance(json.loads(inner), dict)
    except (ValueError, RecursionError):
        return arguments
    return str(inner) if twice else arguments


def _tools(value: object) -> list[ToolDefinition]:
    """Tool definitions with distinct names."""
    if value is None:
        return []
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise RequestError(
            f"tools is a {type(value).__name__}; give a list of "
            "{'type': 'function', 'function': {'name': ..., 'parameters': ...}}."
        )
    tools = [_tool(item, f"tools[{index}]") for index, item in enumerate(value)]
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise RequestError(
                f"tools[{index}].function.name is {name!r} again; give each tool a name of its own."
            )
    return tools


def _tool(value: object, where: str) -> ToolDefinition:
    """One tool: its name, and optionally its description and the JSON schema of its arguments."""
    tool = _object(value, where)
    if tool.get("type") != "function":
        raise RequestError(f"{where}.type is {_shown(tool.get('type'))}; allowed is 'function'.")
    function = _object(tool.get("function"), f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _FUNCTION_NAME.fullmatch(name):
        raise RequestError(
            f"{where}.function.name is {_shown(name)}; give a name of letters, digits, '_' and '-'."
        )
    description = function.get("description")
    parameters = function.get("parameters")
    if description is not None:
        description = _text(description, f"{where}.function.description")
    if parameters is not None:
        parameters = _schema(parameters, f"{where}.function.parameters")
    with _library_errors(f"{where}.function.parameters"):
        return ToolDefinition(name, description, parameters)


def _chosen_tools(tools: list[ToolDefinition], choice: object) -> tuple[list[ToolDefinition], bool]:
    """The tools to show, and whether one has to be called at once."""
    if choice is None or choice == "auto":
        return tools, False
    if choice == "none":
        return [], False
    if choice == "required":
        chosen, lacking = tools, "there are no tools"
    else:
        chosen, lacking = _named_tool(tools, choice), "no tool has that name"
    if not chosen:
        raise RequestError(
            f"tool_choice is {_shown(choice)} but {lacking}. Define it in tools, or use 'auto'."
        )
    return chosen, True


def _named_tool(tools: list[ToolDefinition], choice: object) -> list[ToolDefinition]:
    """The tool that a choice of one function names, if it is there."""
    given = choice if isinstance(choice, Mapping) else {}
    function = given.get("function")
    if not isinstance(function, Mapping) or given.get("type") != "function":
        raise RequestError(
            f"tool_choice is {_shown(choice)}; allowed are 'auto', 'none', 'required' and "
            "{'type': 'function', 'function': {'name': ...}}."
        )
    return [tool for tool in tools if tool.name == function.get("name")]


def _thinking(
    thinking: object, effort: object
) -> tuple[bool, Literal["low", "high", "xhigh", "max"] | None]:
    """Whether the model reasons first, and how much; effort is of no effect if it does not."""
    enabled = _flag("thinking", thinking)
    if effort is None:
        return enabled, None
    if effort == "none":
        return False, None
    if not isinstance(effort, str) or effort not in _EFFORTS:
        raise RequestError(
            f"reasoning_effort is {_shown(effort)}; allowed are none, {', '.join(_EFFORTS)}."
        )
    return enabled, _EFFORTS[effort]


def _response_schema(value: object) -> dict[str, object] | Literal["json_object"] | None:
    """The JSON schema that the answer is to follow; ``json_object`` stands for any object."""
    if value is None:
        return None
    given = _object(value, "response_format")
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return "json_object"
    if kind != "json_schema":
        raise RequestError(
            f"response_format.type is {_shown(kind)}; allowed are text, json_object and "
            "json_schema. Constrain the text by structured_output in SamplingParams otherwise."
        )
    where = "response_format.json_schema"
    return _schema(_object(given.get("json_schema"), where).get("schema"), f"{where}.schema")


def _schema(value: object, where: str) -> dict[str, object]:
    """A JSON schema, as plain JSON data."""
    return _json_value(_object(value, where), where)


def _json_value(value: Mapping[str, object], where: str) -> dict[str, object]:
    """A copy of ``value`` in plain JSON data."""
    try:
        written = json.dumps(dict(value), ensure_ascii=False, allow_nan=False)
        written.encode("utf-8")
        copy: dict[str, object] = json.loads(written)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{where} is not JSON data ({error}). Correct that value.") from error
    return copy


def _object(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise RequestError(f"{where} is {_shown(value)}; give an object (a dict).")
    return value


def _text(value: object, where: str) -> str:
    """A string that can be written as UTF-8."""
    if not isinstance(value, str):
        raise RequestError(f"{where} is {_shown(value)}; give a string.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{where} cannot be encoded as UTF-8 at character {error.start} ({error.reason}). "
            "Replace the character, for instance with U+FFFD."
        ) from error
    return value


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {_shown(value)}; give True or False.")
    return value


def _shown(value: object) -> str:
    """A value as messages show it: complete if short."""
    shown = "missing" if value is None else repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."

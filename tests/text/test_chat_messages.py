"""Chats that cannot be rendered, and what is said about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from deepinfer_neuron.errors import RequestError
from deepinfer_neuron.text.chat_messages import ChatOptions, read_chat
from tests.support.chat_messages import Dict, assistant, call, result, tool, user

DEFAULTS = ChatOptions(
    tools=None,
    tool_choice=None,
    thinking=True,
    reasoning_effort=None,
    response_format=None,
    continue_final_message=False,
)
TOOLS = [tool(), tool("g")]
NAMED = {"type": "function", "function": {"name": "g"}}


def nested(depth: int) -> Dict:
    """An object in an object, ``depth`` times."""
    value: Dict = {}
    for _ in range(depth):
        value = {"a": value}
    return value


IMAGE = {"type": "image_url", "image_url": {"url": "http://localhost/a.png"}}
REFUSED: list[tuple[object, Mapping[str, object], str]] = [
    # Messages.
    ([], {}, "messages is empty"),
    ("Hi", {}, "messages is a str"),
    (None, {}, "messages is a NoneType"),
    (["Hi"], {}, r"messages\[0\] is 'Hi'; give an object"),
    ([{"content": "a"}], {}, r"messages\[0\].role is None; allowed are system, developer"),
    ([user("a"), {"role": "bot", "content": "a"}], {}, r"messages\[1\].role is 'bot'"),
    ([{"role": "user"}], {}, r"messages\[0\].content is missing; give a string or"),
    ([user(3)], {}, r"messages\[0\].content is 3"),
    ([user(["a"])], {}, r"messages\[0\].content\[0\] is 'a'; give an object"),
    ([user([{"type": "text"}])], {}, r"messages\[0\].content\[0\].text is missing"),
    ([user([{"type": "audio"}])], {}, r"messages\[0\].content\[0\].type is 'audio'"),
    ([user([IMAGE])], {}, r"messages\[0\].content\[0\] is an image; this version takes text only"),
    ([user("ab\ud800")], {}, r"messages\[0\].content cannot be encoded as UTF-8 at character 2"),
    ([assistant(None)], {}, r"messages\[0\].content is missing"),
    ([assistant("a", reasoning=7)], {}, r"messages\[0\].reasoning_content is 7"),
    ([result("c", None)], {}, r"messages\[0\].content is missing"),
    ([result(7, "a")], {}, r"messages\[0\].tool_call_id is 7"),
    # Calls.
    ([assistant("") | {"tool_calls": "f"}], {}, r"messages\[0\].tool_calls is a str"),
    ([assistant("", "f")], {}, r"tool_calls\[0\] is 'f'; give an object"),
    ([assistant("", {"id": "1"})], {}, r"tool_calls\[0\].function is missing"),
    ([assistant("", call(None))], {}, r"tool_calls\[0\].id is missing"),
    ([assistant("", call("1", None))], {}, r"function.name is missing"),
    ([assistant("", call("1", "f", None))], {}, r"function.arguments is missing"),
    ([assistant("", call("1", "f", {"a": {1}}))], {}, r"arguments is not JSON data"),
    ([assistant("", call("1", "f", {"a": "\ud800"}))], {}, r"arguments is not JSON data"),
    # Tools.
    ([user("a")], {"tools": "f"}, "tools is a str"),
    ([user("a")], {"tools": [{"type": "x"}]}, r"tools\[0\].type is 'x'; allowed is 'function'"),
    ([user("a")], {"tools": [{"type": "function"}]}, r"tools\[0\].function is missing"),
    ([user("a")], {"tools": [tool("f f")]}, r"name is 'f f'; give a name of letters"),
    ([user("a")], {"tools": [tool(None)]}, "name is missing"),
    ([user("a")], {"tools": [tool(), tool()]}, r"tools\[1\].function.name is 'f' again"),
    ([user("a")], {"tools": [tool(description=1)]}, r"function.description is 1"),
    ([user("a")], {"tools": [tool(parameters=[])]}, r"parameters is \[\]; give an object"),
    ([user("a")], {"tools": [tool(parameters={"a": float("nan")})]}, "is not JSON data"),
    ([user("a")], {"tools": [tool(parameters={"a": 2**70})]}, r"tools\[0\].* cannot be encoded"),
    ([user("a")], {"tools": [tool(parameters=nested(500))]}, "nesting"),
    ([user("a")], {"tools": [tool(parameters=nested(9999))]}, "is not JSON data"),
    ([user("a")], {"tool_choice": "required", "thinking": False}, "but there are no tools"),
    (
        [user("a")],
        {"tools": [tool()], "tool_choice": NAMED, "thinking": False},
        "but no tool has that name",
    ),
    ([user("a")], {"tools": TOOLS, "tool_choice": "any"}, "tool_choice is 'any'; allowed are"),
    ([user("a")], {"tools": TOOLS, "tool_choice": {"type": "function"}}, "allowed are 'auto'"),
    ([user("a")], {"tools": TOOLS, "tool_choice": "required"}, "Set thinking=False"),
    # Other options.
    ([user("a")], {"thinking": 1}, "thinking is 1; give True or False"),
    ([user("a")], {"reasoning_effort": "huge"}, "reasoning_effort is 'huge'; allowed are none, "),
    ([user("a")], {"reasoning_effort": 50}, "reasoning_effort is 50; allowed"),
    ([user("a")], {"response_format": "json"}, "response_format is 'json'; give an object"),
    ([user("a")], {"response_format": {"type": "xml"}}, "response_format.type is 'xml'"),
    ([user("a")], {"response_format": {"type": "json_schema"}}, "json_schema is missing"),
    (
        [user("a")],
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 2**70}}}},
        "response_format cannot be encoded",
    ),
    ([user("a")], {"continue_final_message": "yes"}, "continue_final_message is 'yes'"),
    ([user("a")], {"continue_final_message": True}, "is not an assistant message"),
    ([assistant("", call("1"))], {"continue_final_message": True}, "without tool_calls"),
]


@pytest.mark.parametrize(("messages", "options", "reason"), REFUSED)
def test_refused(messages: object, options: Mapping[str, object], reason: str) -> None:
    """Anything a caller may get wrong is named, and is never an error of the library."""
    with pytest.raises(RequestError, match=reason) as caught:
        read_chat(messages, replace(DEFAULTS, **options))
    assert len(str(caught.value)) < 400

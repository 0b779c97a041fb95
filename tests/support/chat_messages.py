"""Messages and tools in OpenAI form, in few words; they may also be wrong on purpose."""

from __future__ import annotations

from typing import Any

Dict = dict[str, Any]


def user(content: object) -> Dict:
    """A message of the user."""
    return {"role": "user", "content": content}


def system(content: object) -> Dict:
    """A message of the system."""
    return {"role": "system", "content": content}


def assistant(content: object, *calls: object, reasoning: object = None) -> Dict:
    """A message of the assistant."""
    message: Dict = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


def call(call_id: object, name: object = "f", arguments: object = "{}") -> Dict:
    """A call in a message of the assistant."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def result(call_id: object, content: object) -> Dict:
    """The result of a call, without the call's id if that is None."""
    message: Dict = {"role": "tool", "content": content}
    return message if call_id is None else message | {"tool_call_id": call_id}


def tool(name: object = "f", **more: object) -> Dict:
    """A tool."""
    return {"type": "function", "function": {"name": name, **more}}

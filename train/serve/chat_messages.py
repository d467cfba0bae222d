"""Reads the messages and the tools of a conversation.

A client may send any JSON as messages and tools.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ...data.chat_templates.chat_template import text_of_part
from ...data.common.fields import FieldError, check_value, without_none
from ...models.text.chat.tools.tool import Tool, ToolCall
from .fields import ApiError, require_valid

JsonFields = Mapping[str, object]
"""An object in a request that can have any fields."""

TOOL: Mapping[str, object] = {
    "type": Literal["function"],
    "function": JsonFields,
    "function.name": str,
    "function.description": str | None,
    "function.strict": Literal[False] | None,
    "function.parameters": JsonFields | None,
    "function.parameters.properties": JsonFields | None,
}
"""The types of a tool's fields. `strict` must be false, because a call may not fit its schema."""
MESSAGE: Mapping[str, object] = {
    "content": str | Sequence[object],
    "tool_calls": Sequence[JsonFields] | None,
}
"""The types of a message's fields. The template checks all other fields."""
CALL: Mapping[str, object] = {
    "function": JsonFields,
    "function.name": str,
    "function.arguments": str | JsonFields | None,
}
"""The types of the fields of a call in a message."""


def checked(value: JsonFields, types: Mapping[str, object], field: str, location: str) -> list[Any]:
    """Returns the fields of an object in the order of `types`; None for a missing field.

    Args:
        value: the object.
        types: maps the path of each field, with dots, to its type.
        field: the field of the request that contains the object.
        location: the position of the object in the request, for error messages.

    Raises:
        ApiError: a field has a different type.
    """
    values = []
    for path, kind in types.items():
        one: object = value
        for name in path.split("."):
            one = one.get(name) if isinstance(one, Mapping) else None
        try:
            check_value(f"{location}.{path}", one, kind)
        except FieldError as error:
            raise ApiError(400, str(error), field, "invalid_value") from None
        values.append(one)
    return values


def read_tools(objects: Sequence[JsonFields]) -> tuple[Tool, ...]:
    """Returns the tools of a request. The server never runs these tools.

    Raises:
        ApiError: a tool is not a function, or a field has the wrong type.
    """
    tools = []
    for i, tool in enumerate(objects):
        _, _, name, text, *_, properties = checked(tool, TOOL, "tools", f"tools[{i}]")
        tools.append(Tool(name, text or "", properties or {}, run=_never))
    return tuple(tools)


def _never(**arguments: object) -> None:
    raise NotImplementedError("clients run the tools")


def read_message(message: JsonFields, index: int, *, in_content: bool) -> dict[str, Any]:
    """Returns a message in the form for chat templates, where the arguments of calls are objects.

    Args:
        message: the message.
        index: the index of the message, for errors.
        in_content: whether the template writes calls into the content of a message.

    Raises:
        ApiError: the content or a call has the wrong type.
    """
    # A message with calls may lack the content, but every template reads the content.
    result = {"content": "", **without_none(message)}
    location = f"messages[{index}]"
    content, objects = checked(result, MESSAGE, "messages", location)
    calls = [_call(call, f"{location}.tool_calls[{i}]") for i, call in enumerate(objects or ())]
    result.pop("tool_calls", None)
    if in_content:
        result["content"] = "".join([_text_of(content, index + 1), *map(_bracketed, calls)])
    elif calls:
        result["tool_calls"] = [call.message for call in calls]
    return result


def _call(fields: JsonFields, location: str) -> ToolCall:
    """Returns a tool call from a message."""
    _, name, arguments = checked(fields, CALL, "messages", location)
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
        problem = f"{location}.function.arguments must be an object in JSON"
        require_valid(isinstance(arguments, dict), problem, "messages")
    return ToolCall(name, dict(arguments or {}))


def _bracketed(call: ToolCall) -> str:
    """Returns a call in the format of the lectures, which has one unnamed argument."""
    return f"<<{' '.join([call.name, *map(str, call.arguments.values())])}>>"


def with_instructions(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Appends a text to the system message, or adds a system message if there is none."""
    first, rest = {"role": "system", "content": ""}, messages
    if messages[0].get("role") == "system":
        first, *rest = messages
    content = "\n".join(filter(None, [_text_of(first["content"], 1), text]))
    return [{**first, "content": content}, *rest]


def _text_of(content: str | Sequence[object], number: int) -> str:
    """Returns the text of a message's content, which may be a list of parts.

    Args:
        content: the content.
        number: the number of the message, counted from 1, for errors.
    """
    parts = [content] if isinstance(content, str) else content
    return "".join(text_of_part(part, number) for part in parts)

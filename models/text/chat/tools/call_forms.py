"""The formats of tool calls.

The chat template determines the format: ``<tool_call>`` around a JSON object (Hermes and Qwen), or
``<<name argument>>`` with the template of the lectures. Calls are parsed only from the model's
output, never from messages of a user or a tool.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

from .....data.chat_templates.chat_template import LECTURES, ChatTemplate
from .....data.common.errors import UserError
from .tool import Tool, ToolCall

_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_BRACKETS = re.compile(r"<<\s*(\w+)[ \n]*(.*?)>>", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Written:
    """An answer of a model, parsed into text and calls."""

    content: str
    """The text for the user."""
    calls: tuple[ToolCall, ...]
    """The calls in the answer, in order."""
    malformed: str | None = None
    """The reason why a call cannot be parsed, or None if all calls can be parsed."""


class CallForm:
    """A format of tool calls. The base class is for models without tools, which make no calls."""

    in_content = True
    """Whether a message stores a call in its content instead of in a separate field."""

    @staticmethod
    def of(template: ChatTemplate) -> "CallForm":
        """Returns the format of a chat template.

        Raises:
            UserError: the template has no known format.
        """
        if template.source == LECTURES:
            return Brackets()
        if "<tool_call>" in template.all_sources:
            return Hermes()
        raise UserError(
            "the chat template has no known format of tool calls (<tool_call>, or the default "
            "template): leave the tools out, or give another template"
        )

    def instructions(self, tools: Sequence[Tool]) -> str | None:
        """Returns instructions that describe the tools, or None if the template describes them."""
        del tools
        return ""

    def end_of_call(self, text: str) -> int | None:
        """Returns the index where the first complete call ends, so that generation can stop.

        Any text after the call would be the model's guess of the tool's output. Returns None if the
        text contains no complete call, or if models that use this format end their turn after a
        call.
        """
        del text
        return None

    def begins_call(self, text: str) -> int:
        """Returns the index where a call begins or may begin; else the length of the text."""
        return len(text)

    def read(self, text: str, tools: Sequence[Tool]) -> Written:
        """Parses an answer of the model.

        Args:
            text: the whole answer.
            tools: the available tools. In the lectures' format, a call has one argument without a
                name.
        """
        del tools
        return Written(text, ())


class Brackets(CallForm):
    """The format of the lectures: `<<name argument>>`."""

    def instructions(self, tools: Sequence[Tool]) -> str:
        """See `CallForm`."""
        lines = [f"<<{tool.name} ...>> {tool.description}" for tool in tools]
        return "\n".join(["Tools:", *lines])

    def end_of_call(self, text: str) -> int | None:
        """See `CallForm`."""
        found = _first_call(text)
        return None if found is None else found.end()

    def begins_call(self, text: str) -> int:
        """See `CallForm`."""
        return _index_of("<<", text)

    def read(self, text: str, tools: Sequence[Tool]) -> Written:
        """See `CallForm`. Parses only the first call. Its text becomes the only argument."""
        found = _first_call(text)
        if found is None:
            return Written(text, ())
        name, argument = found[1], found[2].strip()
        parameters = next((tool.parameters for tool in tools if tool.name == name), {})
        arguments = {next(iter(parameters), "argument"): argument}
        return Written(text, (ToolCall(name, arguments if argument or parameters else {}),))


class Hermes(CallForm):
    """The format of Hermes and Qwen: `<tool_call>` around a JSON object."""

    in_content = False

    def instructions(self, tools: Sequence[Tool]) -> None:
        """See `CallForm`."""

    def begins_call(self, text: str) -> int:
        """See `CallForm`."""
        return _index_of("<tool_call>", text)

    def read(self, text: str, tools: Sequence[Tool]) -> Written:
        """See `CallForm`. If a call cannot be parsed, all calls of the answer are ignored."""
        calls = []
        content = _HERMES.sub("", text).strip()
        for written in _HERMES.findall(text):
            try:
                calls.append(_of_json(json.loads(written)))
            except (ValueError, KeyError, TypeError, RecursionError):
                return Written(
                    text,
                    (),
                    f"the call {written[:100]!r} must be an object with name and arguments",
                )
        return Written(content, tuple(calls))


def _index_of(mark: str, text: str) -> int:
    """Returns the index where a mark begins; it may be incomplete at the end of the text.

    If there is no such mark, returns the length of the text.
    """
    found = text.find(mark)
    if found >= 0:
        return found
    overlaps = (n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n]))
    return len(text) - next(overlaps, 0)


def _first_call(text: str) -> re.Match[str] | None:
    """Returns the first call in brackets."""
    # Search only up to the last `>>`. Otherwise, the regular expression would scan the rest of the
    # text after each `<<` that is not closed.
    return _BRACKETS.search(text, 0, text.rfind(">>") + len(">>"))


def _of_json(call: dict[str, Any]) -> ToolCall:
    """Converts JSON to a call; raises one of several errors if it is invalid or not encodable."""
    name, arguments = call["name"], call.get("arguments") or {}
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise TypeError
    json.dumps(call, ensure_ascii=False).encode()  # half a surrogate pair cannot be encoded
    return ToolCall(name, arguments)

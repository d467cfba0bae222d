"""The forms in which models write calls of tools.

A form is chosen by the chat template: that of Hermes and Qwen, ``<tool_call>`` around an object
of JSON; or, with the template of the lectures, ``<<name argument>>``. Calls are read from what the
model writes, never from what a user or a tool says.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Literal

from ....data.errors import UserError
from ....data.tokenizers.chat_template import LECTURES, ChatTemplate
from .tool import Tool, ToolCall

_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_BRACKETS = re.compile(r"<<\s*(\w+)[ \n]*(.*?)>>", re.DOTALL)
END = ">>"
"""The end of a call in the lectures' form, after which the model need not write on."""


@dataclasses.dataclass(frozen=True)
class Written:
    """What a model wrote, taken apart."""

    content: str
    """The text that a person reads."""
    calls: tuple[ToolCall, ...]
    """The calls in it, in order."""
    malformed: str | None = None
    """Why a call in it cannot be read, if there is such a one."""


@dataclasses.dataclass(frozen=True)
class CallForm:
    """A form of calls."""

    name: Literal["hermes", "brackets"]

    @classmethod
    def of(cls, template: ChatTemplate) -> "CallForm":
        """Returns the form that belongs to a chat template.

        Raises:
            UserError: the template has no form that is known.
        """
        if template.source == LECTURES:
            return cls("brackets")
        if "<tool_call>" in template.source + (template.with_tools or ""):
            return cls("hermes")
        raise UserError(
            "the chat template has no form of tool calls that is known (<tool_call>, or the "
            "template of models without one): leave the tools out, or give another template"
        )

    @property
    def in_content(self) -> bool:
        """Whether a call stays in the content of its message, rather than apart from it."""
        return self.name == "brackets"

    def instructions(self, tools: Sequence[Tool]) -> str | None:
        """Returns what the instructions must say of the tools; None: the template says it."""
        if self.name == "hermes":
            return None
        lines = [f"<<{tool.name} ...>> {tool.description}" for tool in tools]
        return "\n".join(["Tools:", *lines])

    def is_whole(self, text: str) -> bool:
        """Returns whether a text that still grows ends with a whole call."""
        return self.name == "brackets" and text.rstrip().endswith(END) and "<<" in text

    def read(self, text: str, tools: Sequence[Tool]) -> Written:
        """Takes apart what a model wrote.

        Args:
            text: the whole answer.
            tools: those that it may call; the lectures' form has one argument without a name.
        """
        if self.name == "brackets":
            parameters = {tool.name: next(iter(tool.parameters), "") for tool in tools}
            found = [
                ToolCall(name, {parameters.get(name, "argument"): argument.strip()})
                for name, argument in _BRACKETS.findall(text)
            ]
            return Written(text, tuple(found))
        calls = []
        content = _HERMES.sub("", text).strip()
        for written in _HERMES.findall(text):
            try:
                call = json.loads(written)
                calls.append(ToolCall(call["name"], dict(call.get("arguments") or {})))
            except (ValueError, KeyError, TypeError):
                return Written(
                    text, (), f"the call {written[:100]!r} is no object with name and arguments"
                )
        return Written(content, tuple(calls))

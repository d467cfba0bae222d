"""A tool: a function that a model calls by its name, with JSON arguments."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from .....data.common.fields import require

LONGEST_OUTPUT = 2000
"""Maximum number of characters of a tool's output. A note replaces the rest of a longer output."""
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A model's request to run a tool."""

    name: str
    arguments: Mapping[str, object]

    @property
    def message(self) -> dict[str, Any]:
        """The call as a dict, as chat templates expect it."""
        function = {"name": self.name, "arguments": dict(self.arguments)}
        return {"type": "function", "function": function}


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function that a model may call.

    Example::

        def weather(city: str) -> str:
            return "sunny"

        tool = models.Tool("weather", "Tells the weather.", {"city": "The city."}, weather)
        models.Conversation.of_run("Qwen3-0.6B", tools=[tool])
    """

    name: str
    """The model calls the function by this name."""
    description: str
    """Describes the purpose of the function to the model."""
    parameters: Mapping[str, str | Mapping[str, object]]
    """A description or a JSON schema of each argument; all arguments are required."""
    run: Callable[..., object]
    """The function, called with keyword arguments. The result of the function is converted to text,
    and an exception is converted to `{"error": …}`.
    """

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema that a chat template shows to the model."""
        properties = {
            name: {"type": "string", "description": given}
            if isinstance(given, str)
            else dict(given)
            for name, given in self.parameters.items()
        }
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def __call__(self, arguments: Mapping[str, object]) -> str:
        """Returns the output as text; an error is returned as `{"error": …}`.

        Args:
            arguments: the model's arguments, which may be wrong.
        """
        try:
            self._check(arguments)
            result = self.run(**arguments)
            if not isinstance(result, str):
                result = json.dumps(result, ensure_ascii=False, default=str)
            return shortened(result)
        except Exception as error:  # an error of a tool must not end the conversation
            try:
                text = " ".join(str(error).split())
            except Exception:  # converting the result to text also runs code of the tool
                text = ""
            return as_error(text or type(error).__name__)

    def _check(self, arguments: Mapping[str, object]) -> None:
        # Check the names and then the types of the arguments, so that the model can correct its
        # call.
        properties = self.schema["function"]["parameters"]["properties"]
        require(
            arguments.keys() == properties.keys(),
            f"{self.name} takes the arguments {', '.join(properties) or 'none'}, not "
            f"{', '.join(map(str, arguments)) or 'none'}",
        )
        for name, value in arguments.items():
            wanted = properties[name].get("type", "")
            types = _TYPES.get(wanted)
            wrong = types is not None and not isinstance(value, types)
            require(
                not wrong and (not isinstance(value, bool) or wanted not in ("number", "integer")),
                f"{name} must be of the type {wanted}, got {value!r}",
            )


def as_error(text: str) -> str:
    """Returns the output that reports the failure of a tool to the model."""
    return json.dumps({"error": shortened(text)}, ensure_ascii=False)


def shortened(text: str) -> str:
    """Returns a text of at most `LONGEST_OUTPUT` characters, with a note if it was truncated.

    Halves of surrogate pairs, which no file and no tokenizer can represent, become `?`.
    """
    text = text.encode(errors="replace").decode()
    if len(text) <= LONGEST_OUTPUT:
        return text
    return f"{text[:LONGEST_OUTPUT]}\n[{len(text) - LONGEST_OUTPUT:,} more characters left out]"

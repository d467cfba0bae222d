"""Chat templates: a conversation as one text, byte for byte as transformers renders it.

A template is a program in the language of jinja2 that comes with a model's files and is not to be
trusted: it runs in jinja2's immutable sandbox, on plain JSON data alone.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import DataError

Message = Mapping[str, Any]
"""A message: ``role``, ``content``, and what else its template reads, such as ``tool_calls``."""

TEMPLATE_FILE = "chat_template.jinja"
"""The file of a folder that has its template."""

LECTURES = """\
{%- for message in messages -%}
    {%- if message.role == "system" -%}
        {{ message.content | trim }}{{ "\\n" }}
    {%- elif message.role == "assistant" -%}
        {{ "bot:" }}
        {%- generation %}{{ " " + message.content | trim }}{{ eos_token }}{% endgeneration %}
        {{- "\\n" }}
    {%- elif message.role == "tool" -%}
        {#- An output of several lines is indented, so that none of them begins like a turn. -#}
        {{ "tool: " + message.content | trim | replace("\\n", "\\n  ") + "\\n" }}
    {%- else -%}
        {{ message.role + ": " + message.content | trim + "\\n" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "bot:" }}{% endif -%}
"""
"""A template for models that have none: instructions, then ``user: …`` and ``bot: …`` in turns.

The token that ends a document also ends an answer. The space after ``bot:`` belongs to the answer.
"""
_MORE = "additional_chat_templates"
_DEFAULT, _WITH_TOOLS = "default", "tool_use"
WITH_TOOLS_FILE = f"{_MORE}/{_WITH_TOOLS}.jinja"
"""The file of a folder that has its template for conversations with tools, if that is another."""
_OLDEST_JINJA = (3, 1, 6)
_MARKER = re.compile(r"{%-?\s*generation\s*-?%}")
# Names under which a model's reasoning is found; templates read the first or the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as one text.

    Attributes:
      text: The text.
      answers: The half-open ranges of characters that the assistant wrote, in order, the ends of
        its turns included.
    """

    text: str
    answers: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template with the special tokens that it names.

    Example::

        template = data.ChatTemplate.of_folder("Qwen3-0.6B")
        text = template.render([{"role": "user", "content": "Hello"}], add_generation_prompt=True)

    Attributes:
      source: The template.
      tokens: The special tokens by the names that a template knows: ``bos_token``, ``eos_token`` ….
      with_tools: The template for conversations with tools; None: the same.
    """

    source: str
    tokens: Mapping[str, str] = field(default_factory=dict)
    with_tools: str | None = None

    @classmethod
    def of_folder(cls, folder: str | Path) -> "ChatTemplate":
        """Reads the template of a folder in Hugging Face's format.

        It is in ``chat_template.jinja``, with others in ``additional_chat_templates``, or in older
        folders in ``tokenizer_config.json``.

        Raises:
          DataError: The folder has no template.
        """
        found = find_template(folder)
        if found is None:
            raise DataError(
                f"{folder} has no chat template: give a folder with {TEMPLATE_FILE}, or use a "
                "template for models without one"
            )
        return found

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **variables: object,
    ) -> str:
        """Returns the text of a conversation.

        Args:
          messages: The messages; what is not plain JSON data becomes its type's name.
          tools: JSON schemas of the functions that the assistant may call.
          documents: Documents to answer from, with ``title`` and ``text``.
          add_generation_prompt: Whether the text ends with the beginning of the assistant's turn.
          **variables: Further variables of the template, such as ``enable_thinking``.

        Raises:
          DataError: The template refuses the conversation, or is faulty.
        """
        given = {**variables, "tools": tools, "documents": documents}
        return self._run(messages, given, add_generation_prompt=add_generation_prompt)[0]

    def render_with_answers(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        ends: Sequence[str] = (),
        **variables: object,
    ) -> RenderedChat:
        """Returns the text of a conversation, and which characters the assistant wrote.

        A template may mark these by ``{% generation %}``. If it does not, the text after each of
        the assistant's messages must begin with the text before it, and the answer is what is
        new, without white space after a token that ends it; a template that rewrites earlier turns
        is an error.

        Args:
          messages: The messages.
          tools: JSON schemas of the functions that the assistant may call.
          documents: Documents to answer from.
          ends: Names of tokens that may end an answer, besides those of ``tokens``.
          **variables: Further variables of the template.

        Raises:
          DataError: There is no answer, the template neither marks answers nor keeps the earlier
            turns, or it refuses the conversation.
        """
        given = {**variables, "tools": tools, "documents": documents}
        text, answers = self._run(messages, given)
        if not _MARKER.search(self._source(given)):
            answers = [
                self._by_prefix(messages, number, text, given, ends=ends)
                for number, message in enumerate(messages)
                if message.get("role") == "assistant"
            ]
        answers = [(start, end) for start, end in answers if end > start]
        if not answers:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise DataError(
                f"the conversation has no answer to learn (roles: {roles}): give a message of the "
                "role 'assistant' that is not empty"
            )
        return RenderedChat(text, tuple(answers))

    def _by_prefix(
        self,
        messages: Sequence[Message],
        number: int,
        text: str,
        given: Mapping[str, object],
        *,
        ends: Sequence[str],
    ) -> tuple[int, int]:
        """Returns the range of an assistant's message, from the texts before and after it."""
        before, _ = self._run(messages[:number], given, add_generation_prompt=True)
        after, _ = self._run(messages[: number + 1], given)
        if not after.startswith(before) or not text.startswith(after):
            raise DataError(
                f"the chat template rewrites earlier turns, so which part of message {number + 1} "
                "the assistant wrote is unknown: give a template that marks it by {% generation %} "
                "and {% endgeneration %}"
            )
        # White space after the token that ends the turn is the template's, not the assistant's.
        trimmed = after.rstrip()
        names = (*(token for token in self.tokens.values() if token), *ends)
        return len(before), len(trimmed) if trimmed.endswith(names) else len(after)

    def _source(self, given: Mapping[str, object]) -> str:
        if given["tools"] is None or self.with_tools is None:
            return self.source
        return self.with_tools

    def _run(
        self,
        messages: Sequence[Message],
        given: Mapping[str, object],
        *,
        add_generation_prompt: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text, and the ranges that the template marks.

        Args:
          messages: The messages.
          given: Tools, documents and further variables by name.
          add_generation_prompt: Whether the text ends with the beginning of the assistant's turn.
        """
        for number, message in enumerate(messages, start=1):
            if not isinstance(message, Mapping) or "role" not in message:
                raise DataError(
                    f"message {number} is {message!r}: write an object with role and content"
                )
        template, marks = _compiled(self._source(given))
        variables = {**self.tokens, **{name: _plain(value) for name, value in given.items()}}
        marks.begin()
        try:
            for block in template.generate(
                **variables,
                messages=[_with_reasoning(_plain(message)) for message in messages],
                add_generation_prompt=add_generation_prompt,
            ):
                marks.blocks.append(block)
        except Exception as error:  # a template is a program, which may raise anything
            raise DataError(
                f"the chat template refuses the conversation: {' '.join(str(error).split())}"
            ) from None
        return "".join(marks.blocks), marks.ranges


def find_template(folder: str | Path) -> ChatTemplate | None:
    """Returns the chat template of a folder in Hugging Face's format; None if it has none."""
    folder = Path(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    named = _templates(config.get("chat_template"))
    if (file := folder / TEMPLATE_FILE).is_file():
        named[_DEFAULT] = file.read_text(encoding="utf-8")
    for file in sorted((folder / _MORE).glob("*.jinja")):
        named[file.stem] = file.read_text(encoding="utf-8")
    if _DEFAULT not in named:
        return None
    return ChatTemplate(named[_DEFAULT], _special_tokens(config), named.get(_WITH_TOOLS))


@dataclass
class _Marks:
    """The text that a template has made, and the ranges that it marked, while it runs."""

    blocks: list[str]
    ranges: list[tuple[int, int]]

    def begin(self) -> None:
        self.blocks, self.ranges = [], []


def _templates(stored: object) -> dict[str, str]:
    """Returns the templates of ``tokenizer_config.json`` by name: one, or a list of named ones."""
    if isinstance(stored, str):
        return {_DEFAULT: stored}
    return {one["name"]: one["template"] for one in stored} if isinstance(stored, list) else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the special tokens of ``tokenizer_config.json`` by name."""
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _plain(value: object) -> Any:
    """Returns plain JSON data, of which a template can call no dangerous method."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):  # an enumeration
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):  # a numpy number
        return float(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item) for item in value)
    return f"<{type(value).__name__}>"


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message without empty fields, whose reasoning has the names that templates read."""
    message = {key: value for key, value in message.items() if value is not None}
    found = [message[name] for name in _REASONING if name in message]
    if not found:
        return message
    return {"thinking": found[0], **message, "reasoning_content": found[0]}


@lru_cache(maxsize=64)
def _compiled(source: str) -> tuple[Any, _Marks]:
    """Compiles a template in jinja2's immutable sandbox; the marks are those of its next run."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    version = tuple(int(part) for part in jinja2.__version__.split(".")[:3])
    if version < _OLDEST_JINJA:  # older ones have known ways out of the sandbox
        raise DataError(f"jinja2 {jinja2.__version__} is unsafe: install jinja2 3.1.6 or newer")
    marks = _Marks([], [])

    class Generation(jinja2.ext.Extension):
        """``{% generation %} … {% endgeneration %}`` encloses what the assistant wrote."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            call = self.call_method("_mark")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            text = caller()
            start = sum(map(len, marks.blocks))
            marks.ranges.append((start, start + len(text)))
            return text

    class Namespace(jinja2.utils.Namespace):
        """A namespace that refuses names with an underscore first, a way out of the sandbox."""

        def __init__(*args: Any, **attributes: Any) -> None:
            self, args = args[0], args[1:]
            for name in (fields := dict(*args, **attributes)):
                _check_name(name)
            jinja2.utils.Namespace.__init__(self, fields)

        def __setitem__(self, name: Any, value: Any) -> None:
            _check_name(name)
            super().__setitem__(name, value)

    def _check_name(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a template may not set the name {name!r}")

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_refuse, strftime_now=_now, dict=_make_dict, namespace=Namespace
    )
    try:
        return environment.from_string(source), marks
    except jinja2.TemplateError as error:
        raise DataError(f"the chat template is faulty: {' '.join(str(error).split())}") from None


def _to_json(
    x: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    *,
    sort_keys: bool = False,
) -> str:
    """Formats JSON without jinja2's escapes for HTML."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _make_dict(*args: Any, **fields: Any) -> dict[Any, Any]:
    return dict(*args, **fields)

"""Renders a conversation as one text, exactly as transformers renders its chat template.

A template is an untrusted jinja2 program among the files of a model. It runs in a sandbox with
limits, and reads only plain JSON data. The output records which characters the template wrote and
which came from its input; see ``chat_templates.traced``.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..common.errors import DataError, UserError, reported
from ..common.fields import (
    Checked,
    check_value,
    make_record,
    require,
    require_one_of,
    require_value,
    without_none,
)
from ..common.json_text import optional_object
from .bounds import MAX_SOURCE, Run, bounded, spend
from .rendered import RenderedChat, fewest_rows, following
from .traced import ASSISTANT, TEMPLATE, USER, Traced, origins, parts_of

Message = Mapping[str, Any]
"""A message with ``role``, ``content`` and other fields that a template reads, such as
``tool_calls``.
"""

TEMPLATE_FILE = "chat_template.jinja"
"""The name of the file in a folder that contains the chat template."""

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
"""The default template: the instructions, followed by alternating ``user: …`` and ``bot: …``.

An answer ends with the token that ends a document. The space after ``bot:`` belongs to the answer.
"""
_MORE = "additional_chat_templates"
_DEFAULT, _WITH_TOOLS = "default", "tool_use"
WITH_TOOLS_FILE = f"{_MORE}/{_WITH_TOOLS}.jinja"
"""The file in a folder that contains a separate template for conversations with tools."""
_MARKER = re.compile(r"{%-?\s*generation\s*-?%}")
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""The roles that a message can have. A template may write a role in a control token."""
# Fields that may contain a model's reasoning. Templates read the first or the second field.
_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template and the special tokens that it can write.

    Example::

        template = data.ChatTemplate.of_folder("Qwen3-0.6B")
        text = template.render([{"role": "user", "content": "Hello"}], add_generation_prompt=True)

    Attributes:
      source: The source code of the template.
      tokens: The special tokens by the names that templates use, such as ``bos_token`` and
        ``eos_token``.
      with_tools: The template for conversations with tools. Defaults to ``source``.
    """

    source: str
    tokens: Mapping[str, str] = field(default_factory=dict)
    with_tools: str | None = None

    @classmethod
    def of_folder(cls, folder: str | Path) -> "ChatTemplate":
        """Reads the template from a folder in the Hugging Face format.

        The template is in ``chat_template.jinja``, and additional templates are in
        ``additional_chat_templates``. Older folders have all templates in
        ``tokenizer_config.json``.

        Raises:
          DataError: The folder has no template.
        """
        problem = (
            f"{folder} has no chat template: give a folder with {TEMPLATE_FILE}, or use a template "
            "for models without one"
        )
        return require_value(find_template(folder), problem, DataError)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        documents: Sequence[Message] | None = None,
        add_generation_prompt: bool = False,
        **variables: object,
    ) -> str:
        """Renders a conversation as a text.

        Args:
          messages: The messages. A value that is not plain JSON is rendered as the name of its
            type.
          tools: JSON schemas of the functions that the assistant may call.
          documents: The documents that an answer is based on, each with ``title`` and ``text``.
          add_generation_prompt: Whether the text ends with the beginning of the assistant's turn.
          **variables: Further variables of the template, such as ``enable_thinking``.

        Raises:
          DataError: The template rejects the conversation, or has an error.
        """
        given = {**variables, "tools": tools, "documents": documents}
        return self._run(messages, given, add_generation_prompt=add_generation_prompt).text

    def render_traced(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
    ) -> RenderedChat:
        """Renders a conversation, and records who wrote each character; see ``render``."""
        given = {"tools": tools, "documents": None}
        return self._run(messages, given, add_generation_prompt=add_generation_prompt)

    def render_rows(
        self,
        messages: Sequence[Message],
        *,
        first: int = 0,
        ends: Sequence[str] = (),
        **given: object,
    ) -> tuple[RenderedChat, ...]:
        """Renders a conversation as one or more texts that together contain all answers.

        A template may mark answers with ``{% generation %}``. Without these marks, an answer is the
        text that an assistant's message adds to the text before it, excluding white space after the
        end token. If the text of all messages contains every answer unchanged, it is the only text.
        If the template rewrites earlier turns (for example, Qwen3's template removes their
        reasoning), there are several texts. Each text ends with an answer, and also learns the
        earlier answers that it contains unchanged.

        Args:
          messages: The messages.
          first: The number of messages that form the prompt; answers in the prompt are ignored.
          ends: The names of tokens that may end an answer, in addition to ``tokens``.
          **given: ``tools``, ``documents`` and other variables of the template.

        Raises:
          DataError: The conversation has no answer, the text up to an answer does not begin with
            the text before this answer, or the template rejects the conversation or leaves out a
            call of a tool.
        """
        given = {"tools": None, "documents": None, **given}
        whole = self._run(messages, given)
        # If the template marks answers, rendering has already recorded their ranges.
        is_marked = _MARKER.search(self._source(given)) is not None
        if is_marked:
            rows = [whole]
        else:
            turns = [
                self._turn(messages, n, given, ends=ends)
                for n in range(first, len(messages))
                if messages[n].get("role") == "assistant"
            ]
            rows = list(fewest_rows(whole, turns))
        written = [[(a, b) for a, b in row.answers if b > a] for row in rows]
        kept = [replace(row, answers=tuple(x)) for row, x in zip(rows, written, strict=True) if x]
        require(
            kept,
            "the conversation has no answer to learn: give a message of the role 'assistant' that "
            "is not empty",
            error=DataError,
        )
        texts = [row.text for row in kept]
        _check_calls(messages[:first], texts)
        # The name of a function may also occur in the list of tools and in a text of the user, so
        # search only the answers. A template with marks may leave the calls outside of the marks.
        answers = [row.text[a:b] for row in kept for a, b in row.answers]
        _check_calls(messages[first:], texts if is_marked else answers)
        return tuple(kept)

    def _turn(
        self,
        messages: Sequence[Message],
        number: int,
        given: Mapping[str, object],
        *,
        ends: Sequence[str],
    ) -> RenderedChat:
        """Returns the text up to the end of an assistant's message, and marks only this message."""
        before = self._run(messages[:number], given, add_generation_prompt=True)
        after = following(before, self._run(messages[: number + 1], given))
        require(
            after.text.startswith(before.text),
            f"the chat template rewrites what precedes message {number + 1}, so the part that "
            "the assistant wrote is unknown: give a template that marks it by {% generation %} and "
            "{% endgeneration %}",
            error=DataError,
        )
        # White space after the token that ends the turn does not belong to the answer.
        trimmed = after.text.rstrip()
        names = (*filter(None, self.tokens.values()), *ends)
        end = len(trimmed) if trimmed.endswith(names) else len(after.text)
        return replace(after, answers=((len(before.text), end),))

    @property
    def all_sources(self) -> str:
        """The joined source code of the template and the template for tools."""
        return self.source + (self.with_tools or "")

    def _source(self, given: Mapping[str, object]) -> str:
        return self.source if given["tools"] is None else self.with_tools or self.source

    def _run(
        self,
        messages: Sequence[Message],
        given: Mapping[str, object],
        *,
        add_generation_prompt: bool = False,
    ) -> RenderedChat:
        """Renders the messages, and records the ranges that the template marks as answers.

        Args:
          messages: The messages.
          given: The tools, the documents and other variables, by name.
          add_generation_prompt: Whether the text ends with the beginning of the assistant's turn.
        """
        from .sandbox import MARKS, Marks, compiled

        template, marks = compiled(self._source(given)), Marks()
        # A template is a program, so it may raise any exception.
        problem = "the chat template refuses the conversation"
        remedy = "change the messages, or give another template"
        # The `generation` tag finds the marks of this run through a context variable.
        token = MARKS.set(marks)
        try:
            with reported(problem, remedy, Exception):
                # The origin of the special tokens is the template, and the origin of all other
                # variables is the user.
                variables = {
                    **{name: Traced(text, TEMPLATE) for name, text in self.tokens.items()},
                    **{name: _plain(value, USER) for name, value in given.items()},
                    "messages": [self._traced(x, n) for n, x in enumerate(messages, start=1)],
                    "add_generation_prompt": add_generation_prompt,
                }
                with bounded(Run.of(_size(variables))):
                    for block in template.generate(variables):
                        spend(characters=len(block))
                        marks.blocks.append(block)
        finally:
            MARKS.reset(token)
        by = "".join(map(origins, marks.blocks))
        return RenderedChat("".join(marks.blocks), tuple(marks.ranges), by)

    def _traced(self, message: Message, number: int) -> dict[str, Any]:
        """Converts a message for a template, to plain data with traced strings."""
        # Format the message only if there is an error, because it may be long.
        if not isinstance(message, Mapping) or "role" not in message:
            raise DataError(
                f"message {number} is {message!r}: write an object with role and content"
            )
        role, content = message["role"], message.get("content")
        check_role(role, f"message {number}")
        require(
            self.source != LECTURES or not message.get("tool_calls"),
            "the default chat template does not support tool_calls: write them in the contents "
            "as <<name argument>>, or give a template that supports them",
            error=DataError,
        )
        if isinstance(content, list | tuple):
            texts = [text_of_part(part, number) for part in content]
            # The default template requires the content as one text.
            if self.source == LECTURES:
                message = {**message, "content": "".join(texts)}
        plain = _plain(message, ASSISTANT if role == "assistant" else USER)
        # The role is one of `ROLES`, so the template may use it in a control token.
        return _with_reasoning({**plain, "role": Traced(str.__str__(role), TEMPLATE)})


def _check_calls(messages: Sequence[Message], texts: Sequence[str]) -> None:
    """Checks that the texts contain the calls in the messages.

    A template that does not read ``tool_calls`` writes an empty answer instead of a call.

    Raises:
      DataError: A text leaves out the name of a function that the assistant calls.
    """
    for name in (name for message in messages for name in _called(message)):
        if not any(name in text for text in texts):
            raise DataError(
                f"the chat template leaves out the call of {name!r}, or does not write it in an "
                "answer: give a template that reads tool_calls, or write the calls in the contents"
            )


def _called(message: Message) -> Iterator[str]:
    """Yields the names of the functions that a message calls in one of the usual forms."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list | tuple) else ():
        function = call.get("function", call) if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            yield name


def check_role(role: object, location: str) -> None:
    """Checks the role of a message.

    Raises:
      DataError: The role is not in ``ROLES``.
    """
    require_one_of(f"{location}: the role", role, ROLES, error=DataError)


def text_of_part(part: object, number: int) -> str:
    """Returns the text of one part of a message whose content is a list of parts.

    Args:
      part: The part.
      number: The number of the message, for error messages.

    Raises:
      DataError: The part is not text.
    """
    text, kind = part, type(part).__name__
    if isinstance(part, Mapping):
        kind = part.get("type", "text")
        text = part.get("text") if kind == "text" else None
    if not isinstance(text, str):
        raise DataError(
            f"message {number} has a part of the type {kind!r} in its content: give parts of the "
            "type text, each with a text"
        )
    return text


def find_template(folder: str | Path) -> ChatTemplate | None:
    """Returns the chat template in a Hugging Face folder, or None if there is none.

    Raises:
      DataError: A file cannot be read, or contains no templates.
    """
    # This file contains the special tokens and, in older folders, also the templates.
    folder = Path(folder)
    path = folder / "tokenizer_config.json"
    config = optional_object(path)
    # A folder may have a default template and other named templates.
    named = _templates(config.get("chat_template"), path)
    # Templates in separate files override the templates in tokenizer_config.json.
    if (file := folder / TEMPLATE_FILE).is_file():
        named[_DEFAULT] = read_template(file)
    for file in sorted((folder / _MORE).glob("*.jinja")):
        named[file.stem] = read_template(file)
    if _DEFAULT not in named:
        return None
    return ChatTemplate(named[_DEFAULT], _special_tokens(config), named.get(_WITH_TOOLS))


def read_template(file: Path) -> str:
    """Reads the source code of a template.

    Raises:
      DataError: The file is too long, or not UTF-8.
    """
    size = file.stat().st_size
    require(
        size <= 4 * MAX_SOURCE,
        f"{file} must have at most {4 * MAX_SOURCE:,} bytes, got {size:,}: name a chat template",
        error=DataError,
    )
    with reported(f"{file} is not UTF-8", "save it as UTF-8", UnicodeDecodeError):
        return file.read_text(encoding="utf-8")


@dataclass(frozen=True)
class _NamedTemplate(Checked):
    """A template in a list of ``tokenizer_config.json``."""

    name: str
    template: str


def _templates(stored: Any, path: Path) -> dict[str, str]:
    """Returns the templates in ``tokenizer_config.json`` by name; a plain text is the default."""
    if isinstance(stored, str):
        return {_DEFAULT: stored}
    try:
        check_value("chat_template", stored, tuple[dict, ...] | None)
        named = [make_record(_NamedTemplate, one, "chat_template.") for one in stored or ()]
    except UserError as error:
        remedy = "give a text, or a list of objects with the texts name and template"
        raise DataError(f"{path}: {error}: {remedy}") from None
    return {one.name: one.template for one in named}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the special tokens in ``tokenizer_config.json``, by name."""
    contents = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token")
    }
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _plain(value: object, by: str) -> Any:
    """Converts a value to plain JSON data, which has no methods that a template could misuse.

    Args:
      value: The value.
      by: The origin of the strings in the value.
    """
    if isinstance(value, str):
        return Traced(str.__str__(value), by)
    if value is None:
        return None
    # A subclass, such as a numpy number, could add methods.
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_plain(key, by): _plain(item, by) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item, by) for item in value)
    return Traced(f"<{type(value).__name__}>", by)


def _size(value: object) -> int:
    """Returns the number of characters plus the number of values in some data."""
    parts = list(parts_of(value))
    return len(parts) + sum(len(part) for part in parts if isinstance(part, str))


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Removes fields that are None, and stores reasoning under both names that templates use."""
    message = without_none(message)
    # If a message has several of these fields, use the first field in the order of `_REASONING`.
    reasoning = [message[name] for name in _REASONING if name in message]
    if not reasoning:
        return message
    return {"thinking": reasoning[0], **message, "reasoning_content": reasoning[0]}

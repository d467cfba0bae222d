"""Chat templates: a conversation as one text, byte for byte as transformers renders it.

A template is an untrusted jinja2 program that comes with a model's files. A template runs in a
sandbox, within bounds, and reads only plain JSON data. Its output records which characters the
template wrote and which came from its input; see ``chat_templates.traced``.
"""

import re
from collections.abc import Mapping, Sequence
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
"""A message: ``role``, ``content``, and other fields that its template reads, such as
``tool_calls``."""

TEMPLATE_FILE = "chat_template.jinja"
"""The file of a folder's template."""

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
"""The default template: instructions, then ``user: …`` and ``bot: …`` in turns.

The token that ends a document also ends an answer. The space after ``bot:`` belongs to the answer.
"""
_MORE = "additional_chat_templates"
_DEFAULT, _WITH_TOOLS = "default", "tool_use"
WITH_TOOLS_FILE = f"{_MORE}/{_WITH_TOOLS}.jinja"
"""The file of a folder's separate template for conversations with tools."""
_MARKER = re.compile(r"{%-?\s*generation\s*-?%}")
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""The roles of messages. A template may write them as a part of a control token."""
# Fields that may contain a model's reasoning; a template reads the first or the second field.
_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template with the special tokens that it names.

    Example::

        template = data.ChatTemplate.of_folder("Qwen3-0.6B")
        text = template.render([{"role": "user", "content": "Hello"}], add_generation_prompt=True)

    Attributes:
      source: The template.
      tokens: The special tokens by their names in templates: ``bos_token``, ``eos_token`` ….
      with_tools: The template for conversations with tools. Defaults to ``source``.
    """

    source: str
    tokens: Mapping[str, str] = field(default_factory=dict)
    with_tools: str | None = None

    @classmethod
    def of_folder(cls, folder: str | Path) -> "ChatTemplate":
        """Reads the template of a folder in the Hugging Face format.

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
        """Returns the text of a conversation.

        Args:
          messages: The messages. A value that is not plain JSON is rendered as its type's name.
          tools: JSON schemas of the functions that the assistant may call.
          documents: Documents to answer from, with ``title`` and ``text``.
          add_generation_prompt: Whether the text ends with the beginning of the assistant's turn.
          **variables: Further variables of the template, such as ``enable_thinking``.

        Raises:
          DataError: The template refuses the conversation, or is faulty.
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
        """Returns the text of a conversation, and who wrote each character; see ``render``."""
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
        """Renders a conversation as one or more texts that keep all of its answers.

        A template may mark answers with ``{% generation %}``. Without these marks, an answer is the
        text that an assistant's message adds to the text before it, without white space after its
        end token. If the whole text keeps all answers, it is the only text. A template that
        rewrites earlier turns (Qwen3's removes their reasoning) gives several texts. Each of these
        texts ends with an answer, and includes the earlier answers that it keeps.

        Args:
          messages: The messages.
          first: The number of messages that form the prompt; answers among them are ignored.
          ends: Names of tokens that may end an answer, in addition to ``tokens``.
          **given: ``tools``, ``documents`` and other variables of the template.

        Raises:
          DataError: The conversation has no answer, the text of a message does not begin with the
            text before it, or the template refuses the conversation.
        """
        given = {"tools": None, "documents": None, **given}
        whole = self._run(messages, given)
        # Templates that mark answers give their ranges directly.
        if _MARKER.search(self._source(given)):
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
        return tuple(kept)

    def _turn(
        self,
        messages: Sequence[Message],
        number: int,
        given: Mapping[str, object],
        *,
        ends: Sequence[str],
    ) -> RenderedChat:
        """Returns the text up to the end of an assistant's message, its only marked answer."""
        before = self._run(messages[:number], given, add_generation_prompt=True)
        after = following(before, self._run(messages[: number + 1], given))
        require(
            after.text.startswith(before.text),
            f"the chat template rewrites what precedes message {number + 1}, so the part that "
            "the assistant wrote is unknown: give a template that marks it by {% generation %} and "
            "{% endgeneration %}",
            error=DataError,
        )
        # White space after the token that ends the turn is the template's, not the assistant's.
        trimmed = after.text.rstrip()
        names = (*filter(None, self.tokens.values()), *ends)
        end = len(trimmed) if trimmed.endswith(names) else len(after.text)
        return replace(after, answers=((len(before.text), end),))

    @property
    def all_sources(self) -> str:
        """The source code of the template, followed by that of the template for tools."""
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
        """Renders the messages, and records the ranges of text that the template marks as answers.

        Args:
          messages: The messages.
          given: Tools, documents and other variables by name.
          add_generation_prompt: Whether the text ends with the beginning of the assistant's turn.
        """
        from .sandbox import MARKS, Marks, compiled

        template, marks = compiled(self._source(given)), Marks()
        # A template is a program, which may raise any exception.
        problem = "the chat template refuses the conversation"
        remedy = "change the messages, or give another template"
        # The `generation` tag finds the marks of this run through a context variable.
        token = MARKS.set(marks)
        try:
            with reported(problem, remedy, Exception):
                # The template is the author of special tokens, and the user is the author of other
                # variables.
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
        """Returns a message as a template reads it: plain data whose strings have origins."""
        # Format the message only for an error, because it may be long.
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
            # The default template needs the content as one text.
            if self.source == LECTURES:
                message = {**message, "content": "".join(texts)}
        plain = _plain(message, ASSISTANT if role == "assistant" else USER)
        # The role was checked, so a template may use it in a control token.
        return _with_reasoning({**plain, "role": Traced(str.__str__(role), TEMPLATE)})


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
      number: The index of the message, for the error.

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
    """Returns the chat template of a folder in the Hugging Face format; None if it has none.

    Raises:
      DataError: A file cannot be read, or contains no templates.
    """
    # The special tokens are in the same file as the templates of older folders.
    folder = Path(folder)
    path = folder / "tokenizer_config.json"
    config = optional_object(path)
    # A folder may have a default template, and other templates that have names.
    named = _templates(config.get("chat_template"), path)
    # Separate files override tokenizer_config.json, which has the templates of older folders.
    if (file := folder / TEMPLATE_FILE).is_file():
        named[_DEFAULT] = read_template(file)
    for file in sorted((folder / _MORE).glob("*.jinja")):
        named[file.stem] = read_template(file)
    if _DEFAULT not in named:
        return None
    return ChatTemplate(named[_DEFAULT], _special_tokens(config), named.get(_WITH_TOOLS))


def read_template(file: Path) -> str:
    """Reads the source of a template.

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
    """Returns the templates of ``tokenizer_config.json`` by name: one, or several with names."""
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
    """Returns the special tokens of ``tokenizer_config.json`` by name."""
    contents = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token")
    }
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _plain(value: object, by: str) -> Any:
    """Returns plain JSON data, which has no methods that are dangerous in a template.

    Args:
      value: The data.
      by: The author of its strings.
    """
    if isinstance(value, str):
        return Traced(str.__str__(value), by)
    if value is None:
        return None
    # A subclass, such as a number of numpy, could add methods.
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_plain(key, by): _plain(item, by) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item, by) for item in value)
    return Traced(f"<{type(value).__name__}>", by)


def _size(value: object) -> int:
    """Returns the number of characters in some data, and the number of its values."""
    parts = list(parts_of(value))
    return len(parts) + sum(len(part) for part in parts if isinstance(part, str))


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Removes fields that are None, and stores reasoning under both names that templates read."""
    message = without_none(message)
    # If a message has several of these fields, use the first in the order of `_REASONING`.
    reasoning = [message[name] for name in _REASONING if name in message]
    if not reasoning:
        return message
    return {"thinking": reasoning[0], **message, "reasoning_content": reasoning[0]}

"""Conversations and completions as tokens, with a mask of the tokens that are to be learned."""

import functools
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import DataError
from ..tokenizers.base import Tokenizer
from ..tokenizers.chat_template import LECTURES, ChatTemplate, Message

_ASSISTANT = "assistant"
_MARKS = range(0xF0000, 0xFFFFE)
"""Characters for private use, two of which enclose what a person typed."""
V = TypeVar("V")


@dataclass(frozen=True)
class EncodedChat:
    """A text as tokens.

    Attributes:
      text: The text.
      ids: Its tokens.
      answers: For each token whether it is to be learned: the assistant wrote it, or it ends the
        assistant's turn.
    """

    text: str
    ids: list[int]
    answers: list[bool]


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    template: ChatTemplate | None = None,
) -> EncodedChat:
    """Encodes a conversation, as the tokenizer's chat template writes it.

    The whole text is encoded at once. The names of control tokens that the template writes are
    these tokens; in what a user, a tool or the instructions say they are ordinary text. In what
    the assistant says, too, unless the token is not special, as ``<think>`` of Qwen3.

    Example::

        tokenizer = data.load_tokenizer("Qwen3-0.6B")
        messages = [{"role": "user", "content": "What is 2 + 3?"}]
        prompt = data.encode_chat(tokenizer, messages, add_generation_prompt=True)

    Args:
      tokenizer: The tokenizer.
      messages: The messages, each with ``role`` and ``content``.
      tools: JSON schemas of the functions that the assistant may call.
      add_generation_prompt: Whether the text ends with the beginning of the assistant's turn. Then
        nothing is to be learned.
      template: Another template than ``tokenizer.chat_template``.

    Raises:
      DataError: The template refuses the conversation, or has no form for calls of tools; or there
        is no answer to learn, and ``add_generation_prompt`` is false.
    """
    template = tokenizer.chat_template if template is None else template
    if template.source == LECTURES and any(
        isinstance(message, Mapping) and message.get("tool_calls") for message in messages
    ):
        raise DataError(
            "the chat template of user: and bot: has no form for tool_calls: write them in the "
            "contents as <<name argument>>, or give a template that has a form"
        )
    typed = _Typed.of(tokenizer, template, messages, tools)
    marked, marked_tools = typed.mark_messages(messages), typed.mark(tools, typed.all_names)
    if add_generation_prompt:
        rendered = template.render(marked, tools=marked_tools, add_generation_prompt=True)
        spans: tuple[tuple[int, int], ...] = ()
    else:
        ends = [name for name, special in tokenizer.control_tokens().items() if special]
        found = template.render_with_answers(marked, tools=marked_tools, ends=ends)
        rendered, spans = found.text, found.answers
    text, literal, spans = typed.unmark(rendered, spans)
    ids, offsets = tokenizer.encode_with_controls(text, literal)
    answers = [any(a < end and b > start for start, end in spans) for a, b in offsets]
    if not add_generation_prompt and not any(answers):
        raise DataError(
            "no token of the conversation is to be learned: give the assistant an answer that is "
            f"not empty (the text is {text[:80]!r})"
        )
    return EncodedChat(text, ids, answers)


def end_of_turn(tokenizer: Tokenizer, template: ChatTemplate) -> tuple[int, ...]:
    """Returns the control token that ends an assistant's turn, if the template writes one.

    It need not be the token that ends a text: Gemma's ``<end_of_turn>`` is another than ``<eos>``.
    """
    messages = [{"role": "user", "content": "a"}, {"role": _ASSISTANT, "content": "b"}]
    encoded = encode_chat(tokenizer, messages, template=template)
    last = max(i for i, answer in enumerate(encoded.answers) if answer)
    names = [
        tokenizer.encode_with_controls(name)[0]
        for name, special in tokenizer.control_tokens().items()
        if special
    ]
    return (encoded.ids[last],) if [encoded.ids[last]] in names else ()


def encode_completion(tokenizer: Tokenizer, prompt: str, completion: str) -> EncodedChat:
    """Encodes a prompt and its completion, without a chat template.

    Both are encoded together, after the tokens that the vocabulary puts before a text, and an end
    token follows. The prompt's tokens are those that it has in common with the prompt alone, as in
    TRL: where a token covers the border of both, it belongs to the completion.

    Args:
      tokenizer: The tokenizer; it has a token that ends a text.
      prompt: A text; an empty one makes a document of which every token is to be learned.
      completion: The text that follows.

    Raises:
      DataError: The completion is empty, or the tokenizer has no end token.
    """
    end = tokenizer.special_ids.eos
    if end is None:
        raise DataError(
            f"this {tokenizer.kind} tokenizer has no token that ends a text, and an answer needs "
            "one: name the tokenizer of a causal language model"
        )
    if not completion:
        raise DataError(f"the completion of {prompt[:80]!r} is empty: leave the example out")
    before = tokenizer.frame.before
    ids = tokenizer.encode(prompt + completion, add_special_tokens=False)
    alone = tokenizer.encode(prompt, add_special_tokens=False) if prompt else []
    pairs = zip(alone, ids, strict=False)
    common = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
    learned = [False] * (len(before) + common) + [True] * (len(ids) - common + 1)
    return EncodedChat(prompt + completion, [*before, *ids, end], learned)


@dataclass(frozen=True)
class _Typed:
    """Marks the names of control tokens that a person typed, so that they stay text.

    Attributes:
      start: A character that no message has, before such a name.
      end: Another one, after it.
      all_names: The names of control tokens.
      special_names: Those of special tokens, which an assistant does not write as text either.
      beginnings: What a name may begin with, its whole excepted.
    """

    start: str
    end: str
    all_names: re.Pattern[str]
    special_names: re.Pattern[str]
    beginnings: frozenset[str]

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        messages: Sequence[Message],
        tools: object,
    ) -> "_Typed":
        content = json.dumps([messages, tools], ensure_ascii=False, default=str)
        unused = (chr(code) for code in _MARKS if chr(code) not in content)
        source = template.source + (template.with_tools or "")
        names = {
            name: special
            for name, special in tokenizer.control_tokens().items()
            if special or name in source
        }
        return cls(
            next(unused),
            next(unused),
            _any_of(names),
            _any_of([name for name, special in names.items() if special]),
            _beginnings(tuple(names)),
        )

    def mark_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages with marks around the names that were typed."""
        marked = []
        for message in messages:
            by_assistant = isinstance(message, Mapping) and message.get("role") == _ASSISTANT
            names = self.special_names if by_assistant else self.all_names
            marked.append(self.mark(message, names))
        return marked

    def mark(self, value: V, names: re.Pattern[str]) -> V:
        """Returns plain data with marks around the names in its strings.

        In keys these are the names of special tokens: a template looks keys up, and the arguments
        of a call have keys that the assistant made up. The beginning of a name at the end of a
        string is marked as well, since a template may join it to the next string.
        """
        marked: Any = value
        if isinstance(value, str):
            marked = names.sub(lambda match: f"{self.start}{match[0]}{self.end}", value)
            text = marked.rstrip()
            longest = max(map(len, self.beginnings), default=0)
            for size in range(min(longest, len(text)), 0, -1):
                if text[-size:] in self.beginnings:
                    marked = f"{text[:-size]}{self.start}{text[-size:]}{self.end}"
                    marked += value[len(value.rstrip()) :]
                    break
        elif isinstance(value, Mapping):
            marked = {
                self.mark(key, self.special_names): self.mark(item, names)
                for key, item in value.items()
            }
        elif isinstance(value, list | tuple):
            marked = [self.mark(item, names) for item in value]
        return marked

    def unmark(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[str, list[tuple[int, int]], tuple[tuple[int, int], ...]]:
        """Returns the text without marks, what was marked, and the spans in that text."""
        if self.start not in text and self.end not in text:
            return text, [], tuple(spans)
        marks = [i for i, c in enumerate(text) if c in (self.start, self.end)]

        def moved(place: int) -> int:
            return place - sum(mark < place for mark in marks)

        pattern = re.compile(f"{self.start}({self.all_names.pattern}){self.end}")
        literal = {(moved(m.start(1)), moved(m.end(1))) for m in pattern.finditer(text)}
        clean = text.replace(self.start, "").replace(self.end, "")
        # A template that cuts a text may part two marks; what joins across one is typed as well.
        inside = [moved(mark) for mark in marks]
        for match in self.all_names.finditer(clean):
            start, end = match.span()
            if any(start < place < end for place in inside):
                literal.add((start, end))
        return clean, sorted(literal), tuple((moved(start), moved(end)) for start, end in spans)


@functools.lru_cache(maxsize=32)
def _beginnings(names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(name[:size] for name in names for size in range(1, len(name)))


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern of any of the names, longer ones first; without names it never matches."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

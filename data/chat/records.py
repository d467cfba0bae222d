r"""Reads demonstrations and preferences from records, based on the keys of each record.

==================================================  ===========================================
keys                                                a record is
==================================================  ===========================================
``text``                                            a document
``prompt``, ``completion``                          two texts, or two lists of messages
``messages`` (and ``tools``)                        a conversation
``conversations`` of ``from`` and ``value``         a conversation (ShareGPT)
``instruction``, ``output`` (and ``input``)         a question and its answer (Alpaca)
``prompt``, ``chosen``, ``rejected``                a preference; texts or lists of messages
``chosen``, ``rejected``                            the same; the prompt is their common
                                                    beginning. Texts of ``\n\nHuman:`` and
                                                    ``\n\nAssistant:`` are dialogues (HH)
``prompt``, ``ranked``                              answers, best first; tied answers in a list
==================================================  ===========================================

If a record has the keys of several rows of the table, the first of these rows applies. The field
``task`` names the task of a demonstration.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from ..chat_templates.chat_template import Message, check_role
from ..common.errors import DataError, misspelled
from ..common.fields import expectation, require, require_one_of
from ..common.json_text import parse_json
from ..tokenizers.base import Tokenizer
from .encoding import (
    EncodedChat,
    encode_chat,
    encode_completion,
    encode_rows,
    num_common,
    only_row,
)
from .rows import Row

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""Maps the names of speakers in ShareGPT data to the roles in chat templates."""
_HH_TURN = re.compile(r"\n\n(Human|Assistant):")
_DEMONSTRATIONS = "text; prompt and completion; messages; conversations; or instruction and output"
_PREFERENCES = "prompt, chosen and rejected; chosen and rejected; or prompt and ranked"


class UnusableRecordError(DataError):
    """A record cannot be used, but other records of its source may be usable."""


@dataclass(frozen=True)
class Dialogue:
    """A conversation; the model learns the messages of the assistant.

    Attributes:
      messages: The messages, each with ``role`` and ``content``.
      tools: JSON schemas of the functions that the assistant may call; None if there are none.
      first: The number of messages that form the prompt; answers in the prompt are not learned.
      task: The name of the task, or None if the data do not name one.
      location: The location of the record, for error messages.
    """

    messages: tuple[Message, ...]
    tools: tuple[Row, ...] | None = None
    first: int = 0
    task: str | None = None
    location: str = field(default="", repr=False, compare=False)

    def encode(self, tokenizer: Tokenizer) -> EncodedChat:
        """Returns the tokens; see ``encode_chat``."""
        return only_row(self.rows(tokenizer))

    def rows(self, tokenizer: Tokenizer) -> tuple[EncodedChat, ...]:
        """Encodes the conversation as texts that together have all answers; see ``encode_rows``."""
        rows = encode_rows(tokenizer, self.messages, tools=self.tools, first=self.first)
        if self.first == 0:
            return rows
        # The tokens at the border may depend on the answer, so also encode the prompt alone.
        prompt = encode_chat(
            tokenizer,
            self.messages[: self.first],
            tools=self.tools,
            add_generation_prompt=True,
        )
        # Learn only tokens after the common prefix of the text and the prompt.
        common = [num_common(prompt.ids, row.ids) for row in rows]
        return tuple(
            replace(row, answers=[x and i >= start for i, x in enumerate(row.answers)])
            for start, row in zip(common, rows, strict=True)
        )

    @property
    def is_answered(self) -> bool:
        """Whether the assistant wrote a text or called a tool after the prompt."""
        return any(
            message["role"] == "assistant" and (message.get("content") or message.get("tool_calls"))
            for message in self.messages[self.first :]
        )

    def without_answer(self) -> "Dialogue":
        """Returns the conversation without its last answer."""
        # The answer may consist of several messages in a row, such as tool calls.
        messages = list(self.messages)
        while messages and messages[-1].get("role") == "assistant":
            messages.pop()
        return replace(self, messages=tuple(messages), first=0)

    def prompt_tokens(self, tokenizer: Tokenizer) -> tuple[str, list[int]]:
        """Returns the text and the tokens of the whole conversation as a prompt."""
        encoded = encode_chat(
            tokenizer, self.messages, tools=self.tools, add_generation_prompt=True
        )
        return encoded.text, encoded.ids

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts of the messages."""
        return tuple(map(_text_of, self.messages))

    @property
    def opening(self) -> str:
        """The first text after the system message; records with equal openings share a split."""
        turns = sorted(self.messages, key=lambda message: message["role"] == "system")
        return next(filter(str.strip, map(_text_of, turns)), "")


@dataclass(frozen=True)
class PromptedText:
    """A prompt and the text that follows it.

    Attributes:
      prompt: The prompt; empty for a document.
      completion: The text that follows.
      task: The name of the task, or None if the data do not name one.
      location: The location of the record, for error messages.
    """

    prompt: str
    completion: str
    task: str | None = None
    location: str = field(default="", repr=False, compare=False)

    def encode(self, tokenizer: Tokenizer) -> EncodedChat:
        """Returns the tokens; see ``encode_completion``."""
        return encode_completion(tokenizer, self.prompt, self.completion)

    def rows(self, tokenizer: Tokenizer) -> tuple[EncodedChat, ...]:
        """Returns the tokens."""
        return (self.encode(tokenizer),)

    @property
    def is_answered(self) -> bool:
        """Always true, because an empty completion also counts as an answer; see ``Dialogue``."""
        return True

    def without_answer(self) -> "PromptedText":
        """Returns the prompt without the completion; a document is used as the prompt."""
        return replace(self, prompt=self.opening, completion="")

    def prompt_tokens(self, tokenizer: Tokenizer) -> tuple[str, list[int]]:
        """Returns the prompt and its tokens."""
        ids = tokenizer.encode(self.prompt, add_special_tokens=False)
        return self.prompt, [*tokenizer.frame.before, *ids]

    @property
    def texts(self) -> tuple[str, ...]:
        """The prompt and its completion as one text."""
        return (self.prompt + self.completion,)

    @property
    def opening(self) -> str:
        """The prompt; for a document, whose prompt is empty, its text."""
        return self.prompt or self.completion


def _text_of(message: Message) -> str:
    """Returns the text of a message, whose content may be a list of parts."""
    content = message.get("content") or ""
    if not isinstance(content, list | tuple):
        return str(content)
    return "".join(str(p.get("text", "")) if isinstance(p, Mapping) else str(p) for p in content)


Demonstration = Dialogue | PromptedText
"""An example of what a model should write."""


@dataclass(frozen=True)
class Preference:
    """A better and a worse answer to the same prompt.

    Attributes:
      chosen: The prompt with the better answer.
      rejected: The prompt with the worse answer.
      weight: 1 divided by the number of pairs from the same ranking.
      margin: How much better the chosen answer is; 0 if the data have no margin.
    """

    chosen: Demonstration
    rejected: Demonstration
    weight: float = 1.0
    margin: float = 0.0


def demonstration(row: Row, location: str) -> Demonstration:
    """Reads a demonstration, recognized by the keys of a record.

    Args:
      row: The record.
      location: The location of the record, for messages.

    Raises:
      DataError: The keys match no form, or a value has the wrong type.
    """
    read = form_of(row)
    # Format the message only if there is an error, because there may be many records.
    if read is None:
        raise UnusableRecordError(_without_form(row, "demonstration", _DEMONSTRATIONS, location))
    return replace(read(row, location), task=task_of(row), location=location)


def form_of(row: Row) -> "Callable[[Row, str], Demonstration] | None":
    """Returns the function that reads a record, or None if the keys match no demonstration."""
    return next((read for keys, read in _FORMS if keys <= row.keys()), None)


def task_of(row: Row) -> str | None:
    """Returns the name of the task in a record, or None if the record does not name a task."""
    task = row.get("task")
    return None if task is None else str(task)


def _without_form(row: Row, noun: str, forms: str, location: str) -> str:
    return f"{location} has the fields {', '.join(map(str, row)) or 'none'}: a {noun} has {forms}"


def _alpaca(row: Row, location: str) -> Dialogue:
    check_spelling(row, "input", location)
    # If the input is empty or missing, the question is only the instruction.
    names = ("instruction", "input") if row.get("input") else ("instruction",)
    question = "\n\n".join(_text(row, name, location) for name in names)
    answer = _text(row, "output", location)
    return Dialogue(
        ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    )


_FORMS: tuple[tuple[set[str], Callable[[Row, str], Demonstration]], ...] = (
    ({"text"}, lambda row, at: PromptedText("", _text(row, "text", at))),
    (
        {"prompt", "completion"},
        lambda row, at: _prompted(row["prompt"], row["completion"], _tools(row, at), at),
    ),
    (
        {"messages"},
        lambda row, at: Dialogue(_messages(row["messages"], "messages", at), _tools(row, at)),
    ),
    (
        {"conversations"},
        lambda row, at: Dialogue(_share_gpt(row["conversations"], at), _tools(row, at)),
    ),
    ({"instruction", "output"}, _alpaca),
)
"""The keys of each type of demonstration, and the function that reads this type. The first type
whose keys are all in the record applies.
"""


def check_spelling(row: Row, name: str, location: str) -> None:
    """Checks that an optional field does not appear under a misspelled name.

    Raises:
      DataError: A field has a misspelled name, so it would have no effect.
    """
    wrong = next((field for field in map(str, row) if misspelled(field, [name])), None)
    problem = f"{location}: unknown field {wrong!r}: did you mean {name}?"
    require(wrong is None or name in row, problem, error=DataError)


def preferences(row: Row, location: str) -> Iterator[Preference]:
    """Yields the preferences in a record, based on its keys; a ranking contains several.

    Args:
      row: The record.
      location: The location of the record, for messages.

    Raises:
      DataError: The keys match no form, or a value has the wrong type.
    """
    margin = row.get("margin", 0.0)
    _check(margin, float, f"{location}: margin")
    # A ranking of n answers contains up to n (n - 1) / 2 preferences.
    tools = _tools(row, location)
    if {"prompt", "ranked"} <= row.keys():
        yield from _ranking(row["prompt"], row["ranked"], tools, location)
        return
    problem = _without_form(row, "preference", _PREFERENCES, location)
    require({"chosen", "rejected"} <= row.keys(), problem, UnusableRecordError)
    chosen, rejected = row["chosen"], row["rejected"]
    check_spelling(row, "prompt", location)
    if "prompt" in row:
        both = [_prompted(row["prompt"], answer, tools, location) for answer in (chosen, rejected)]
    elif isinstance(chosen, str) and isinstance(rejected, str):
        both = _implicit(chosen, rejected)
    else:
        # Without a prompt, the common first messages of both lists are the prompt.
        lists = [_messages(row[side], side, location) for side in ("chosen", "rejected")]
        first = _num_common(*lists)
        both = [Dialogue(messages, tools, first) for messages in lists]
    better, worse = (replace(one, location=location) for one in both)
    yield Preference(better, worse, margin=float(margin))


def _ranking(
    prompt: object, ranked: Any, tools: tuple[Row, ...] | None, location: str
) -> Iterator[Preference]:
    """Yields all pairs of answers with different ranks; the weights of the pairs sum to 1."""
    _check(ranked, list, f"{location}: ranked")
    # Pair each answer with all answers of lower ranks. Answers of the same rank form no pair.
    ranks = [rank if _is_tie(rank) else [rank] for rank in ranked]
    pairs = [
        pair
        for above, below in itertools.combinations(ranks, 2)
        for pair in itertools.product(above, below)
    ]
    problem = f"{location}: ranked must have two answers of different rank, got {ranked!r}"
    require(pairs, problem, error=UnusableRecordError)
    for pair in pairs:
        better, worse = (
            replace(_prompted(prompt, answer, tools, location), location=location)
            for answer in pair
        )
        yield Preference(better, worse, weight=1 / len(pairs))


def _is_tie(rank: object) -> bool:
    """Returns whether a rank is a list of tied answers; a list of messages is one answer."""
    return isinstance(rank, list) and not (rank and all(isinstance(item, Mapping) for item in rank))


def _prompted(
    prompt: object,
    answer: object,
    tools: tuple[Row, ...] | None,
    location: str,
) -> Demonstration:
    if isinstance(prompt, str) and isinstance(answer, str):
        return PromptedText(prompt, answer)
    before = _messages(prompt, "prompt", location)
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    return Dialogue((*before, *_messages(answer, "answer", location)), tools, len(before))


def _implicit(chosen: str, rejected: str) -> list[Demonstration]:
    """Splits both texts after their common prefix; HH dialogues become conversations."""
    if all(map(_HH_TURN.match, (chosen, rejected))):
        lists = list(map(_hh_messages, (chosen, rejected)))
        first = _num_common(*lists)
        return [Dialogue(messages, None, first) for messages in lists]
    prompt = chosen[: num_common(chosen, rejected)]
    # If the common prefix ends with a space, this space belongs to the answers, as in TRL.
    prompt = prompt[:-1] if prompt.endswith(" ") else prompt
    return [PromptedText(prompt, text[len(prompt) :]) for text in (chosen, rejected)]


def _hh_messages(text: str) -> tuple[Message, ...]:
    """Returns the turns of a dialogue in Anthropic's HH data; the last turn may be empty."""
    _, *parts = _HH_TURN.split(text)
    roles = {"Human": "user", "Assistant": "assistant"}
    return tuple(
        {"role": roles[name], "content": content.strip()}
        for name, content in zip(parts[::2], parts[1::2], strict=True)
    )


def _num_common(a: Sequence[Message], b: Sequence[Message]) -> int:
    """Returns the number of common first messages, excluding the last message of each list."""
    return min(num_common(a, b), len(a) - 1, len(b) - 1)


def _share_gpt(turns: Any, location: str) -> tuple[Message, ...]:
    _check(turns, list, f"{location}: conversations")
    messages = []
    for turn in turns:
        _check_keys(turn, {"from", "value"}, f"{location}: the turn {turn!r}")
        # ShareGPT data use more speaker names than chat templates have roles.
        speaker = str(turn["from"])
        require_one_of(f"{location}: the role", speaker, _ROLES, error=DataError)
        messages.append({"role": _ROLES[speaker], "content": turn["value"]})
    return _messages(messages, "conversations", location)


def _messages(value: Any, field: str, location: str) -> tuple[Message, ...]:
    _check(value, list, f"{location}: {field}")
    require(value, f"{location}: {field} has no messages", error=UnusableRecordError)
    for message in value:
        _check_keys(message, {"role"}, f"{location}: the message {str(message)[:60]!r}")
        _check(message["role"], str, f"{location}: role")
        check_role(message["role"], location)
    return tuple(value)


def _check(value: object, hint: type, name: str) -> None:
    """Checks the type of a value; a wrong type makes the record unusable."""
    expected = expectation(value, hint)
    expected = expected.replace("list", "a list")
    problem = f"{name} must be {expected}, got {str(value)[:60]!r}"
    require(not expected, problem, error=UnusableRecordError)


def _check_keys(value: Any, keys: set[str], name: str) -> None:
    has = isinstance(value, Mapping) and keys <= value.keys()
    problem = f"{name} must be an object with {' and '.join(sorted(keys))}"
    require(has, problem, error=UnusableRecordError)


def _tools(row: Row, location: str) -> tuple[Row, ...] | None:
    """Returns the tools of a record, which some data sets store as JSON text."""
    check_spelling(row, "tools", location)
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = cast(Any, parse_json(tools, f"{location}: tools", error=UnusableRecordError))
    if not tools:
        return None
    _check(tools, list, f"{location}: tools")
    return tuple(tools)


def _text(row: Row, field: str, location: str) -> str:
    _check(row[field], str, f"{location}: {field}")
    return row[field]

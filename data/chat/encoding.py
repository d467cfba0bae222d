"""Encodes conversations and completions as tokens, and marks the tokens to learn."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..chat_templates.chat_template import LECTURES, ChatTemplate, Message
from ..chat_templates.rendered import RenderedChat
from ..common.errors import DataError
from ..common.fields import require
from ..tokenizers.base import Tokenizer
from .guard import encode_guarded
from .rows import Row

_ASSISTANT, _TOOL = "assistant", "tool"


@dataclass(frozen=True)
class EncodedChat:
    """A text and its tokens.

    Attributes:
      text: The text.
      ids: Its tokens.
      answers: Whether each token is learned. The learned tokens are the tokens that the assistant
        wrote and the token that ends the assistant's turn.
    """

    text: str
    ids: list[int]
    answers: list[bool]


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Row] | None = None,
    add_generation_prompt: bool = False,
    template: ChatTemplate | None = None,
) -> EncodedChat:
    """Renders a conversation with the tokenizer's chat template, and encodes the text.

    The whole text is encoded at once. If the template writes the name of a control token, the name
    is encoded as this token. If a message contains such a name, the name is encoded as ordinary
    text. Only the assistant may write control tokens that are not special, such as ``<think>`` of
    Qwen3.

    Example::

        tokenizer = data.load_tokenizer("Qwen3-0.6B")
        messages = [{"role": "user", "content": "What is 2 + 3?"}]
        prompt = data.encode_chat(tokenizer, messages, add_generation_prompt=True)

    Args:
      tokenizer: The tokenizer.
      messages: The messages, each with ``role`` and ``content``.
      tools: JSON schemas of the functions that the assistant may call.
      add_generation_prompt: Whether the text ends with the beginning of the assistant's next turn.
          If true, no token is learned.
      template: The template. Defaults to ``tokenizer.chat_template``.

    Raises:
      DataError: The template rejects the conversation or does not support tool calls, or
        ``add_generation_prompt`` is false and the conversation has no answer to learn.
    """
    if add_generation_prompt:
        template = template or tokenizer.chat_template
        rendered = template.render_traced(messages, tools=tools)
        return _encoded(tokenizer, template, replace(rendered, answers=()))
    return only_row(encode_rows(tokenizer, messages, tools=tools, template=template))


def encode_rows(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Row] | None = None,
    template: ChatTemplate | None = None,
    first: int = 0,
) -> tuple[EncodedChat, ...]:
    """Encodes a conversation as one or more texts that together contain all answers.

    If the template rewrites earlier turns, there are several texts; see
    ``ChatTemplate.render_rows``.

    Args:
      tokenizer: The tokenizer.
      messages: The messages.
      tools: JSON schemas of the functions that the assistant may call.
      template: The template. Defaults to ``tokenizer.chat_template``.
      first: The number of messages that form the prompt; answers in the prompt are not learned.

    Raises:
      DataError: See ``encode_chat``.
    """
    template = template or tokenizer.chat_template
    ends = _special_names(tokenizer)
    rows = template.render_rows(messages, tools=tools, ends=ends, first=first)
    encoded = tuple(_encoded(tokenizer, template, row) for row in rows)
    for row in encoded:
        require(
            any(row.answers),
            "the conversation has no token to learn: give the assistant an answer that is not "
            f"empty (the text is {row.text[:80]!r})",
            error=DataError,
        )
    return encoded


def only_row(rows: Sequence[EncodedChat]) -> EncodedChat:
    """Returns the text of a conversation that has only one.

    Raises:
      DataError: The conversation has several texts.
    """
    require(
        len(rows) == 1,
        "the chat template rewrites earlier turns, so no single text has all answers: give "
        "conversations with one answer, or another template (data.template)",
        error=DataError,
    )
    return rows[0]


def _encoded(tokenizer: Tokenizer, template: ChatTemplate, rendered: RenderedChat) -> EncodedChat:
    """Encodes a rendered conversation."""
    # Control tokens that are not special are recognized only if a template contains their names.
    named = template.all_sources
    ids, offsets = encode_guarded(tokenizer, rendered.text, rendered.origins, named)
    # A token is learned if any of its characters is part of an answer.
    answers = [any(a < end and b > start for start, end in rendered.answers) for a, b in offsets]
    return EncodedChat(rendered.text, ids, answers)


def num_common(a: Iterable[object], b: Iterable[object]) -> int:
    """Returns the length of the common prefix of two sequences."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return len(list(same))


@dataclass(frozen=True)
class TurnEnds:
    """The tokens and strings that end an assistant's turn, in addition to the end-of-text token.

    Attributes:
      ids: The control token that the template writes after a turn; empty if there is none. This
        token may differ from the token that ends a text: Gemma has ``<end_of_turn>`` and ``<eos>``.
      strings: The strings that begin the next turn, for the built-in template; otherwise empty.
    """

    ids: tuple[int, ...]
    strings: tuple[str, ...]


def turn_ends(tokenizer: Tokenizer, template: ChatTemplate, *, tools: bool = False) -> TurnEnds:
    """Returns the tokens and strings that end an assistant's turn.

    Args:
      tokenizer: The tokenizer of the model.
      template: The template.
      tools: Whether the model may call tools. If true, the beginning of a tool's turn also ends the
        assistant's turn, so that the model does not write the output of a tool itself.
    """
    strings = ("user:", f"\n{_TOOL}:") if tools else ("user:",)
    return TurnEnds(_end_token(tokenizer, template), strings if template.source == LECTURES else ())


def _end_token(tokenizer: Tokenizer, template: ChatTemplate) -> tuple[int, ...]:
    # Encode a short conversation and take the last token that is learned.
    messages = [{"role": "user", "content": "a"}, {"role": _ASSISTANT, "content": "b"}]
    encoded = encode_chat(tokenizer, messages, template=template)
    # A template may end a turn with ordinary text, which must not stop the generation.
    last = int(np.flatnonzero(encoded.answers)[-1])
    names = [tokenizer.encode_with_controls(name)[0] for name in _special_names(tokenizer)]
    return (encoded.ids[last],) if [encoded.ids[last]] in names else ()


def _special_names(tokenizer: Tokenizer) -> list[str]:
    """Returns the names of the special tokens that a chat template may write."""
    return [name for name, token in tokenizer.control_tokens().items() if token.is_special]


def encode_completion(tokenizer: Tokenizer, prompt: str, completion: str) -> EncodedChat:
    """Encodes a prompt and its completion, without a chat template.

    The prompt and the completion are encoded together, with the special tokens that the tokenizer
    puts around a text. If the tokenizer puts no token after a text, an end token is added. To find
    where the completion begins, the prompt is also encoded alone: as in TRL, the common prefix of
    both encodings is the prompt, so a token that spans the border belongs to the completion.

    Args:
      tokenizer: A tokenizer that has an end token, or that puts a token after a text.
      prompt: The prompt. If it is empty, the completion is a document, and all of its tokens are
        learned.
      completion: The text that follows the prompt.

    Raises:
      DataError: The completion is empty, or the tokenizer has no end token.
    """
    frame = tokenizer.frame
    after = frame.after or tokenizer.special_ids.after
    require(
        after,
        f"this {tokenizer.kind} tokenizer has no token that ends a text, which an answer "
        f"requires: name the tokenizer of a causal language model",
        error=DataError,
    )
    problem = f"the completion of {prompt[:80]!r} is empty: leave the example out"
    require(completion, problem, error=DataError)
    # Also encode the prompt alone, to find the tokens that do not depend on the completion.
    before = frame.before
    ids = tokenizer.encode(prompt + completion, add_special_tokens=False)
    alone = tokenizer.encode(prompt, add_special_tokens=False) if prompt else []
    common = num_common(alone, ids)
    learned = [False] * (len(before) + common) + [True] * (len(ids) - common + len(after))
    return EncodedChat(prompt + completion, [*before, *ids, *after], learned)

"""Rendered conversations, and functions that choose texts with all answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .traced import USER


@dataclass(frozen=True)
class RenderedChat:
    """A conversation rendered as one text.

    Attributes:
      text: The text.
      answers: The half-open character ranges that the assistant wrote, in order. A range includes
        the token that ends the turn.
      origins: One letter for each character, which states who wrote this character; see
        ``chat_templates.traced``.
    """

    text: str
    answers: tuple[tuple[int, int], ...]
    origins: str


def following(before: RenderedChat, after: RenderedChat) -> RenderedChat:
    """Joins a prompt and its answer, even if the template rewrites a prompt before an answer.

    For example, the template of Mistral-7B-Instruct-v0.3 writes the system message only if the last
    message is the user's. For such a template, the result is `before`, followed by the text after
    the user's turn in `after`. For other templates, the result is `after`.
    """
    # After the user's last text, the template writes the end of the user's turn.
    closing = before.text[before.origins.rfind(USER) + 1 :]
    start = after.origins.rfind(USER) + 1
    if (
        not closing
        or after.text.startswith(before.text)
        or not after.text.startswith(closing, start)
    ):
        return after
    start += len(closing)
    text, by = after.text[start:], after.origins[start:]
    return RenderedChat(before.text + text, (), before.origins + by)


def fewest_rows(whole: RenderedChat, turns: Sequence[RenderedChat]) -> Iterator[RenderedChat]:
    """Yields the smallest number of texts that together contain the answers of all turns.

    Args:
      whole: The text of all messages.
      turns: The text up to each answer, in order.
    """
    left = list(turns)
    if all(whole.text.startswith(turn.text) for turn in left):
        yield replace(whole, answers=tuple(turn.answers[0] for turn in left))
        return
    rows = []
    # The text up to the last answer also contains some of the earlier answers unchanged.
    while left:
        kept = [turn for turn in left if left[-1].text.startswith(turn.text)]
        rows.append(replace(left[-1], answers=tuple(turn.answers[0] for turn in kept)))
        left = [turn for turn in left if turn not in kept]
    yield from reversed(rows)

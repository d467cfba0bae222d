"""A rendered conversation, and the texts that keep all of its answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .traced import USER


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as one text.

    Attributes:
      text: The text.
      answers: The half-open ranges of characters that the assistant wrote, in order, including the
        ends of its turns.
      origins: A letter for each character, which says who wrote it; see ``chat_templates.traced``.
    """

    text: str
    answers: tuple[tuple[int, int], ...]
    origins: str


def following(before: RenderedChat, after: RenderedChat) -> RenderedChat:
    """Joins a prompt with its answer, if the template rewrites a prompt that an answer follows.

    The template of Mistral-7B-Instruct-v0.3 writes the system's text only where the user speaks
    last. For such a template, the result is `before` and then the text that follows the user's turn
    in `after`. For other templates, the result is `after`.
    """
    # The end of the user's turn is what the template writes after the last text of the user.
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
    """Yields as few texts as possible that keep the answers of all turns.

    Args:
      whole: The text of all messages.
      turns: The text up to each answer, in order.
    """
    left = list(turns)
    if all(whole.text.startswith(turn.text) for turn in left):
        yield replace(whole, answers=tuple(turn.answers[0] for turn in left))
        return
    rows = []
    # The text up to the last answer keeps some of the answers before it.
    while left:
        kept = [turn for turn in left if left[-1].text.startswith(turn.text)]
        rows.append(replace(left[-1], answers=tuple(turn.answers[0] for turn in kept)))
        left = [turn for turn in left if turn not in kept]
    yield from reversed(rows)

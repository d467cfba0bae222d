"""Encodes a conversation so that only its template can write control tokens.

The whole text is encoded at once. To find the control tokens that the template wrote, all
characters that the template did not write are replaced by a letter that no control token contains;
the control tokens that remain are the template's. Any other control token in the text came from a
user, whatever a template or a normalizer did to it. The range of characters of a user's control
token is encoded separately, as ordinary text. Finally, the control tokens of the result must be
exactly the template's; otherwise the text is refused.
"""

import functools
import re
from collections.abc import Sequence
from itertools import chain

from ..chat_templates.traced import ASSISTANT, TEMPLATE, UNKNOWN
from ..common.errors import DataError
from ..tokenizers.base import Tokenizer

Found = tuple[int, int, int]
"""A control token in a text: its half-open range of characters, and its id."""
Span = tuple[int, int]

_NOT_THE_TEMPLATES = re.compile(f"[^{TEMPLATE}]+")
_ROUNDS = 16
# Candidates for the replacement of characters, common ones first. The first candidate that no
# control token contains is used.
_LETTERS = "xzqjkvwyQZXJKVWY0123456789abcdefghilmnoprstuéжאあ한"
_MARKS = "·¬§¶°~^%$*.,"


def encode_guarded(
    tokenizer: Tokenizer, text: str, origins: str, named: str
) -> tuple[list[int], list[tuple[int, int]]]:
    """Encodes a text of a chat template.

    Args:
      tokenizer: The tokenizer.
      text: The text.
      origins: Who wrote each character of the text; see ``chat_templates.traced``.
      named: The source code of the template. Tokens that are not special, such as ``<think>``, are
        control tokens only if they occur in this code; the assistant may write these tokens.

    Returns:
      The token ids, and the range of characters of each token; see
      ``Tokenizer.encode_with_offsets``.

    Raises:
      DataError: Text of a message cannot be distinguished from a control token.
    """
    # The control tokens by id, and whether each is special.
    known = {
        id: is_special
        for name, (id, is_special) in tokenizer.control_tokens().items()
        if is_special or name in named
    }

    def trimmed(found: Found) -> Found:
        """Removes white space from both ends of the range of a control token."""
        start, end, id = found
        inside = text[start:end].strip()
        if not inside:
            return found
        start = text.index(inside, start)
        return start, start + len(inside), id

    def is_by(found: Found, writer: str) -> bool:
        return not origins[found[0] : found[1]].strip(writer)

    # With all other text masked, the control tokens that remain are the template's.
    harmless = _without_users(text, origins, tokenizer)
    written = [trimmed(one) for one in tokenizer.find_controls(harmless) if one[2] in known]
    wanted = {one for one in written if is_by(one, TEMPLATE)}
    # Mark more text as ordinary until the result has exactly the template's control tokens.
    literal: list[Span] = []
    wrong: list[Found] = []
    for _ in range(_ROUNDS):
        ids, offsets = tokenizer.encode_with_controls(text, literal)
        found = {trimmed((*span, id)) for id, span in zip(ids, offsets, strict=True) if id in known}
        wrong = sorted(one for one in found - wanted if known[one[2]] or not is_by(one, ASSISTANT))
        # The result has exactly the control tokens that the template wrote.
        if not wrong and wanted <= found:
            return ids, offsets
        # Text that the template may have written cannot be marked as ordinary.
        unclear = [o for o in wrong if is_by(o, TEMPLATE) or UNKNOWN in origins[o[0] : o[1]]]
        if unclear or (after := _separated(literal, wrong, wanted, len(text))) == literal:
            break
        literal = after
    first = wrong[0][0] if wrong else 0
    raise DataError(
        f"the text {text[max(first - 20, 0) : first + 40]!r} of the conversation cannot be "
        f"distinguished from a control token of its chat template: change this text"
    )


def _separated(
    literal: Sequence[Span], wrong: Sequence[Found], wanted: set[Found], length: int
) -> list[Span]:
    """Marks more ranges as ordinary text, so that only the template's control tokens are found."""
    # If one of the template's tokens is missing, mark all text between these tokens as ordinary.
    if not wrong:
        edges = [0, *chain.from_iterable(one[:2] for one in sorted(wanted)), length]
        return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
    spans = list(literal)
    for start, end, _ in wrong:
        # Merge the new range with the ranges that it overlaps.
        over = [span for span in spans if span[0] < end and start < span[1]]
        starts, ends = zip((start, end), *over, strict=True)
        first, last = min(starts), max(ends)
        if (first, last) not in over:
            spans = [*({*spans} - {*over}), (first, last)]
        # Divide an ordinary range inside the token, so that the token is not found again.
        elif end - start > 1:
            spans.remove((first, last))
            spans += [(first, start + 1), (start + 1, last)]
    return sorted(spans)


def _without_users(text: str, origins: str, tokenizer: Tokenizer) -> str:
    """Replaces the letters and marks that the template did not write."""
    # Keep white space and word boundaries, which the rules of added tokens may test.
    letter, mark = _fillers(tuple(tokenizer.control_tokens()))

    def replaced(found: re.Match[str]) -> str:
        part = text[found.start() : found.end()]
        return re.sub(r"\w", letter, re.sub(r"[^\w\s]", mark, part))

    parts, end = [], 0
    for found in _NOT_THE_TEMPLATES.finditer(origins):
        parts += [text[end : found.start()], replaced(found)]
        end = found.end()
    return "".join([*parts, text[end:]])


@functools.lru_cache(maxsize=32)
def _fillers(names: tuple[str, ...]) -> tuple[str, str]:
    """Returns the letter and the mark that occur least often, at best never, in control tokens."""
    used = "".join(names).casefold()
    letter, mark = (
        min(choices, key=lambda c: used.count(c.casefold())) for choices in (_LETTERS, _MARKS)
    )
    return letter, mark

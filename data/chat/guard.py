"""Encodes a conversation so that only its template can write control tokens.

The whole text is encoded at once. To find the control tokens that the template wrote, all
characters that the template did not write are replaced by a letter or mark that no control token
contains. All control tokens that are still found come from the template. Any other control token in
the text came from a message, even if the template or a normalizer changed the message. The
characters of such a token are encoded separately, as ordinary text. Finally, the control tokens of
the result must be exactly the control tokens of the template; otherwise the text is rejected.
"""

import functools
import re
from collections.abc import Sequence
from itertools import chain

from ..chat_templates.traced import ASSISTANT, TEMPLATE, UNKNOWN
from ..common.errors import DataError
from ..tokenizers.base import Tokenizer

Found = tuple[int, int, int]
"""A control token in a text: the start and the end of its character range, and its id."""
Span = tuple[int, int]

_NOT_THE_TEMPLATES = re.compile(f"[^{TEMPLATE}]+")
_ROUNDS = 16
# Candidates for replacing characters, in order of preference. The first candidate that no control
# token contains is used.
_LETTERS = "xzqjkvwyQZXJKVWY0123456789abcdefghilmnoprstuéжאあ한"
_MARKS = "·¬§¶°~^%$*.,"


def encode_guarded(
    tokenizer: Tokenizer, text: str, origins: str, named: str
) -> tuple[list[int], list[tuple[int, int]]]:
    """Encodes a text that a chat template rendered.

    Args:
      tokenizer: The tokenizer.
      text: The text.
      origins: The writer of each character of the text; see ``chat_templates.traced``.
      named: The source code of the template. Tokens that are not special, such as ``<think>``, are
        control tokens only if they occur in this code. The assistant may also write these tokens.

    Returns:
      The token ids, and the character range of each token; see ``Tokenizer.encode_with_offsets``.

    Raises:
      DataError: Part of a message cannot be distinguished from a control token.
    """
    # Maps the id of each control token to whether the token is special.
    known = {
        id: is_special
        for name, (id, is_special) in tokenizer.control_tokens().items()
        if is_special or name in named
    }

    def trimmed(found: Found) -> Found:
        """Removes white space from both ends of a control token's range."""
        start, end, id = found
        inside = text[start:end].strip()
        if not inside:
            return found
        start = text.index(inside, start)
        return start, start + len(inside), id

    def is_by(found: Found, writer: str) -> bool:
        return not origins[found[0] : found[1]].strip(writer)

    # Mask all other text, so that only the control tokens of the template are found.
    harmless = _without_users(text, origins, tokenizer)
    written = [trimmed(one) for one in tokenizer.find_controls(harmless) if one[2] in known]
    wanted = {one for one in written if is_by(one, TEMPLATE)}
    # Mark more text as ordinary until the result has exactly the control tokens of the template.
    literal: list[Span] = []
    wrong: list[Found] = []
    for _ in range(_ROUNDS):
        ids, offsets = tokenizer.encode_with_controls(text, literal)
        found = {trimmed((*span, id)) for id, span in zip(ids, offsets, strict=True) if id in known}
        wrong = sorted(one for one in found - wanted if known[one[2]] or not is_by(one, ASSISTANT))
        # The result has exactly the control tokens of the template.
        if not wrong and wanted <= found:
            return ids, offsets
        # Do not mark text as ordinary if the template may have written it.
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
    """Marks more ranges as ordinary text, to find only the control tokens of the template."""
    # If a control token of the template was not found, mark all text between these tokens as
    # ordinary.
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
        # If the range is already ordinary, divide it, so that the token is not found again.
        elif end - start > 1:
            spans.remove((first, last))
            spans += [(first, start + 1), (start + 1, last)]
    return sorted(spans)


def _without_users(text: str, origins: str, tokenizer: Tokenizer) -> str:
    """Replaces the letters and marks that the template did not write."""
    # Keep white space and word boundaries, because the rules for added tokens may test them.
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
    """Returns the letter and the mark that occur least often in control tokens, ideally never."""
    used = "".join(names).casefold()
    letter, mark = (
        min(choices, key=lambda c: used.count(c.casefold())) for choices in (_LETTERS, _MARKS)
    )
    return letter, mark

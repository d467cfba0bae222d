"""Checks the texts in a request."""

from collections.abc import Sequence
from typing import Any

from ....data.common.errors import counted
from ..fields import require_valid


def as_list(value: Sequence[Any], name: str, most: int) -> list[Any]:
    """Returns the texts of a field as a list.

    Args:
        value: the texts, or a single text. A text may be a sequence of token ids.
        name: the name of the field.
        most: the maximum number of texts in a request.

    Raises:
        ApiError: the field has no texts, or too many texts.
    """
    texts = texts_of(value)
    require_valid(texts, f"{name} must not be empty: give a text", name)
    message = f"{name} must have at most {most:,} texts, got {len(texts):,}: send fewer"
    require_valid(len(texts) <= most, message, name, "too_many_inputs")
    return texts


def texts_of(value: Sequence[Any]) -> list[Any]:
    """Returns the texts of a field as a list. A sequence of numbers is a single text."""
    is_one = isinstance(value, str) or isinstance(next(iter(value), None), int)
    return [value] if is_one else list(value)


def check_not_truncated(
    truncate: bool, num_truncated: int, total: int, longest: int, *, name: str = "input"
) -> None:
    """Checks that no text was truncated, unless the client requests truncation.

    Args:
        truncate: whether the client requests truncation.
        num_truncated: the number of truncated texts.
        total: the total number of texts.
        longest: the maximum number of tokens that the model reads.
        name: the field of the texts.

    Raises:
        ApiError: a text was truncated.
    """
    message = (
        f"{num_truncated:,} of {counted(total, 'text')} are longer than the {longest:,} tokens "
        "that the model reads: shorten them, or send truncate: true"
    )
    require_valid(truncate or not num_truncated, message, name, "context_length_exceeded")

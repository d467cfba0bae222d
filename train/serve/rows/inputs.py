"""Checks of the texts of a request."""

from collections.abc import Sequence
from typing import Any

from ....data.common.errors import counted
from ..fields import ApiError


def as_list(given: Sequence[Any], name: str, most: int) -> list[Any]:
    """Returns the texts of a field as a list.

    Args:
        given: the texts, or one text.
        name: the field.
        most: the maximum number of texts of a request.

    Raises:
        ApiError: the field has no text, or too many texts.
    """
    texts = [given] if isinstance(given, str) else list(given)
    if not texts:
        raise ApiError(400, f"{name} must not be empty: give a text", name, "invalid_value")
    if len(texts) > most:
        message = f"{name} must have at most {most:,} texts, got {len(texts):,}: send fewer"
        raise ApiError(400, message, name, "too_many_inputs")
    return texts


def check_not_truncated(
    truncate: bool, number: int, total: int, longest: int, *, name: str = "input"
) -> None:
    """Checks that no text was truncated, unless the client requests truncation.

    Args:
        truncate: whether the client requests truncation.
        number: the number of truncated texts.
        total: the number of all texts.
        longest: the maximum number of tokens that the model reads.
        name: the field of the texts.

    Raises:
        ApiError: a text was truncated.
    """
    if number and not truncate:
        message = (
            f"{number:,} of {counted(total, 'text')} are longer than the {longest:,} tokens that "
            "the model reads: shorten them, or send truncate: true"
        )
        raise ApiError(400, message, name, "context_length_exceeded")

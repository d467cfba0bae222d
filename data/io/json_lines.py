"""JSON as it stands in files: one object a line, or one in all."""

import json
from collections.abc import Mapping
from typing import Any

from ..errors import DataError

_OBJECTS = "write one JSON object a line"


def parse_json(text: str, location: str, remedy: str = "correct it") -> Any:
    """Parses JSON that a file holds.

    Args:
        text: The JSON.
        location: Where the example was read, for messages: `train.tsv line 7`.
        remedy: What to do about it if it is none, for messages.

    Raises:
        DataError: It is not JSON.
    """
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        reason = getattr(error, "msg", "nested too deeply")
        location += f" line {getattr(error, 'lineno', 1)}" if "\n" in text else ""
        raise DataError(f"{location} is not valid JSON ({reason}): {remedy}") from None


def parse_object(line: str, location: str) -> dict[str, Any]:
    """Parses a line of JSON lines.

    Raises:
        DataError: It is not a JSON object.
    """
    row = parse_json(line, location, _OBJECTS)
    if not isinstance(row, dict):
        raise DataError(f"{location} is a JSON {type(row).__name__}: {_OBJECTS}")
    return row


def pick(row: Mapping[str, Any], field: str, location: str) -> Any:
    """Takes a field, or a list of several: ``choice1+choice2``.

    Raises:
        DataError: The row lacks it, or it holds half of a surrogate pair.
    """
    names = [field] if field in row else field.split("+")
    for name in names:
        if name not in row:
            seen = ", ".join(row) or "none"
            raise DataError(
                f"{location} has no field {name!r}: its fields are {seen}; name others after a #"
            )
        _check_characters(row[name], f"{location} field {name!r}")
    return row[field] if field in row else [row[name] for name in names]


def _check_characters(value: Any, location: str) -> None:
    """Refuses what JSON can escape and no file can hold."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{location} holds a lone surrogate at character {error.start}: remove it"
            ) from None
    elif isinstance(value, list | dict):
        for part in [*value, *value.values()] if isinstance(value, dict) else value:
            _check_characters(part, location)

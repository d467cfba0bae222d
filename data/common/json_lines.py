"""JSON lines: one object per line, and the fields of an object."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .errors import DataError
from .files import Line
from .json_text import JsonObject, parse_object


def parse_line(line: str, location: str) -> JsonObject:
    """Parses a line of JSON lines.

    Args:
      line: The line.
      location: File and line number, for messages: ``train.jsonl line 7``.

    Raises:
      DataError: The line is not a JSON object.
    """
    return parse_object(line, location, "write one JSON object a line")


def parse_lines(lines: Iterable[Line]) -> Iterator[tuple[str, JsonObject]]:
    """Yields the location and the object of each line that is not blank.

    Raises:
      DataError: A line is not a JSON object (with file and line).
    """
    for file, number, line in lines:
        if line.strip():
            location = f"{file} line {number}"
            yield location, parse_line(line, location)


def pick(row: Mapping[str, object], field: str, location: str) -> Any:
    """Returns the value of a field, or a list of the values of several fields.

    The name ``choice1+choice2`` gives the values of two fields.

    ``field?`` is None if the object lacks the field.

    Raises:
      DataError: The object lacks the field, or the field contains a lone surrogate.
    """
    if field in row:
        _check_encodable(row[field], f"{location} field {field!r}")
        return row[field]
    if field.endswith("?"):
        return pick(row, field[:-1], location) if field[:-1] in row else None
    # The name of a field may contain a plus sign, so look for the whole name first.
    if "+" in field:
        return list(picked(row, field.split("+"), location))
    seen = ", ".join(row) or "none"
    raise DataError(
        f"{location} has no field {field!r}: its fields are {seen}; give others after a #"
    )


def picked(row: Mapping[str, object], fields: Iterable[str], location: str) -> tuple[Any, ...]:
    """Returns the values of several fields in order; see `pick`.

    Raises:
      DataError: See `pick`.
    """
    return tuple(pick(row, field, location) for field in fields)


def single_fields(fields: Iterable[str]) -> set[str]:
    """Returns the names of the single fields that `pick` may read for some fields."""
    # The name of a single field may itself contain + or ?, so return the whole names as well.
    parts = {part for field in fields for part in (field, *field.split("+"))}
    return parts.union(part.removesuffix("?") for part in parts)


def _check_encodable(value: object, location: str) -> None:
    """Refuses a lone surrogate, which JSON can escape but UTF-8 cannot encode."""
    is_text = isinstance(value, str)
    text = value if is_text else json.dumps(value, ensure_ascii=False, default=lambda _: None)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{location} has a lone surrogate at character {error.start}: remove it"
        ) from None

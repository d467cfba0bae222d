"""Reads JSON lines (one object per line) and the fields of an object."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .errors import DataError
from .files import Line
from .json_text import JsonObject, parse_object


def parse_line(line: str, location: str) -> JsonObject:
    """Parses one line of a JSON lines file.

    Args:
      line: The line.
      location: The file and the line number for messages, such as ``train.jsonl line 7``.

    Raises:
      DataError: The line is not a JSON object.
    """
    return parse_object(line, location, "write one JSON object a line")


def parse_lines(lines: Iterable[Line]) -> Iterator[tuple[str, JsonObject]]:
    """Yields the location and the object of each line that is not blank.

    Raises:
      DataError: A line is not a JSON object. The message gives the file and the line.
    """
    for file, number, line in lines:
        if line.strip():
            location = f"{file} line {number}"
            yield location, parse_line(line, location)


def pick(row: Mapping[str, object], field: str, location: str) -> Any:
    """Returns the value of a field, or a list of the values of several fields.

    The name ``choice1+choice2`` means two fields.

    The value of ``field?`` is None if the object lacks the field.

    Raises:
      DataError: The object lacks the field, or the field contains a lone surrogate.
    """
    if field in row:
        _check_encodable(row[field], location, field)
        return row[field]
    if field.endswith("?"):
        return pick(row, field[:-1], location) if field[:-1] in row else None
    # A field name may contain a plus sign, so look for the whole name first.
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
    """Returns the names of all single fields that `pick` may read for the given fields."""
    # The name of a single field may contain + or ?, so also return the whole names.
    parts = {part for field in fields for part in (field, *field.split("+"))}
    return parts.union(part.removesuffix("?") for part in parts)


def _check_encodable(value: object, location: str, field: str) -> None:
    """Checks for lone surrogates, which JSON can express but UTF-8 cannot encode."""
    is_text = isinstance(value, str)
    text = value if is_text else json.dumps(value, ensure_ascii=False, default=lambda _: None)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{location} field {field!r} has a lone surrogate at character {error.start}: remove it"
        ) from None

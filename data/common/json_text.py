"""Reads and writes JSON values."""

import json
from pathlib import Path
from typing import Any, TypeAlias

from .errors import DataError, UserError, reported

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
JsonObject: TypeAlias = dict[str, JsonValue]


def parse_json(
    text: str, location: str, remedy: str = "correct it", error: type[UserError] = DataError
) -> JsonValue:
    """Parses JSON.

    Args:
      text: The JSON text.
      location: The file, or the file and the line, for messages.
      remedy: The remedy that the message gives if the text is not valid JSON.
      error: The class of the error to raise.

    Raises:
      UserError: The text is not valid JSON. The class of the raised error is `error`.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as failure:
        # A RecursionError has no JSON message and no line number.
        reason = getattr(failure, "msg", "nested too deeply")
        location += f" line {getattr(failure, 'lineno', 1)}" if "\n" in text else ""
        raise error(f"{location} is not valid JSON ({reason}): {remedy}") from None


def to_json(value: object, *, indent: int | None = None, sort_keys: bool = False) -> str:
    """Formats a value as JSON.

    Raises:
        UserError: A number in the value is NaN or infinite, which JSON cannot represent.
    """
    # `ensure_ascii=False` keeps text readable. `allow_nan=False` refuses NaN, which is not valid
    # JSON.
    try:
        return json.dumps(
            value, ensure_ascii=False, allow_nan=False, indent=indent, sort_keys=sort_keys
        )
    except ValueError as failure:
        raise UserError(f"a number to write as JSON is NaN or infinite: {failure}") from None


def parse_object(
    text: str, location: str, remedy: str = "correct it", error: type[UserError] = DataError
) -> JsonObject:
    """Parses a JSON object; see `parse_json` for the arguments.

    Raises:
      UserError: The text is not a JSON object.
    """
    value = parse_json(text, location, remedy, error)
    if not isinstance(value, dict):
        raise error(f"{location} is a JSON {type(value).__name__}, not an object: {remedy}")
    return value


def read_object(file: Path, error: type[UserError] = UserError) -> JsonObject:
    """Reads a file that contains one JSON object.

    Raises:
      UserError: The file cannot be read, or does not contain a JSON object.
    """
    problem = f"{file} cannot be read"
    with reported(problem, "restore it", OSError, UnicodeDecodeError, error=error):
        text = file.read_text(encoding="utf-8")
    return parse_object(text, str(file), "restore it", error)


def optional_object(file: Path, error: type[UserError] = DataError) -> dict[str, Any]:
    """Reads a file that contains one JSON object. For a missing file, returns an empty object.

    Raises:
      UserError: The file cannot be read, or does not contain a JSON object. The error has the class
        `error`.
    """
    return dict(read_object(file, error)) if file.is_file() else {}

"""Selects records by conditions on their fields, as in ``jsonl:GLOB#text?score>=3``.

Conditions come after the fields that follow the ``#``, and are joined by ``&``. JSON numbers count
as numbers, and so do table cells and strings that contain only a number. Two numbers are compared
as numbers. All other values are compared as text, so dates such as ``2019-01-31`` are ordered
correctly. ``true``, ``false`` and ``null`` are the JSON values.
"""

import json
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..common.errors import DataError, counted
from ..common.fields import require_value
from ..common.json_lines import pick

_COMPARE: dict[str, Callable[..., bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
# Conditions start at a ``?`` after the last ``#``. They contain a comparison sign and no ``#``.
_PART = re.compile(r"(?P<before>.*)#(?P<part>[^#?]*)\?(?P<conditions>[^#]*?[=!<>][^#]*)", re.DOTALL)
_CONDITION = re.compile(r"(?P<field>[^=!<>]+?)\s*(?P<sign>==|!=|<=|>=|<|>)\s*(?P<value>[^=].*|)")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)
_COMPOUND: dict[type, str] = {list: "list", dict: "JSON object"}
_EXAMPLE = "write FIELD>=VALUE, with one of " + ", ".join(_COMPARE)

LeftOut = Counter[str]
"""The number of records that are left out for each reason, such as ``the filter score>=3``."""


@dataclass(frozen=True)
class Condition:
    """A comparison that a record must satisfy.

    Attributes:
      field: The name of the field. For a table, the number of the column, counted from 1, is also
        accepted.
      sign: One of ``== != < <= > >=``.
      value: The text that the field is compared with.
    """

    field: str
    sign: str
    value: str

    def __str__(self) -> str:
        return f"{self.field}{self.sign}{self.value}"

    def holds(self, value: object, location: str) -> bool:
        """Returns whether the value of a field satisfies the condition.

        Args:
          value: The value of the field: a text, a number, a Boolean or None.
          location: The file and line of the record, for messages.

        Raises:
          DataError: The values cannot be ordered, because only one of them is a number, or because
            the field is a list, an object or null.
        """
        # Format the message only for an error, because this runs for every record.
        if type(value) in _COMPOUND:
            raise DataError(
                f"{location} field {self.field!r} is a {_COMPOUND[type(value)]}, not a text or a "
                f"number: filter on another field than {str(self)!r}"
            )
        # Write None and Booleans as in JSON: ``null``, ``true``, ``false``.
        text = json.dumps(value) if isinstance(value, bool | None) else str(value)
        one, other = _number(text), _number(self.value)
        if None not in (one, other):
            return _COMPARE[self.sign](one, other)
        # Two texts can be ordered, but not a text and a number.
        is_text = one is other is None and isinstance(value, str)
        if is_text or self.sign in ("==", "!="):
            return _COMPARE[self.sign](text, self.value)
        kind = "a number" if other is not None else "a text"
        raise DataError(
            f"{location} field {self.field!r} is {text[:40]!r}, not {kind}, so it cannot be "
            f"compared with {self.value!r}: correct the line, or first leave such records out, as "
            f"?{self.field}!={text[:40]}&{self}"
        )


def _number(text: str) -> float | None:
    return float(text) if _NUMBER.fullmatch(text.strip()) else None


def split_conditions(location: str, name: str) -> tuple[str, tuple[Condition, ...]]:
    """Separates the conditions of a source from its location and fields.

    Args:
      location: The part of the source name after the prefix, such as ``GLOB#text?score>=3``. A
        ``?`` before the ``#`` belongs to the glob.
      name: The whole source name, for messages.

    Returns:
      The text ``GLOB#text`` (or ``GLOB`` if no field is named), and the conditions.

    Raises:
      DataError: A part after the ``?`` is not a comparison.
    """
    match = _PART.fullmatch(location)
    if match is None:
        return location, ()
    conditions = tuple(_condition(part, name) for part in match["conditions"].split("&"))
    return f"{match['before']}#{match['part']}".removesuffix("#"), conditions


def _condition(text: str, name: str) -> Condition:
    problem = f"source {name!r} has the condition {text!r}: {_EXAMPLE}"
    match = require_value(_CONDITION.fullmatch(text.strip()), problem, DataError)
    return Condition(match["field"].strip(), match["sign"], match["value"].strip())


def written(conditions: Sequence[Condition]) -> str:
    """Formats conditions as they follow the ``?`` in a source name."""
    return "&".join(map(str, conditions))


def keeps(
    conditions: Sequence[Condition],
    row: Mapping[str, object],
    location: str,
    left_out: LeftOut | None = None,
) -> bool:
    """Returns whether a record satisfies all conditions.

    Args:
      conditions: The conditions, which are tested in order until one fails.
      row: The fields of the record.
      location: The file and line of the record, for messages.
      left_out: The counts to increase if a condition fails.

    Raises:
      DataError: The record lacks a field, or the value of a field cannot be compared.
    """
    for condition in conditions:
        if not condition.holds(pick(row, condition.field, location), location):
            if left_out is not None:
                # Count for the whole filter, so that the log has one line per source instead of one
                # line per condition.
                left_out[f"the filter {written(conditions)}"] += 1
            return False
    return True


def left_out_notes(left_out: LeftOut, noun: str) -> tuple[str, ...]:
    """Returns `left_out_note` as a tuple, which is empty if nothing was left out."""
    return tuple(filter(None, [left_out_note(left_out, noun)]))


def empty_reason(left_out: LeftOut) -> str:
    """Explains why a source has no text: either filters left it out, or the source is empty."""
    return left_out_note(left_out) or "it is empty or only white space"


def left_out_note(left_out: LeftOut, noun: str = "document") -> str:
    """Returns a log line with the number left out for each reason, or "" if there are none."""
    return "; ".join(
        f"{counted(count, noun)} left out by {reason}" for reason, count in left_out.items()
    )

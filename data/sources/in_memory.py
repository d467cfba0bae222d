"""Provides examples in memory, which can be used in place of a source name.

A run's ``config.json`` records the number of examples, their hash and their fields, but not the
examples themselves, as in ``memory:1200 examples blake2b:0f3c…#label,text``. To resume the run, or
to evaluate it on the same examples, pass the examples again. The hash detects different examples.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np

from ..common.errors import DataError, reported
from ..common.fields import require, require_type
from ..common.hashing import digest
from ..common.json_lines import pick, picked
from ..common.json_text import JsonValue
from ..filters.conditions import Condition, LeftOut, keeps, split_conditions

KIND: Literal["memory"] = "memory"
PAIR = ("source", "target")
"""The field names for the two texts of an example that is given as a pair."""


class Examples(str):
    """Examples in memory: texts, or the fields of labeled examples.

    The string itself describes the examples. Two descriptions are equal only if the examples are
    equal and in the same order. A plain list can also be used as a source, unless its fields have
    unusual names.

    Attributes:
      rows: The examples; each is a text or a dict of fields.
      lines_are_sentences: Whether each line of a text is one sentence.

    Example::

        reviews = Examples.of([{"review": "A joy.", "stars": 5}, …], fields="stars,review")
        dataclasses.replace(config.data, source=reviews)
    """

    rows: tuple[JsonValue, ...]
    lines_are_sentences: bool

    @classmethod
    def of(
        cls, examples: Iterable[object], fields: str = "", *, lines_are_sentences: bool = False
    ) -> "Examples":
        """Creates ``Examples`` with a copy of the given examples.

        Args:
          examples: Texts; dicts of fields (texts, numbers, or lists of these; numpy values are
            converted); or pairs of a sentence and its translation.
          fields: The names of the fields to read, in the form that follows the ``#`` of a source
            name: ``label,text``, or with a filter ``label,text?score>=3``. Defaults to the usual
            fields of the kind of data.
          lines_are_sentences: Whether each line of a text is one sentence, so that BERT
            pretraining does not split lines into sentences.

        Raises:
          DataError: The list is empty, or an example has none of these forms.
        """
        is_list = not isinstance(examples, str | bytes | Mapping)
        problem = f"the examples must be a list, got a {type(examples).__name__}"
        require(is_list, problem, DataError)
        rows = tuple(_row(example, f"examples[{i}]") for i, example in enumerate(examples))
        require(rows, "the list of examples is empty: give at least one example", DataError)
        kind = type(rows[0])
        for i, row in enumerate(rows):
            if type(row) is not kind:
                problem = f"examples[{i}] is a {type(row).__name__}, examples[0] a {kind.__name__}"
                raise DataError(f"{problem}: give only texts, or only dicts")
        # The hash in the name identifies the examples in config.json.
        hashed = digest(json.dumps(row, sort_keys=True) for row in rows)
        part = fields or ("sentences" if lines_are_sentences else "")
        name = f"{KIND}:{len(rows)} examples blake2b:{hashed}" + (f"#{part}" if part else "")
        return cls._of_rows(name, rows, lines_are_sentences)

    @classmethod
    def _of_rows(cls, name: str, rows: tuple[JsonValue, ...], sentences: bool) -> "Examples":
        self = cls(name)
        self.rows, self.lines_are_sentences = rows, sentences
        return self

    def __deepcopy__(self, memo: object) -> "Examples":
        # The object is immutable, as strings are, so a copy would only use memory.
        return self

    def with_fields(self, fields: Iterable[str]) -> "Examples":
        """Returns the same examples with different names of the fields to read."""
        description, _, part = self.partition("#")
        _, mark, conditions = part.partition("?")
        name = f"{description}#{','.join(fields)}{mark}{conditions}"
        return self._of_rows(name, self.rows, self.lines_are_sentences)


def fields_of(name: str, usual: str) -> tuple[str, ...]:
    """Returns the fields to read from examples in memory.

    Args:
      name: The examples, or their description.
      usual: The fields to read if ``name`` specifies none. A field that ends in ``?`` is optional:
        it is read only if some example has it, and then all examples must have it.
    """
    part = split_conditions(name, name)[0].partition("#")[2]
    if part:
        return tuple(part.split(","))
    rows = name.rows if isinstance(name, Examples) else ()
    has = {field for row in rows if isinstance(row, dict) for field in row}
    fields = [
        field.removesuffix("?")
        for field in filter(None, usual.split(","))
        if field[-1] != "?" or field[:-1] in has
    ]
    return tuple(fields)


def read_memory(
    name: str,
    fields: tuple[str, ...],
    conditions: tuple[Condition, ...] = (),
    left_out: LeftOut | None = None,
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yields the location of each example, for messages, and its fields. A text has one field.

    Args:
      name: The examples.
      fields: The fields to read.
      conditions: Conditions on fields; examples that do not satisfy them are left out.
      left_out: Counts the examples that are left out.

    Raises:
      DataError: The examples are not in memory, an example lacks a field, or an example is a text
        although several fields are requested.
    """
    problem = (
        f"{name!r} was given in Python and is not stored with the run: pass the same examples "
        "again, or name another source"
    )
    examples = require_type(name, Examples, problem, DataError)
    for i, row in enumerate(examples.rows):
        location = f"examples[{i}]"
        if not isinstance(row, dict):
            if len(fields) != 1 or conditions:
                names = ", ".join(fields)
                raise DataError(f"{location} must be a dict with the fields {names}, got a text")
            yield location, (row,)
        elif keeps(conditions, row, location, left_out):
            yield location, picked(row, fields, location)


def _row(example: object, location: str) -> JsonValue:
    remedy = "give text in UTF-8, finite numbers and lists of them"
    with reported(f"{location} cannot be recorded", remedy, TypeError, ValueError):
        # A round trip copies the example and rejects values that JSON cannot represent.
        copied: JsonValue = json.loads(json.dumps(plain(example), allow_nan=False))
    match copied:
        case [str(source), str(target)]:
            # Give the two texts the field names that translation reads.
            copied = {PAIR[0]: source, PAIR[1]: target}
        case str() | dict():
            pass
        case _:
            raise DataError(
                f"{location} must be a text, a dict of fields or a pair of texts, got a "
                f"{type(example).__name__}"
            )
    # Reject text that cannot be encoded as UTF-8.
    pick({"text": copied}, "text", location)
    return copied


def plain(value: object) -> object:
    """Converts numpy values to Python values, bytes to text, and tuples to lists."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return list(map(plain, value))
    return value

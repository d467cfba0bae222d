"""Texts to classify, single or in pairs, from inputs that name or separate them.

A model trained with flaxzoo reads as many texts as its source had. An imported model has no source:
it reads one or two texts, like transformers.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from ..common.errors import DataError, counted
from ..common.files import Line, input_lines
from ..common.json_lines import parse_line, pick
from ..filters.conditions import keeps
from ..sources.in_memory import Examples
from ..sources.labelled_names import LabelledSource, Record
from ..sources.labelled_records import are_json_lines, read_fields, source_lines
from ..sources.tables import LABELED_TEXTS, ColumnRoles, column_names

PAIRS = (
    *(("text", "text_b"), ("text", "text_pair"), ("text_a", "text_b"), ("text1", "text2")),
    *(("sentence1", "sentence2"), ("sentence_a", "sentence_b"), ("sentence_A", "sentence_B")),
    *(("question1", "question2"), ("premise", "hypothesis"), ("question", "context")),
    *(("question", "passage"), ("question", "sentence"), ("question", "answer")),
    *(("query", "document"), ("query", "passage"), ("query", "text"), ("source", "target")),
)
"""Customary names of the first and the second text."""
SECOND = frozenset(
    "text_b text_pair text2 sentence2 sentence_b sentence_B question2 hypothesis".split()
)
"""Names that only a second text has."""
SINGLE = (*LABELED_TEXTS.fields["text"], "query")
"""Customary names of a single text."""
IMPORTED = "memory:imported model#label,text,text_b?"
"""The source of an imported model, whose second text is optional."""


@dataclass(frozen=True)
class TextReader:
    """Reads the texts of examples to predict.

    Attributes:
      fields: The names, or the numbers of columns, of the texts in the source of the run.
      imported: Whether the model accepts both one and two texts.
      unread: Collects the names of fields that are present but not read.
    """

    fields: tuple[str, ...]
    imported: bool
    unread: set[str]

    def of_file(self, path: str) -> Iterator[Record]:
        """Reads a file: JSON lines, a table with a line of names, or lines of texts.

        The file suffix or the first line identifies JSON lines. A line of texts has one text, or
        two separated by a tab; an empty line is an empty text.

        Raises:
          DataError: The number of texts does not fit the model (with file and line), or the file
            is a CSV table without names.
        """
        if are_json_lines(path):
            yield from self._of_json_lines(input_lines(path))
            return
        kind = path.removesuffix(".gz").rpartition(".")[2]
        if kind in ("csv", "tsv"):
            table = LabelledSource(f"{kind}:{path}", kind, path, (), True)
            # A table needs names of its texts in the first line; TSV may also be lines of texts.
            if (named := self._named_columns(table)) is not None:
                yield from read_fields(named, _COLUMNS)
                return
            if kind == "csv":
                raise DataError(
                    f"{path} is a table, and its first line does not name its texts: name their "
                    f"columns there, as text and text_b, or one column, as csv:{path}#1"
                )
        lines = input_lines(path)
        first = next(lines, None)
        lines = chain([] if first is None else [first], lines)
        # Standard input has no suffix, so look at the first line.
        if first is not None and is_object(first[2]):
            yield from self._of_json_lines(lines)
            return
        for file, number, line in lines:
            texts, location = line.split("\t"), f"{file} line {number}"
            if len(texts) > 2 or (not self.imported and len(texts) != len(self.fields)):
                reads = "1 or 2" if self.imported else str(len(self.fields))
                raise DataError(
                    f"{location} has {counted(len(texts), 'column')} where this model reads "
                    f"{reads}: give its texts alone, separated by tabs, or name a file of labeled "
                    f"examples as tsv:{file}#LABEL,TEXT[,TEXT_B]"
                )
            yield Record(location, tuple(texts))

    def _of_json_lines(self, lines: Iterable[Line]) -> Iterator[Record]:
        for file, number, line in lines:
            if line.strip():
                location = f"{file} line {number}"
                yield self.of_row(parse_line(line, location), location)

    def of_source(self, source: LabelledSource) -> Iterator[Record] | None:
        """Reads a source without named columns; returns None if it does not name its texts."""
        if source.kind == "jsonl":
            return self._of_objects(source)
        named = self._named_columns(source)
        return None if named is None else read_fields(named, _COLUMNS)

    def of_examples(self, name: Examples) -> Iterator[Record]:
        """Reads texts, or dicts of fields."""
        for i, row in enumerate(name.rows):
            location = f"examples[{i}]"
            if isinstance(row, dict):
                yield self.of_row(row, location)
            elif self.imported or len(self.fields) == 1:
                yield Record(location, (row,))
            else:
                raise DataError(
                    f"{location} is a text alone, and this model was trained on pairs: give a dict "
                    "of the fields text and text_b"
                )

    def of_row(self, row: Mapping[str, Any], location: str) -> Record:
        """Reads the texts of an object of fields."""
        found = self.names_in(row, location)
        # The log lists fields that are present but not read.
        self.unread.update(row.keys() - {*found})
        return Record(location, tuple(pick(row, name, location) for name in found))

    def names_in(self, names: Mapping[str, Any], location: str) -> tuple[str, ...]:
        """Returns the names of the texts among the names of fields.

        Raises:
          DataError: No field is a text, the number of texts does not fit the model, or the choice
            of fields is ambiguous.
        """
        # Prefer the names from the source of the run to customary names.
        found = self.fields if {*self.fields} <= names.keys() else _customary(names)
        if not found:
            raise DataError(
                f"{location} has the fields {', '.join(map(str, names)) or 'none'}, none of which "
                f"is {' or '.join(dict.fromkeys((*self._own, 'text')))}: name the text so, and a "
                "second one text_b"
            )
        if found != self.fields and "text" in names and "text" not in found:
            raise DataError(
                f"{location} has the field text, and also {' and '.join(found)}: leave out what is "
                "not to be read"
            )
        if not self.imported and len(found) < len(self.fields):
            raise DataError(
                f"{location} has one text, {found[0]!r}, and this model was trained on pairs: give "
                f"the second as {' or '.join(dict.fromkeys((*self._own[1:], 'text_b')))}"
            )
        # A model of single texts would silently ignore a second text.
        second = [*sorted((SECOND & names.keys()) - {*self.fields}), *found[1:]]
        if not self.imported and len(self.fields) == 1 and second:
            raise DataError(
                f"{location} has a second text, {second[0]!r}, and this model was trained on "
                "single texts: leave it out"
            )
        return found

    @property
    def _own(self) -> tuple[str, ...]:
        """The field names in the source of the run, without column numbers."""
        own = () if self.imported else self.fields
        return tuple(name for name in own if not name.isdecimal())

    def _named_columns(self, source: LabelledSource) -> LabelledSource | None:
        """Returns a table with its text columns, if the first line names them."""
        try:
            names = dict.fromkeys(column_names(source))
            found = self.fields if {*self.fields} <= names.keys() else _customary(names)
        except DataError:
            # The first line has no names.
            return None
        if not found:
            return None
        found = self.names_in(names, source.location)
        self.unread.update(names.keys() - {*found})
        return replace(source, fields=found, named=True)

    def _of_objects(self, source: LabelledSource) -> Iterator[Record]:
        for lines in source_lines(source):
            for file, number, line in lines:
                location = f"{file} line {number}"
                if line.strip():
                    row = parse_line(line, location)
                    if keeps(source.conditions, row, location, None):
                        yield self.of_row(row, location)


_COLUMNS = ColumnRoles("the columns of texts", {})


def _customary(names: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of a customary pair of texts or single text, or an empty tuple."""
    for pair in PAIRS:
        if {*pair} <= names.keys():
            return pair
    # Several names of single texts are ambiguous unless one is `text`.
    single = [name for name in SINGLE if name in names]
    return ("text",) if "text" in single else tuple(single) if len(single) == 1 else ()


def is_object(line: str) -> bool:
    """Returns whether a line is a JSON object."""
    try:
        return line.lstrip().startswith("{") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def are_pair(fields: tuple[str, ...]) -> bool:
    """Returns whether two fields are customary names of a pair of texts."""
    return fields in PAIRS

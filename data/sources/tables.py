r"""Tables in text files: columns separated by tabs (TSV), and comma-separated values (CSV).

A line of TSV is a record without quoting, so no cell contains a tab or a line break. CSV follows
RFC 4180: a cell in double quotes may contain commas, line breaks and doubled quotes. A byte order
mark and empty lines are ignored, and files ending in ``.gz`` are decompressed.

Fields are columns by number from 1, or by the names in the first line. With numbered columns the
first line is skipped as a header if each of its cells in these columns is a customary field name,
such as ``label`` and ``text``. If the user named no columns, and each field has exactly one cell
with a customary name, the fields are taken by these names, in any order. Only the first line
decides, and ``header_notes`` reports how it was read.
"""

import csv
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ..common.errors import DataError, counted
from ..common.files import file_lines, matching_files
from ..filters.conditions import LeftOut, keeps
from .labelled_names import LabelledSource, Record

_LANGUAGES = (
    "ar bg cs da de el en es fa fi fr he hi hu id it ja ko nl pl pt ro ru sv tr uk vi zh "
    "arabic chinese czech danish dutch english finnish french german greek hindi hungarian italian "
    "japanese korean polish portuguese romanian russian spanish swedish turkish ukrainian"
)
# A name may be empty, because pandas writes no name for its index.
_COLUMN_NAME = re.compile(r"[^\W\d][\w.-]*( [\w.-]+){0,2}|")
_LONGEST_CELL = 1 << 30


@dataclass(frozen=True)
class ColumnRoles:
    """The fields of a table, and the column names that identify a header.

    Attributes:
      description: The roles of the columns, for messages.
      fields: The customary names of each field, in lower case; empty if any name is accepted.
      further: Customary names of further columns that a field may be taken from.
    """

    description: str
    fields: dict[str, frozenset[str]]
    further: frozenset[str] = frozenset()

    def without(self, index: int) -> "ColumnRoles":
        """Returns the roles without one of the fields, which is not read."""
        skipped = list(self.fields)[index]
        fields = {name: names for name, names in self.fields.items() if name != skipped}
        return replace(self, fields=fields, further=self.further | self.fields[skipped])


_LABEL = frozenset(
    "label labels class category target score sentiment rating stars polarity topic intent "
    "gold_label similarity".split()
)
_TEXT = frozenset(
    "text texts sentence review content document comment tweet message utterance question premise "
    "text_a text1 sentence1 question1 phrase".split()
)
LABELED_TEXTS = ColumnRoles(
    "the label's and those of the texts",
    {"label": _LABEL, "text": _TEXT},
    frozenset("text_b text2 sentence2 question2 hypothesis answer".split()),
)
CHOICES = ColumnRoles(
    "the label's and those of the texts",
    {"label": _LABEL, "context": _TEXT | {"context"}, "choices": frozenset()},
)
SENTENCE_PAIRS = ColumnRoles(
    "the source's and the target's",
    {
        "source": frozenset(("source", "src", "input")),
        "target": frozenset(("target", "tgt", "output", "translation")),
    },
    frozenset(_LANGUAGES.split()),
)


class _Row(NamedTuple):
    """The cells of a record, and its first line number."""

    file: str
    line: int
    cells: list[str]

    @property
    def location(self) -> str:
        return f"{self.file} line {self.line}"


@dataclass(frozen=True)
class _Columns:
    """The columns of the fields in one file.

    Attributes:
      indices: The column index of each field, or the indices of a list.
      header: Whether the first line contains column names instead of values.
      note: A line for the log if this was inferred.
    """

    indices: list[int | list[int]]
    header: bool
    note: str = ""


def read_tables(
    source: LabelledSource, roles: ColumnRoles, left_out: LeftOut | None = None
) -> Iterator[Record]:
    """Reads the records of all files of a source.

    Args:
      source: A source of the kind ``tsv`` or ``csv``.
      roles: The roles of its fields.
      left_out: Counts the records that do not satisfy the conditions of the source.

    Raises:
      DataError: A file is missing or not UTF-8, is the other kind of table, has a line with too
        many or too few columns or faulty quotes, or lacks a column (with file and line).
    """
    for path in matching_files(source.location, source.name):
        rows = _rows(path, source.kind)
        first = next(rows, None)
        if first is None:
            continue
        # Each file may have its columns in another order.
        columns = _find_columns(first, source, roles)
        filtered = {each.field: _column(each.field, first) for each in source.conditions}
        if not all(map(str.isdecimal, filtered)):
            # A filter by name reads the names from the first line.
            columns = replace(columns, header=True)
        for number, row in enumerate(itertools.chain((first,), rows)):
            if number == 0 and columns.header:
                continue
            if len(row.cells) != len(first.cells):
                raise DataError(_wrong_width(row, first, source.kind))
            cells = {field: row.cells[at] for field, at in filtered.items()}
            if keeps(source.conditions, cells, row.location, left_out):
                yield _record(row, columns, first=number == 0)


def column_names(source: LabelledSource) -> tuple[str, ...]:
    """Returns the names of all columns, from the first line of the first file.

    Raises:
      DataError: A file is missing, all are empty, or the first line has no names.
    """
    for path in matching_files(source.location, source.name):
        first = next(_rows(path, source.kind), None)
        if first is None:
            continue
        _check_separator(first, source)
        # Names must be unique and look like names; otherwise the line is probably data.
        names = [cell.strip() for cell in first.cells]
        if not all(map(_COLUMN_NAME.fullmatch, names)) or len({*names}) < len(names):
            raise DataError(
                f"{first.location} does not name the columns of the table: write a first line of "
                f"names, or name the columns by numbers after a #, as {source.kind}:GLOB#1,2"
            )
        return tuple(first.cells)
    raise DataError(f"no examples in {source.name!r}: it is empty")


def header_notes(source: LabelledSource, roles: ColumnRoles) -> tuple[str, ...]:
    """Returns a log line on the first lines that were recognized as column names, if any."""
    notes = []
    for path in matching_files(source.location, source.name):
        first = next(_rows(path, source.kind), None)
        if first is not None and (note := _find_columns(first, source, roles).note):
            notes.append(note)
    more = f"; likewise in {len(notes) - 1:,} more files" if len(notes) > 1 else ""
    return (notes[0] + more,) if notes else ()


def _record(row: _Row, columns: _Columns, first: bool = False) -> Record:
    cells = row.cells
    values = [
        [cells[i] for i in at] if isinstance(at, list) else cells[at] for at in columns.indices
    ]
    return Record(row.location, tuple(values), first)


def _rows(path: Path, kind: str) -> Iterator[_Row]:
    if kind == "csv":
        yield from _csv_rows(path)
        return
    for file, number, line in file_lines(path):
        if "\t" in line or line.strip():
            yield _Row(file, number, line.split("\t"))


def _csv_rows(path: Path) -> Iterator[_Row]:
    number = 0

    def lines() -> Iterator[str]:
        nonlocal number
        for _, number, line in file_lines(path, keep_ends=True):  # noqa: B007
            yield line

    # The default limit is 131,072 characters per cell, and a text may be longer.
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL))
    reader = csv.reader(lines(), strict=True)
    while True:
        # A record may span lines; the error names its first line.
        start = number + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            # Replace the messages of the csv module that do not say what to correct.
            problem = f"is not valid CSV ({error})"
            if "unexpected end" in str(error):
                problem = "opens a double quote that is never closed"
            elif "new-line" in str(error):
                problem = "has a carriage return outside of quotes"
            raise DataError(
                f"{path} line {start} {problem}: put a cell that contains a comma, a quote or a "
                "line break in double quotes, and double the quotes inside it"
            ) from None
        if cells is None:
            return
        if len(cells) > 1 or any(cell.strip() for cell in cells):
            yield _Row(str(path), start, cells)


def _wrong_width(row: _Row, first: _Row, kind: str) -> str:
    seen = f"{row.location} has {counted(len(row.cells), 'column')}, the first {len(first.cells)}"
    if kind == "csv":
        return f"{seen}: put a cell that contains a comma in double quotes"
    return f"{seen}: separate the columns by one tab each, and put none inside a text"


def _find_columns(first: _Row, source: LabelledSource, roles: ColumnRoles) -> _Columns:
    """Finds the columns of the fields from the first line of a file."""
    _check_separator(first, source)
    fields = source.fields
    names = [cell.strip().casefold() for cell in first.cells]
    looks_like_names = all(map(_COLUMN_NAME.fullmatch, names)) and len(set(names)) == len(names)
    if not source.named and looks_like_names:
        # Each field must have exactly one column with a customary name, in any order.
        found = [
            [i for i, name in enumerate(names) if name in known] for known in roles.fields.values()
        ]
        if all(len(columns) == 1 for columns in found):
            chosen = [columns[0] for columns in found]
            described = ", ".join(
                f"{role} from {first.cells[i]!r}"
                for role, i in zip(roles.fields, chosen, strict=True)
            )
            note = f"line {first.line} of {first.file} read as column names: {described}"
            return _Columns(list(chosen), True, note)
    if not source.named:
        _check_customary(first, source, roles, looks_like_names)
    # Otherwise take the columns by the given numbers or names; names imply a header.
    indices: list[int | list[int]] = []
    for field in fields:
        columns = [_column(part, first) for part in field.split("+")]
        indices.append(columns if "+" in field else columns[0])
    if not all(part.isdecimal() for field in fields for part in field.split("+")):
        return _Columns(indices, True)
    # With numbers, the line is a header only if all selected cells are customary names.
    known = roles.further.union(*roles.fields.values())
    for at, customary in itertools.zip_longest(indices, roles.fields.values(), fillvalue=known):
        selected = at if isinstance(at, list) else [at] if isinstance(at, int) else []
        if not looks_like_names or (customary and not known.issuperset(names[i] for i in selected)):
            return _Columns(indices, False)
    listed = ", ".join(first.cells)
    note = f"line {first.line} of {first.file} read as column names and skipped: {listed}"
    return _Columns(indices, True, note)


def _check_separator(first: _Row, source: LabelledSource) -> None:
    """Rejects a table with another separator, which has a single column per line."""
    if len(first.cells) > 1:
        return
    (line,) = first.cells
    other = "csv" if source.kind == "tsv" else "tsv"
    if ("," if source.kind == "tsv" else "\t") in line:
        separator, missing = ("commas", "tab") if source.kind == "tsv" else ("tabs", "comma")
        raise DataError(
            f"{first.location} has {separator} and no {missing}: name the file as "
            f"{other}{source.name.removeprefix(source.kind)}"
        )
    if source.kind == "csv" and ";" in line:
        raise DataError(
            f"{first.location} has semicolons and no comma: separate the columns by commas"
        )


def _check_customary(
    first: _Row, source: LabelledSource, roles: ColumnRoles, looks_like_names: bool
) -> None:
    """Rejects the default columns if the lines have further columns."""
    width = len(first.cells)
    if width != max(int(part) for field in source.fields for part in field.split("+")):
        named = f" ({', '.join(first.cells)})" if looks_like_names else ""
        raise DataError(
            f"{first.location} has {counted(width, 'column')}{named}: name {roles.description} "
            "after a #, in this order, as #2,4 or by the names in the first line"
        )


def _column(field: str, first: _Row) -> int:
    """Returns the index of the column of a field, from 0."""
    cells = first.cells
    # Digits always mean the number of a column.
    if field in cells and not field.isdecimal():
        return cells.index(field)
    if field.isdecimal() and 1 <= int(field) <= len(cells):
        return int(field) - 1
    if field.isdecimal():
        raise DataError(
            f"{first.location} has {counted(len(cells), 'column')}, so there is no column {field}: "
            "name others after a #, counted from 1"
        )
    raise DataError(
        f"{first.location}, read as the line of column names, names no column {field!r}: its "
        f"columns are {', '.join(cells)} (for a file without names give numbers, as #1,2)"
    )

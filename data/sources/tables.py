r"""Reads tables in text files: tab-separated values (TSV) and comma-separated values (CSV).

Each line of a TSV file is a record. TSV has no quoting, so a cell cannot contain a tab or a line
break. CSV follows RFC 4180: a cell in double quotes may contain commas, line breaks and doubled
quotes. A byte order mark and empty lines are ignored, and files ending in ``.gz`` are decompressed.

Fields are selected by column number, counted from 1, or by the names in the first line. With column
numbers, the first line is skipped as a header if each of its cells in these columns is a usual
field name, such as ``label`` and ``text``. If the user selected no columns, and each field has
exactly one cell with a usual name, the fields are selected by these names, in any order. The
decision depends only on the first line, and ``header_notes`` reports how this line was read.
"""

import csv
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..common.errors import DataError, counted
from ..common.fields import require, require_one_of, require_value
from ..common.files import File, file_lines, matching_files
from ..filters.conditions import LeftOut, keeps
from .labelled_names import LabelledSource, Record

_LANGUAGES = (
    "ar bg cs da de el en es fa fi fr he hi hu id it ja ko nl pl pt ro ru sv tr uk vi zh "
    "arabic chinese czech danish dutch english finnish french german greek hindi hungarian italian "
    "japanese korean polish portuguese romanian russian spanish swedish turkish ukrainian"
)
# A name may be empty, because pandas writes an empty name for the index column.
_COLUMN_NAME = re.compile(r"[^\W\d][\w.-]*( [\w.-]+){0,2}|")
_LONGEST_CELL = 1 << 30


@dataclass(frozen=True)
class ColumnRoles:
    """The fields of a table, and the column names that identify a header.

    Attributes:
      description: A description of the columns' roles, for messages.
      fields: The usual column names of each field, in lower case. The set is empty if any name is
        accepted.
      unused: The usual names of columns that are not read.
    """

    description: str
    fields: dict[str, frozenset[str]]
    unused: frozenset[str] = frozenset()

    def without(self, index: int) -> "ColumnRoles":
        """Returns the roles without one field, which is then not read."""
        fields = dict(self.fields)
        skipped = fields.pop(list(fields)[index])
        return replace(self, fields=fields, unused=self.unused | skipped)


_LABEL = frozenset(
    "label labels class category target score sentiment rating stars polarity topic intent "
    "gold_label similarity".split()
)
_TEXT = frozenset(
    "text texts sentence review content document comment tweet message utterance question premise "
    "text_a text1 sentence1 question1 phrase".split()
)
LABELED_TEXTS = ColumnRoles(
    "the columns of the label and the texts",
    {"label": _LABEL, "text": _TEXT},
    frozenset("text_b text2 sentence2 question2 hypothesis answer".split()),
)
CHOICES = ColumnRoles(
    "the columns of the label and the texts",
    {"label": _LABEL, "context": _TEXT | {"context"}, "choices": frozenset()},
)
SENTENCE_PAIRS = ColumnRoles(
    "the columns of the source and the target",
    {
        "source": frozenset(("source", "src", "input")),
        "target": frozenset(("target", "tgt", "output", "translation")),
    },
    frozenset(_LANGUAGES.split()),
)


class _Row(NamedTuple):
    """The cells of a record, and the number of its first line."""

    file: str
    line: int
    cells: list[str]

    @property
    def location(self) -> str:
        return f"{self.file} line {self.line}"

    @property
    def names(self) -> list[str]:
        """The cells as column names, in lower case."""
        return [cell.strip().casefold() for cell in self.cells]

    @property
    def has_names(self) -> bool:
        """Whether the cells look like column names and are unique."""
        names = self.names
        return all(map(_COLUMN_NAME.fullmatch, names)) and len(set(names)) == len(names)


@dataclass(frozen=True)
class _Columns:
    """The columns of one file that contain the fields.

    Attributes:
      indices: For each field, the indices of its columns. The value of a field with several columns
        is a list.
      header: Whether the first line contains column names instead of values.
      note: A line for the log if the columns or the header were inferred.
    """

    indices: list[list[int]]
    header: bool
    note: str = ""


def read_tables(
    source: LabelledSource, roles: ColumnRoles, left_out: LeftOut | None = None
) -> Iterator[Record]:
    """Reads the records of all files of a source.

    Args:
      source: A source of the kind ``tsv`` or ``csv``.
      roles: The roles of the source's fields.
      left_out: Counts the records that do not satisfy the conditions of the source.

    Raises:
      DataError: A file is missing or not UTF-8, is the other kind of table, lacks a column, or has
        a line with faulty quotes or with too many or too few columns (the message names file and
        line).
    """
    for first, rows in _tables(source):
        # The order of the columns may differ between files.
        columns = _find_columns(first, source, roles)
        filtered = {each.field: _column(each.field, first) for each in source.conditions}
        # If a filter uses column names, the first line must contain the names.
        by_number = all(map(str.isdecimal, filtered))
        skipped = int(columns.header or not by_number)
        for row in itertools.islice(itertools.chain((first,), rows), skipped, None):
            _check_width(row, first)
            cells = {field: row.cells[at] for field, at in filtered.items()}
            if keeps(source.conditions, cells, row.location, left_out):
                yield _record(row, columns, first=row is first)


def column_names(source: LabelledSource) -> tuple[str, ...]:
    """Returns the names of all columns, from the first line of the first file.

    Raises:
      DataError: A file is missing, all files are empty, or the first line has no names.
    """
    problem = f"no examples in {source.name!r}: it is empty"
    first, _ = require_value(next(_tables(source), None), problem, DataError)
    _check_separator(first, source)
    # If the first line does not look like names, it probably contains data.
    require(
        first.has_names,
        f"{first.location} does not name the columns of the table: write a first line of names, or "
        f"name the columns by numbers after a #, as {source.kind}:GLOB#1,2",
        DataError,
    )
    return tuple(first.cells)


def header_notes(source: LabelledSource, roles: ColumnRoles) -> tuple[str, ...]:
    """Returns a log line that reports which first lines were recognized as column names.

    The result is empty if there are none, or if the source is not a table.
    """
    if source.kind not in _READERS:
        return ()
    all_notes = (_find_columns(first, source, roles).note for first, _ in _tables(source))
    notes = list(filter(None, all_notes))
    more = f"; likewise in {len(notes) - 1:,} more files" if len(notes) > 1 else ""
    return tuple(f"{note}{more}" for note in notes[:1])


def _tables(source: LabelledSource) -> Iterator[tuple[_Row, Iterator[_Row]]]:
    """Yields the first row of each non-empty file, and an iterator over the file's other rows."""
    for path in matching_files(source.location, source.name):
        rows = _READERS[source.kind](path)
        for first in itertools.islice(rows, 1):
            yield first, rows


def _record(row: _Row, columns: _Columns, first: bool = False) -> Record:
    cells = ([row.cells[i] for i in at] for at in columns.indices)
    values = tuple(several if len(several) > 1 else several[0] for several in cells)
    return Record(row.location, values, first)


def _tsv_rows(path: File) -> Iterator[_Row]:
    for file, number, line in file_lines(path):
        if "\t" in line or line.strip():
            yield _Row(file, number, line.split("\t"))


def _csv_rows(path: File) -> Iterator[_Row]:
    number = 0

    def lines() -> Iterator[str]:
        nonlocal number
        for _, number, line in file_lines(path, keep_ends=True):  # noqa: B007
            yield line

    # Raise the default limit of 131,072 characters per cell, because a text may be longer.
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL))
    reader = csv.reader(lines(), strict=True)
    start = 1
    try:
        for cells in reader:
            if len(cells) > 1 or any(map(str.strip, cells)):
                yield _Row(str(path), start, cells)
            # A record may span several lines; messages name the first of them.
            start = number + 1
    except csv.Error as error:
        raise DataError(
            f"{path} line {start} is not valid CSV ({error}): put a cell that contains a comma, a "
            "quote or a line break in double quotes, and double the quotes inside it"
        ) from None


_READERS: dict[str, Callable[[File], Iterator[_Row]]] = {"csv": _csv_rows, "tsv": _tsv_rows}


def _check_width(row: _Row, first: _Row) -> None:
    if len(row.cells) != len(first.cells):
        raise DataError(
            f"{row.location} has {counted(len(row.cells), 'column')}, and the first line has "
            f"{len(first.cells)}: separate the columns by one tab each, or by commas with double "
            "quotes around a cell that has a comma"
        )


def _find_columns(first: _Row, source: LabelledSource, roles: ColumnRoles) -> _Columns:
    """Finds the columns of the fields from the first line of a file."""
    _check_separator(first, source)
    location = f"line {first.line} of {first.file} read as column names"
    names = first.names
    if not source.named and first.has_names:
        # Select by name only if each field has exactly one column with a usual name, in any order.
        usual = [known.intersection(names) for known in roles.fields.values()]
        if set(map(len, usual)) <= {1}:
            chosen = [[names.index(name)] for (name,) in usual]
            pairs = zip(roles.fields, chosen, strict=True)
            described = ", ".join(f"{role} from {first.cells[i]!r}" for role, (i,) in pairs)
            return _Columns(chosen, True, f"{location}: {described}")
    # Otherwise select the columns by the given numbers or names. Names imply a header.
    parts = [field.split("+") for field in source.fields]
    if not source.named:
        _check_default_columns(first, parts, roles)
    columns = [[_column(part, first) for part in field] for field in parts]
    if not all(map(str.isdecimal, itertools.chain(*parts))):
        return _Columns(columns, True)
    # With column numbers, the line is a header only if all selected cells are usual names.
    known = roles.unused.union(*roles.fields.values())
    expected = itertools.chain(roles.fields.values(), itertools.repeat(known))
    are_customary = first.has_names and all(
        not customary or known.issuperset(names[i] for i in at)
        for at, customary in zip(columns, expected, strict=False)
    )
    note = f"{location} and skipped: {', '.join(first.cells)}"
    return _Columns(columns, are_customary, note if are_customary else "")


def _check_separator(first: _Row, source: LabelledSource) -> None:
    """Rejects a file with a single column if it uses the separator of the other kind of table."""
    (line,) = first.cells if len(first.cells) == 1 else ("",)
    other, mark = {"tsv": ("csv", ","), "csv": ("tsv", "\t")}[source.kind]
    require(
        mark not in line,
        f"{first.location} has the separators of a {other} file: name the file as "
        f"{other}{source.name.removeprefix(source.kind)}",
        DataError,
    )
    problem = f"{first.location} has semicolons and no comma: separate the columns by commas"
    require(source.kind == "tsv" or ";" not in line, problem, DataError)


def _check_default_columns(first: _Row, parts: list[list[str]], roles: ColumnRoles) -> None:
    """Raises an error if no columns are selected and the table has more than the default ones."""
    width = len(first.cells)
    named = f" ({', '.join(first.cells)})" if first.has_names else ""
    require(
        width == max(map(int, itertools.chain(*parts))),
        f"{first.location} has {counted(width, 'column')}{named}: name {roles.description} after a "
        "#, in this order, as #2,4 or by the names in the first line",
        DataError,
    )


def _column(field: str, first: _Row) -> int:
    """Returns the index of the column of a field, from 0."""
    # Digits always mean a column number, from 1; any other text is a name in the first line.
    numbers = map(str, range(1, len(first.cells) + 1))
    columns = list(numbers) if field.isdecimal() else first.cells
    require_one_of(f"the column of {first.location}", field, columns, error=DataError)
    return columns.index(field)

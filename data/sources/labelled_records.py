r"""Sources of labeled examples, named by the scheme of ``source_names``.

=============================  ======================================================
``tsv:GLOB#LABEL,TEXT``        columns separated by tabs, by number from 1 or by name (then
                               each file begins with a line of names)
``jsonl:GLOB#label,text``      JSON lines, fields by name
``conll:GLOB#COLUMN``          a word and its tag per line, see ``conll``
``squad:GLOB``                 questions about passages, see ``squad``
``tfds:NAME/CONFIG#fields``    a published TensorFlow Dataset, fields by name
=============================  ======================================================

Each kind of data defines the forms that it reads and the fields that it uses; several
fields that make up one list are joined by ``+``. Labeled data are small and are read
into memory. Every record has its location, for error messages.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from ..errors import DataError
from ..io.files import Line, file_lines, matching_files
from ..io.json_lines import parse_line, pick
from .source_names import Source, SourceKind, listed_choices

FORMS = {
    "tsv": "tsv:GLOB#LABEL,TEXT",
    "jsonl": "jsonl:GLOB#fields",
    "conll": "conll:GLOB#COLUMN",
    "squad": "squad:GLOB",
    "tfds": "tfds:NAME/CONFIG#fields",
}


@dataclass(frozen=True)
class LabelledSource:
    """A parsed source name.

    Attributes:
        name: The name as the user wrote it.
        kind: The kind, a key of ``FORMS``.
        location: The glob, or the ``name/config`` of a TensorFlow Dataset.
        fields: The names or numbers of the fields.
        named: Whether the user named these fields; False for default fields.
    """

    name: str
    kind: str
    location: str
    fields: tuple[str, ...]
    named: bool = True

    @property
    def plain(self) -> Source:
        """The same source in the form that the readers of plain text take."""
        return Source(self.name, cast(SourceKind, self.kind), self.location, "")


@dataclass(frozen=True)
class Record:
    """One labeled record as it was read.

    Attributes:
        location: The file and line, for messages: ``train.tsv line 7``.
        values: One value for each field of the source, in the order of the fields.
    """

    location: str
    values: tuple[Any, ...]


def parse_labelled(
    name: str, forms: Mapping[str, str], like: LabelledSource | None = None
) -> LabelledSource:
    """Parses a source name, without access to files or the network.

    Args:
        name: For example ``tsv:cola.train.tsv#2,4``.
        forms: The kinds that can be read, and the default fields of each.
        like: A source of the same run; if it has the same kind, its fields are the default
            (those of a published data set count as named only for that data set).

    Raises:
        DataError: The kind is not in ``forms``, or nothing follows it.
    """
    kind, colon, rest = name.partition(":")
    if not colon or kind not in forms:
        known = tuple(FORMS[kind] for kind in forms)
        if not colon or "/" in kind or Path(name).expanduser().exists():
            raise DataError(f"source {name!r} has no kind: write one of {', '.join(known)}")
        nearest = listed_choices(kind, tuple(forms), known)
        raise DataError(f"this kind of data reads no {kind!r} source ({name!r}): choose {nearest}")
    if re.search(rf"\s\+\s+({'|'.join(forms)}):", rest):
        raise DataError(
            f"labelled sources are not joined ({name!r}): name several files by a glob, as "
            f"{kind}:FOLDER/*"
        )
    location, mark, part = rest.rpartition("#") if "#" in rest else (rest, "", "")
    if not location or (mark and not part):
        raise DataError(f"source {name!r} is incomplete: write {FORMS[kind]}")
    if not mark and like is not None and like.kind == kind:
        known = like.named and (kind != "tfds" or like.location == location)
        return LabelledSource(name, kind, location, like.fields, known)
    fields = (part or forms[kind]).split(",") if part or forms[kind] else []
    if not all(fields):
        raise DataError(f"source {name!r} has an empty field after the #: write {FORMS[kind]}")
    return LabelledSource(name, kind, location, tuple(fields), bool(mark))


def with_known_fields(source: LabelledSource, known: Mapping[str, str]) -> LabelledSource:
    """Sets the fields of a well-known published data set, unless the user named fields."""
    if source.kind != "tfds" or source.named:
        return source
    name, _, _ = source.location.partition(":")
    fields = known.get(name) or known.get(name.split("/")[0])
    return replace(source, fields=tuple(fields.split(","))) if fields else source


def read_fields(
    source: LabelledSource, roles: str = "the label's and those of the texts"
) -> Iterator[Record]:
    """Reads a local source whose records have named fields.

    Args:
        source: A source of the kind ``tsv`` or ``jsonl``.
        roles: The roles of the columns, for messages.

    Yields:
        The records; files in sorted order.

    Raises:
        DataError: A file is missing, not UTF-8 or incomplete; a line has too many or too few
            columns, is not JSON, or lacks a field (with file and line).
    """
    for lines in source_lines(source):
        if source.kind == "tsv":
            yield from _read_columns(lines, source, roles)
        else:
            yield from read_objects(lines, source.fields)


def source_lines(source: LabelledSource) -> Iterator[Iterator[Line]]:
    """Reads the lines of each file of a local source."""
    for path in matching_files(source.location, source.name):
        yield file_lines(path)


def are_json_lines(path: str) -> bool:
    """Returns whether the name of a file is that of JSON lines."""
    return path.removesuffix(".gz").endswith(".jsonl")


def read_objects(lines: Iterator[Line], fields: tuple[str, ...]) -> Iterator[Record]:
    """Reads records from JSON lines, and ignores empty lines.

    Raises:
        DataError: A line is not a JSON object, or lacks a field.
    """
    for file, number, line in lines:
        if line and not line.isspace():
            location = f"{file} line {number}"
            row = parse_line(line, location)
            yield Record(location, tuple(pick(row, field, location) for field in fields))


def _read_columns(lines: Iterator[Line], source: LabelledSource, roles: str) -> Iterator[Record]:
    fields = source.fields
    with_header = not all(part.isdecimal() for field in fields for part in field.split("+"))
    columns: list[int | list[int]] = []
    width = 0
    for file, number, line in lines:
        cells = line.split("\t")
        location = f"{file} line {number}"
        if not width:
            width = len(cells)
            if not source.named:
                _check_customary(width, fields, roles, location)
            for field in fields:
                found = [_column(part, cells, location) for part in field.split("+")]
                columns.append(found if "+" in field else found[0])
            if with_header:
                continue
        elif not line:
            continue
        if len(cells) != width:
            raise DataError(
                f"{location} has {len(cells)} columns where the first line has {width}: "
                "separate the columns by one tab each, and put none inside a text"
            )
        yield Record(
            location,
            tuple([cells[c] for c in at] if isinstance(at, list) else cells[at] for at in columns),
        )


def _check_customary(width: int, fields: tuple[str, ...], roles: str, location: str) -> None:
    """Refuses the default columns if the lines have further columns."""
    if width != max(int(part) for field in fields for part in field.split("+")):
        raise DataError(
            f"{location} has {width} columns: name {roles} after a #, in this order, as #2,4 or by "
            "the names in the first line"
        )


def _column(field: str, first_line: list[str], location: str) -> int:
    """Returns the index of the column of a field, from 0."""
    if field in first_line and not field.isdecimal():
        return first_line.index(field)
    if field.isdecimal() and 1 <= int(field) <= len(first_line):
        return int(field) - 1
    if field.isdecimal():
        raise DataError(
            f"{location} has {len(first_line)} columns, so there is no column {field}: "
            "name others after a #, counted from 1"
        )
    raise DataError(
        f"{location}, read as the line of column names, names no column {field!r}: its columns "
        f"are {', '.join(first_line)} (for a file without names give numbers, as #1,2)"
    )

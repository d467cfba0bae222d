"""Reads the records of labeled sources; see ``labelled_names``.

Labeled data are small, so they are read into memory. Every record has a location, which error
messages show.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator

from ..common.files import Line, file_lines, matching_files, matching_lines
from ..common.json_lines import picked, single_fields
from ..filters.conditions import Condition, LeftOut
from .columnar.tables import Rows
from .in_memory import KIND, Examples, read_memory
from .labelled_names import LabelledSource, Record, parse_corpora
from .load_documents import load_documents
from .read_documents import json_rows, read_documents
from .source_names import FILE_KINDS
from .tables import ColumnRoles, column_names, read_tables


def read_fields(
    source: LabelledSource, roles: ColumnRoles, left_out: LeftOut | None = None
) -> Iterator[Record]:
    """Reads a local source whose records have named fields.

    Args:
      source: A source of the kind ``tsv``, ``csv``, ``jsonl``, ``parquet``, ``arrow``,
        ``corpora`` or ``memory``.
      roles: The roles of the source's fields, if it is a table.
      left_out: Counts the records that do not satisfy the conditions of the source.

    Returns:
      The records; files are read in sorted order.

    Raises:
      DataError: A file is missing, not UTF-8 or incomplete; or a line has too many or too few
        columns, is not JSON, or lacks a field (the message names file and line).
    """
    return _READERS[source.kind](source, roles, left_out)


def _read_columns(
    source: LabelledSource, roles: ColumnRoles, left_out: LeftOut | None
) -> Iterator[Record]:
    del roles
    rows = Rows.of_files(source.kind, source.location, source.name)
    return itertools.starmap(Record, rows.values(source.fields, source.conditions, left_out))


def _read_examples(
    source: LabelledSource, roles: ColumnRoles, left_out: LeftOut | None
) -> Iterator[Record]:
    del roles
    values = read_memory(source.name, source.fields, source.conditions, left_out)
    return itertools.starmap(Record, values)


def _read_json_lines(
    source: LabelledSource, roles: ColumnRoles, left_out: LeftOut | None
) -> Iterator[Record]:
    del roles
    lines = matching_lines(source.location, source.name)
    return read_objects(lines, source.fields, source.conditions, left_out)


def names_of_fields(source: LabelledSource) -> tuple[str, ...]:
    """Returns the names of all fields that occur in any record of a local source.

    Raises:
      DataError: A file is missing or malformed, or a table does not name its columns.
    """
    if source.kind in ("tsv", "csv"):
        return column_names(source)
    if source.kind in FILE_KINDS:
        return Rows.of_files(source.kind, source.location, source.name).columns
    if isinstance(source.name, Examples):
        rows: Iterable[object] = source.name.rows
    else:
        lines = matching_lines(source.location, source.name)
        rows = (row for _, row in json_rows(lines, (), None))
    return tuple(dict.fromkeys(key for row in rows if isinstance(row, dict) for key in row))


def _read_corpora(
    source: LabelledSource, roles: ColumnRoles, left_out: LeftOut | None
) -> Iterator[Record]:
    """Reads the label and the text of each document, or only the text if no label is requested."""
    del roles, left_out
    for label, corpora in parse_corpora(source.location, source.name):
        for corpus in corpora:
            # Read the whole training split of a published corpus.
            texts: Iterable[str] = (
                load_documents(corpus.name, "train", validation_fraction=0.0)
                if corpus.kind == "tfds"
                else read_documents(corpus)
            )
            # Documents have no fields, so use the usual field names of labeled data.
            for number, text in enumerate(texts, start=1):
                values = {"label": label, "text": text}
                record = tuple(values[field] for field in source.fields)
                yield Record(f"{corpus.name} document {number}", record)


_READERS: dict[str, Callable[[LabelledSource, ColumnRoles, LeftOut | None], Iterator[Record]]] = {
    **dict.fromkeys(("tsv", "csv"), read_tables),
    **dict.fromkeys(FILE_KINDS, _read_columns),
    KIND: _read_examples,
    "corpora": _read_corpora,
    "jsonl": _read_json_lines,
}


def source_lines(source: LabelledSource) -> Iterator[Iterator[Line]]:
    """Reads the lines of each file of a local source."""
    yield from map(file_lines, matching_files(source.location, source.name))


def are_json_lines(path: str) -> bool:
    """Returns whether a file contains JSON lines, according to its name."""
    return path.removesuffix(".gz").endswith(".jsonl")


def read_objects(
    lines: Iterator[Line],
    fields: tuple[str, ...],
    conditions: tuple[Condition, ...] = (),
    left_out: LeftOut | None = None,
    *,
    unread: set[str] | None = None,
) -> Iterator[Record]:
    """Reads records from JSON lines, and ignores empty lines.

    Args:
      lines: The lines.
      fields: The fields to read.
      conditions: Conditions on fields; records that do not satisfy them are left out.
      left_out: Counts the records that are left out.
      unread: Collects the names of fields that are present but not read.

    Raises:
      DataError: A line is not a JSON object, or lacks a field.
    """
    read = single_fields(fields)
    for location, row in json_rows(lines, conditions, left_out):
        if unread is not None:
            unread |= row.keys() - read
        yield Record(location, picked(row, fields, location))

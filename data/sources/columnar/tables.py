"""Reads tables with named columns in pieces, and provides access to rows by index.

A piece is a row group of a Parquet file, a batch of an Arrow file, or a range of rows in a Hugging
Face data set. Only the columns in use are read, and only one piece at a time is in memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from pathlib import Path
from typing import Any

import numpy as np

from ...common.errors import DataError, reported
from ...common.fields import require
from ...common.files import File, matching_files
from ...common.json_lines import pick, picked, single_fields
from ...filters.conditions import Condition, LeftOut, keeps
from ..in_memory import plain

# Arrow's Python package has no type annotations.
ArrowTable = Any
"""A ``pyarrow.Table``."""
ArrowSchema = Any
"""A ``pyarrow.Schema``."""
_ROWS_AT_ONCE = 1024


class Table(ABC):
    """A table of named columns.

    Attributes:
      name: The name of the table, for messages.
      schema: The ``pyarrow.Schema`` of the table.
    """

    name: str
    schema: ArrowSchema

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(self.schema.names)

    @cached_property
    def paths(self) -> Mapping[str, tuple[str, ...]]:
        """The path to each column and to each field of a struct, such as ``translation.en``."""
        paths: dict[str, tuple[str, ...]] = {name: (name,) for name in self.columns}
        for field in self.schema:
            for path in _fields_of(field):
                # If the name of a column contains a dot, the column takes precedence over a field.
                paths.setdefault(".".join(path), path)
        return paths

    @cached_property
    def sizes(self) -> list[int]:
        """The number of rows in each piece."""
        raise NotImplementedError

    @abstractmethod
    def whole_columns(self, index: int, columns: list[str]) -> ArrowTable:
        """Reads some columns of a piece, including all fields of columns that contain structs."""

    def piece(self, index: int, columns: list[str]) -> ArrowTable:
        """Reads some columns of a piece; ``columns`` contains keys of ``paths``."""
        import pyarrow
        import pyarrow.compute

        # Disable type checks: the functions of this module are created at run time.
        compute: Any = pyarrow.compute
        paths = [self.paths[name] for name in columns]
        table = self.whole_columns(index, list(dict.fromkeys(path[0] for path in paths)))
        arrays = [
            reduce(compute.struct_field, fields, table.column(first)) for first, *fields in paths
        ]
        return pyarrow.Table.from_arrays(arrays, names=columns)

    def pieces(self, columns: list[str]) -> Iterator[ArrowTable]:
        """Reads some columns of all pieces in order."""
        return (self.piece(index, columns) for index in range(len(self.sizes)))


class _ParquetTable(Table):
    def __init__(self, file: File) -> None:
        import pyarrow.parquet

        self.name = str(file)
        opened = str(file) if isinstance(file, Path) else file.open("rb")
        self._file = pyarrow.parquet.ParquetFile(opened)
        self.schema = self._file.schema_arrow

    @cached_property
    def sizes(self) -> list[int]:
        metadata = self._file.metadata
        return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]

    def whole_columns(self, index: int, columns: list[str]) -> ArrowTable:
        return self._file.read_row_group(index, columns=columns, use_threads=False)


class _ArrowTable(Table):
    """A file in Arrow's file format, or in the stream format that Hugging Face data sets write."""

    def __init__(self, file: File) -> None:
        import pyarrow
        import pyarrow.ipc

        self.name = str(file)
        # Memory-map a local file, so that its batches are not copied into memory.
        source = pyarrow.memory_map(self.name) if isinstance(file, Path) else file.open("rb")
        # Try the file format first, because it begins with a signature and the other does not.
        try:
            self._reader: Any = pyarrow.ipc.open_file(source)
        except pyarrow.ArrowInvalid:
            source.seek(0)
            self._reader = pyarrow.ipc.open_stream(source)
        self.schema = self._reader.schema

    @cached_property
    def _stream(self) -> list[Any] | None:
        """All batches of the stream format, which has no random access; None for a file."""
        has_batches = hasattr(self._reader, "get_batch")
        return None if has_batches else self._reader.read_all().to_batches()

    @cached_property
    def sizes(self) -> list[int]:
        # Keep one batch of a file in memory at a time.
        number = self._reader.num_record_batches if self._stream is None else len(self._stream)
        return [self._batch(index).num_rows for index in range(number)]

    def _batch(self, index: int) -> Any:
        return self._reader.get_batch(index) if self._stream is None else self._stream[index]

    def whole_columns(self, index: int, columns: list[str]) -> ArrowTable:
        import pyarrow

        return pyarrow.Table.from_batches([self._batch(index)]).select(columns)


_TABLES: dict[str, type[_ParquetTable] | type[_ArrowTable]] = {
    "parquet": _ParquetTable,
    "arrow": _ArrowTable,
}


@dataclass(frozen=True)
class Rows:
    """The rows of a columnar source, whose tables are opened one at a time.

    Attributes:
      name: The name of the source, for messages.
      kind: ``parquet``, ``arrow`` or ``hf``.
      tables: The files, or the opened data set.
    """

    name: str
    kind: str
    tables: tuple[File | Table, ...]

    @classmethod
    def of_files(cls, kind: str, pattern: str, name: str) -> "Rows":
        """Finds the files of a source.

        Raises:
          DataError: No file matches.
        """
        return cls(name, kind, tuple(matching_files(pattern, name)))

    def open_table(self, index: int) -> Table:
        """Opens the table with the given index in ``tables``.

        Raises:
          DataError: The file is not in the format that its source states.
        """
        import pyarrow

        table = self.tables[index]
        if isinstance(table, Table):
            return table
        problem = f"{table} cannot be read as {self.kind}"
        with reported(problem, "write it again", pyarrow.ArrowException, OSError):
            return _TABLES[self.kind](table)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns of the first table.

        Raises:
          DataError: The file is not in the format that its source states.
        """
        return self.open_table(0).columns

    def read(
        self,
        fields: Sequence[str] | None,
        conditions: tuple[Condition, ...] = (),
        left_out: LeftOut | None = None,
    ) -> Iterator[tuple[str, int, Mapping[str, object]]]:
        """Yields the location, the index and the columns of each row.

        Args:
          fields: The fields to read. Each is the name of a column, several names joined by ``+``,
              or the name of an optional column followed by ``?``. If None, all columns are read.
          conditions: Conditions on columns; rows that do not satisfy them are left out.
          left_out: Counts the rows that are left out.

        Raises:
          DataError: A file is damaged or of another kind, or a column is missing.
        """
        # `number` counts the rows of the current table, for messages; `total` counts the rows of
        # all tables.
        total = 0
        for index in range(len(self.tables)):
            table, number = self.open_table(index), 0
            columns = _wanted(table, fields, conditions)
            for piece in self._pieces(table, columns):
                # A row group may be large, so convert only some of its rows at a time.
                for batch in piece.to_batches(max_chunksize=_ROWS_AT_ONCE):
                    for row in batch.to_pylist():
                        number, total = number + 1, total + 1
                        location = f"{table.name} row {number}"
                        if keeps(conditions, row, location, left_out):
                            yield location, total - 1, row

    def _pieces(self, table: Table, columns: list[str]) -> Iterator[ArrowTable]:
        import pyarrow

        problem = f"{table.name} is damaged"
        with reported(problem, "write it again", pyarrow.ArrowException, OSError):
            yield from table.pieces(columns)

    def values(
        self,
        fields: Sequence[str],
        conditions: tuple[Condition, ...] = (),
        left_out: LeftOut | None = None,
    ) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Yields the location and the values of the fields of each row; see ``read``."""
        for location, _, row in self.read(fields, conditions, left_out):
            yield location, tuple(map(plain, picked(row, fields, location)))


def _wanted(
    table: Table, fields: Sequence[str] | None, conditions: tuple[Condition, ...]
) -> list[str]:
    """Returns the names of the columns to read."""
    if fields is None:
        return list(table.columns)
    named = dict.fromkeys(table.paths)
    tested = [condition.field for condition in conditions]
    for field in (*fields, *tested):
        # Raise an error now if a column does not exist; the message lists the names of all columns.
        pick(named, field, table.name)
    wanted = single_fields((*fields, *tested))
    return [name for name in table.paths if name in wanted]


def _fields_of(field: Any) -> Iterator[tuple[str, ...]]:
    """Yields the path to each field of a struct, including fields of nested structs."""
    import pyarrow

    if pyarrow.types.is_struct(field.type):
        for part in field.type:
            yield field.name, part.name
            yield from ((field.name, *path) for path in _fields_of(part))


class ColumnRecords:
    """Provides random access to one column of texts; see ``documents.Records``.

    The piece that was read last stays in memory, so reading the rows in order reads each piece
    only once.
    """

    def __init__(self, rows: Rows, column: str) -> None:
        """Counts the rows of all tables.

        Args:
          rows: The rows.
          column: The name of the column.

        Raises:
          DataError: A file is not in the format that its source states.
        """
        self._rows, self._column = rows, column
        # Close each file after counting, because there may be more files than can be open at once.
        self._pieces = [
            (table, piece, size)
            for table in range(len(rows.tables))
            for piece, size in enumerate(rows.open_table(table).sizes)
        ]
        self._ends = np.cumsum([size for _, _, size in self._pieces])
        # Keep the table and the piece that were read last.
        self._open = lru_cache(maxsize=1)(rows.open_table)
        self._read = lru_cache(maxsize=1)(self._read_piece)

    def __len__(self) -> int:
        return sum(size for _, _, size in self._pieces)

    def __getitems__(self, record_keys: Sequence[int], /) -> list[dict[str, bytes]]:
        """Reads several rows at once."""
        # A row belongs to the first piece that ends after it.
        owners = np.searchsorted(self._ends, record_keys, "right")
        texts: list[dict[str, bytes]] = []
        for key, owner in zip(record_keys, owners.tolist(), strict=True):
            column = self._read(owner)
            # The index of the first row in a piece is the end of the piece minus its length.
            text = column[key - int(self._ends[owner]) + len(column)].as_py()
            problem = f"{self._rows.name} changed while it was read: start again"
            require(isinstance(text, str), problem, DataError)
            texts.append({self._column: text.encode()})
        return texts

    def _read_piece(self, owner: int) -> ArrowTable:
        """Returns the column of a piece."""
        table, piece, _ = self._pieces[owner]
        return self._open(table).piece(piece, [self._column]).column(self._column)

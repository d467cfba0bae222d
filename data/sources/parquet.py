"""Parquet files: columns by name, of texts, numbers and lists of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..common.errors import DataError
from ..common.files import matching_files
from ..common.json_lines import pick
from ..filters.conditions import LeftOut, keeps
from .in_memory import plain
from .labelled_names import LabelledSource, Record


def parquet_columns(source: LabelledSource) -> tuple[str, ...]:
    """Returns the names of the columns of the first file.

    Raises:
      DataError: No file matches, or it is not a Parquet file.
    """
    first = matching_files(source.location, source.name)[0]
    return tuple(_open(first).schema_arrow.names)


def read_parquet(source: LabelledSource, left_out: LeftOut | None = None) -> Iterator[Record]:
    """Reads the fields of all rows, with files in sorted order.

    Args:
      source: A source of the kind ``parquet``.
      left_out: Counts the rows that do not satisfy the conditions of the source.

    Raises:
      DataError: No file matches, a file is not a Parquet file, or a column is missing.
    """
    for path in matching_files(source.location, source.name):
        number = 0
        for batch in _open(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                location = f"{path} row {number}"
                if keeps(source.conditions, row, location, left_out):
                    values = (plain(pick(row, field, location)) for field in source.fields)
                    yield Record(location, tuple(values))


def _open(path: Path) -> Any:
    """Opens a file."""
    # Import late, because the package is large.
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).split("\n")[0]
        raise DataError(f"{path} is not a Parquet file ({reason}): write it again") from None

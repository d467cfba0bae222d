"""Provides files and built-in examples as records, with the interface of published data sets."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...filters.conditions import LeftOut
from ..hash_split import Split
from ..labelled_names import LabelledSource, Record
from ..labelled_records import names_of_fields, read_fields
from ..tables import ColumnRoles, header_notes
from .records import OpenedRecords


@dataclass(frozen=True)
class LocalRecords(OpenedRecords):
    """Files, or examples in memory. They have no splits, so reading a split reads everything.

    Attributes:
      columns: The roles of the fields, if the source is a table.
    """

    columns: ColumnRoles

    @property
    def notes(self) -> tuple[str, ...]:
        """See ``OpenedRecords``; the lines report recognized headers."""
        return header_notes(self.source, self.columns)

    @property
    def field_names(self) -> tuple[str, ...]:
        """See ``OpenedRecords``."""
        return names_of_fields(self.source)

    def read(self, split: Split, left_out: LeftOut | None = None) -> Iterator[Record]:
        """See ``OpenedRecords``."""
        del split
        return read_fields(self.source, self.columns, left_out)


@dataclass(frozen=True)
class BuiltinRecords(OpenedRecords):
    """Built-in examples, which have a validation split.

    Attributes:
      make: A function that makes the records of a split.
    """

    make: Callable[[LabelledSource, Split], list[Record]]

    @property
    def validation(self) -> str:
        """See ``OpenedRecords``."""
        return "validation"

    @property
    def field_names(self) -> tuple[str, ...]:
        """See ``OpenedRecords``."""
        return self.source.fields

    def read(self, split: Split, left_out: LeftOut | None = None) -> Iterator[Record]:
        """See ``OpenedRecords``."""
        del left_out
        return iter(self.make(self.source, split))

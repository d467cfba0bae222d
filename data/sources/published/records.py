"""Provides the records of opened sources, and the splits and class names of published data."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from ...common.errors import DataError
from ...common.fields import require
from ...filters.conditions import LeftOut
from ..columnar.huggingface import VALIDATION, HubData
from ..hash_split import Split
from ..in_memory import plain
from ..labelled_names import LabelledSource, Record


@dataclass(frozen=True)
class OpenedRecords(ABC):
    """An opened source whose records have fields: a published data set, built-in data, or files.

    Attributes:
      source: The name and the fields of the source.
    """

    source: LabelledSource

    @property
    def validation(self) -> str | None:
        """The name of the validation split, or None if there is none."""
        return None

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the log that describe how the source is read."""
        return ()

    @property
    @abstractmethod
    def field_names(self) -> tuple[str, ...]:
        """The names of all fields."""

    def class_names(self, field: str) -> tuple[str, ...] | None:
        """Returns the class names of a field that contains class ids or lists of class ids."""
        del field
        return None

    @abstractmethod
    def read(self, split: Split, left_out: LeftOut | None = None) -> Iterator[Record]:
        """Reads one split, and counts in ``left_out`` the records that a filter omits.

        Raises:
          DataError: The split or a field does not exist, or the source cannot be read.
        """


@dataclass(frozen=True)
class PublishedRecords(OpenedRecords):
    """A published data set on this machine. Its records are read in the published order."""

    @abstractmethod
    def split_name(self, split: Split) -> str:
        """Returns the published name of a split.

        Raises:
          DataError: The split does not exist.
        """

    @abstractmethod
    def rows(self, split: Split) -> Iterator[tuple[str, Mapping[str, object]]]:
        """Yields the location and all fields of each record of a split.

        Raises:
          DataError: The split does not exist, or random access is impossible.
        """

    def pair_fields(self) -> tuple[str, ...]:
        """Returns the fields that the data set declares as text and translation, if any."""
        return ()

    @abstractmethod
    def identity(self, split: Split) -> tuple[object, ...]:
        """Returns metadata that identify a split's content. The last is the number of records."""


@dataclass(frozen=True)
class HubRecords(PublishedRecords):
    """A data set of the Hugging Face hub, or a folder that ``save_to_disk`` wrote.

    Attributes:
      hub: The opened data set.
    """

    hub: HubData

    @property
    def validation(self) -> str | None:
        """See ``PublishedRecords``."""
        return self.hub.validation

    @property
    def field_names(self) -> tuple[str, ...]:
        """See ``PublishedRecords``."""
        return self.hub.columns

    def split_name(self, split: Split) -> str:
        """See ``PublishedRecords``."""
        # An evaluation reads the whole named split, or the only split of a saved data set.
        name = self.hub.training if split == "train" else self.hub.to_evaluate(VALIDATION)
        splits = list(self.hub.splits)
        known = f"its splits are {', '.join(splits)}"
        remedy = f"name one, as {self.source.name.partition('#')[0]}[{splits[-1]}]"
        problem = f"{self.source.name!r} has no {split} split ({known}): {remedy}"
        require(name is not None, problem, DataError)
        return str(name)

    def rows(self, split: Split) -> Iterator[tuple[str, Mapping[str, object]]]:
        """See ``PublishedRecords``."""
        for location, _, row in self.hub.rows(self.split_name(split)).read(None):
            yield location, cast(Mapping[str, object], plain(row))

    def read(self, split: Split, left_out: LeftOut | None = None) -> Iterator[Record]:
        """See ``OpenedRecords``; only the columns in use are read."""
        rows = self.hub.rows(self.split_name(split))
        source = self.source
        for location, values in rows.values(source.fields, source.conditions, left_out):
            yield Record(location, values)

    def class_names(self, field: str) -> tuple[str, ...] | None:
        """See ``PublishedRecords``."""
        return self.hub.class_names(field)

    def identity(self, split: Split) -> tuple[object, ...]:
        """See ``PublishedRecords``."""
        return self.hub.identity(self.split_name(split))

"""Records of published data sets, which may have splits and names of classes."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from ...common.errors import DataError
from ...common.fields import require
from ...filters.conditions import LeftOut
from ..columnar.huggingface import VALIDATION, HubData
from ..hash_split import Split
from ..labelled_names import LabelledSource, Record


@dataclass(frozen=True)
class PublishedRecords(ABC):
    """A published data set on this machine.

    Attributes:
      source: The name and the fields of the data set.
    """

    source: LabelledSource

    @property
    @abstractmethod
    def validation(self) -> str | None:
        """The name of the validation split, or None."""

    @property
    @abstractmethod
    def splits(self) -> tuple[str, ...]:
        """The names of all splits."""

    @property
    @abstractmethod
    def field_names(self) -> tuple[str, ...]:
        """The names of all fields."""

    @abstractmethod
    def split_name(self, split: Split) -> str:
        """Returns the published name of a split.

        Raises:
          DataError: The split does not exist.
        """

    @abstractmethod
    def read(self, split: Split, left_out: LeftOut | None = None) -> Iterator[Record]:
        """Reads one split in the published order, and counts the records that a filter omits.

        Raises:
          DataError: The split or a field does not exist, or random access is impossible.
        """

    @abstractmethod
    def class_names(self, field: str) -> tuple[str, ...] | None:
        """Returns the class names of a field with class ids or lists of class ids."""

    @abstractmethod
    def pair_fields(self) -> tuple[str, ...]:
        """Returns the fields of a text and its translation that the data set declares."""

    @abstractmethod
    def identity(self, split: Split) -> tuple[object, ...]:
        """Returns metadata that identify the content of a split, its number of records last."""


@dataclass(frozen=True)
class HubRecords(PublishedRecords):
    """A data set of the Hugging Face hub, or a folder of ``save_to_disk``.

    Attributes:
      hub: The opened data set.
    """

    hub: HubData

    @property
    def validation(self) -> str | None:
        """See ``PublishedRecords``."""
        return self.hub.validation

    @property
    def splits(self) -> tuple[str, ...]:
        """See ``PublishedRecords``."""
        return tuple(self.hub.splits)

    @property
    def field_names(self) -> tuple[str, ...]:
        """See ``PublishedRecords``."""
        return self.hub.columns

    def split_name(self, split: Split) -> str:
        """See ``PublishedRecords``."""
        # A named split, or the only split of a saved data set, is read whole for an evaluation.
        name = self.hub.training if split == "train" else self.hub.to_evaluate(VALIDATION)
        known = f"its splits are {', '.join(self.splits)}"
        remedy = f"name one, as {self.source.name.partition('#')[0]}[{self.splits[-1]}]"
        problem = f"{self.source.name!r} has no {split} split ({known}): {remedy}"
        require(name is not None, problem, DataError)
        return str(name)

    def read(self, split: Split, left_out: LeftOut | None = None) -> Iterator[Record]:
        """See ``PublishedRecords``."""
        rows = self.hub.rows(self.split_name(split))
        source = self.source
        for location, values in rows.values(source.fields, source.conditions, left_out):
            yield Record(location, values)

    def class_names(self, field: str) -> tuple[str, ...] | None:
        """See ``PublishedRecords``."""
        return self.hub.class_names(field)

    def pair_fields(self) -> tuple[str, ...]:
        """See ``PublishedRecords``; always empty, because the hub declares no such fields."""
        return ()

    def identity(self, split: Split) -> tuple[object, ...]:
        """See ``PublishedRecords``."""
        return self.hub.identity(self.split_name(split))

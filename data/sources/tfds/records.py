"""Reads published TensorFlow Datasets as records with fields."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ...common.errors import DataError
from ...common.fields import require
from ...common.json_lines import picked
from ...filters.conditions import LeftOut, keeps
from ..hash_split import Split
from ..in_memory import plain
from ..labelled_names import LabelledSource, Record
from ..published.records import PublishedRecords

if TYPE_CHECKING:
    from tensorflow_datasets.core import DatasetBuilder

# The names of validation splits, in order of preference. MNLI has two validation splits.
_VALIDATION = ("validation", "dev", "validation_matched")


@dataclass(frozen=True)
class TfdsRecords(PublishedRecords):
    """A published TensorFlow Dataset on this machine.

    Attributes:
      builder: The TFDS builder of the data set.
    """

    builder: "DatasetBuilder"

    @property
    def validation(self) -> str | None:
        """See ``PublishedRecords``."""
        splits = self.builder.info.splits
        return next(filter(splits.__contains__, _VALIDATION), None)

    def split_name(self, split: Split) -> str:
        """See ``PublishedRecords``."""
        splits = list(self.builder.info.splits)
        name = "train" if split == "train" else self.validation
        problem = f"{self.source.name!r} has no {split} split: it has {', '.join(splits)}"
        require(name in splits, problem, DataError)
        return str(name)

    def rows(self, split: Split) -> Iterator[tuple[str, Mapping[str, object]]]:
        """See ``PublishedRecords``."""
        for location, row in self._unconverted(split):
            yield location, cast(Mapping[str, object], plain(row))

    def _unconverted(self, split: Split) -> Iterator[tuple[str, Mapping[str, object]]]:
        """Yields the location and the values of each row, as TFDS reads them."""
        # Import TFDS only if it is needed, because it is slow to import.
        from .documents import open_split

        name = self.split_name(split)
        rows = open_split(self.builder, name, self.source.name)
        for number, row in enumerate(rows, start=1):
            yield f"{self.source.name} {name} example {number}", row

    def read(self, split: Split, left_out: LeftOut | None = None) -> Iterator[Record]:
        """See ``OpenedRecords``."""
        source = self.source
        for location, row in self._unconverted(split):
            # Convert the other fields only if a filter may read them.
            tested = cast(Mapping[str, object], plain(row)) if source.conditions else row
            if keeps(source.conditions, tested, location, left_out):
                yield Record(location, tuple(map(plain, picked(row, source.fields, location))))

    @property
    def field_names(self) -> tuple[str, ...]:
        """See ``PublishedRecords``."""
        return tuple(_features(self.builder))

    def class_names(self, field: str) -> tuple[str, ...] | None:
        """See ``PublishedRecords``."""
        import tensorflow_datasets as tfds

        feature = dict(_features(self.builder).items()).get(field)
        # A sequence feature contains the feature of its items.
        feature = getattr(feature, "feature", feature)
        return tuple(feature.names) if isinstance(feature, tfds.features.ClassLabel) else None

    def pair_fields(self) -> tuple[str, ...]:
        """See ``PublishedRecords``; these are the supervised keys that the data set declares."""
        keys = self.builder.info.supervised_keys or ()
        return tuple(key for key in keys if isinstance(key, str))

    def identity(self, split: Split) -> tuple[object, ...]:
        """See ``PublishedRecords``."""
        name = self.split_name(split)
        info = self.builder.info.splits[name]
        return self.builder.info.full_name, name, info.num_bytes, info.num_examples


def open_tfds(source: LabelledSource) -> TfdsRecords:
    """Opens a published data set, and downloads it first if necessary.

    Raises:
      DataError: The data set is unknown, or cannot be found or downloaded.
    """
    from .documents import prepared_builder

    return TfdsRecords(source, prepared_builder(source))


def _features(builder: "DatasetBuilder") -> Mapping[str, object]:
    """Returns the features of a data set as a mapping, because TFDS declares a wider type."""
    return cast(Mapping[str, object], builder.info.features)

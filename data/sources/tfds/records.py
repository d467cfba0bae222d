"""Published TensorFlow Datasets as records of fields."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ...common.errors import DataError
from ...common.fields import require
from ...common.json_lines import pick
from ...filters.conditions import LeftOut, keeps
from ..hash_split import Split
from ..in_memory import plain
from ..labelled_names import LabelledSource, Record, with_known_fields

if TYPE_CHECKING:
    from tensorflow_datasets.core import DatasetBuilder

# The names of validation splits in order of preference; MNLI has two.
_VALIDATION = ("validation", "dev", "validation_matched")


@dataclass(frozen=True)
class PublishedRecords:
    """A published data set on this machine.

    Attributes:
      source: The name and the fields of the data set.
      builder: The TFDS builder of the data set.
    """

    source: LabelledSource
    builder: "DatasetBuilder"

    @property
    def validation(self) -> str | None:
        """The name of the validation split, or None."""
        splits = self.builder.info.splits
        return next((name for name in _VALIDATION if name in splits), None)

    def split_name(self, split: Split) -> str:
        """Returns the published name of a split.

        Raises:
          DataError: The split does not exist.
        """
        splits = list(self.builder.info.splits)
        name = "train" if split == "train" else self.validation
        problem = f"{self.source.name!r} has no {split} split: it has {', '.join(splits)}"
        require(name in splits, problem, DataError)
        return str(name)

    def read(self, split: Split, left_out: LeftOut | None = None) -> Iterator[Record]:
        """Reads one split in the published order, and counts the records that a filter omits.

        Raises:
          DataError: The split or a field does not exist, or random access is impossible.
        """
        # Import late: TFDS is slow to load.
        from .documents import open_split

        name = self.split_name(split)
        rows = open_split(self.builder, name, self.source.name)
        for number, row in enumerate(rows, start=1):
            location = f"{self.source.name} {name} example {number}"
            conditions = self.source.conditions
            # Convert all fields only if a filter may read them.
            tested = {name: plain(row[name]) for name in row if conditions}
            if not keeps(conditions, tested, location, left_out):
                continue
            values = tuple(plain(pick(row, field, location)) for field in self.source.fields)
            yield Record(location, values)

    @property
    def field_names(self) -> tuple[str, ...]:
        """The names of all fields."""
        return tuple(_features(self.builder))

    def class_names(self, field: str) -> tuple[str, ...] | None:
        """Returns the class names of a field with class ids or lists of class ids."""
        import tensorflow_datasets as tfds

        feature = dict(_features(self.builder).items()).get(field)
        # A sequence feature wraps the feature of its items.
        feature = getattr(feature, "feature", feature)
        return tuple(feature.names) if isinstance(feature, tfds.features.ClassLabel) else None


def open_published(source: LabelledSource, fields: Mapping[str, str]) -> PublishedRecords:
    """Opens a published data set, and downloads it first if necessary.

    Args:
      source: A source of the kind ``tfds``.
      fields: The default fields of well-known data sets, by name.

    Raises:
      DataError: The data set is unknown, cannot be found or downloaded, or lacks one of the
        fields.
    """
    from .documents import download, open_builder

    source = with_known_fields(source, fields)
    builder = open_builder(source)
    if not Path(builder.data_dir, "dataset_info.json").is_file():
        download(builder, source)
    features = dict.fromkeys(_features(builder))
    for field in (*source.fields, *(condition.field for condition in source.conditions)):
        # Raise now if a field does not exist.
        pick(features, field, f"{source.name!r}")
    return PublishedRecords(source, builder)


def _features(builder: "DatasetBuilder") -> Mapping[str, object]:
    """Returns the features of a data set of records; TFDS declares a wider type."""
    return cast(Mapping[str, object], builder.info.features)

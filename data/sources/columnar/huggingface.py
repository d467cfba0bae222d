"""Opens data sets of the Hugging Face hub, and folders that ``Dataset.save_to_disk`` wrote.

=============================  ======================================================
``hf:NAME``                    a data set of the hub, read from the local cache if offline
``hf:OWNER/NAME/CONFIG``       one of its configurations
``hf:FOLDER``                  a folder that ``Dataset.save_to_disk`` wrote
``hf:NAME[SPLIT]``             one split, which is divided in the same way as a local source
``hf:NAME#translation.en``     a field of a column that contains structs
=============================  ======================================================

If the source names no split, training reads ``train``, and validation reads the published
validation split if there is one. The test split is never used. The same is true for ``tfds:``.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from ...common.errors import DataError, reason_of, required_package
from ...common.fields import require, require_one_of, require_value
from ...common.files import is_url
from .tables import ArrowTable, Rows, Table

KIND = "hf"
VALIDATION = ("validation", "dev", "valid", "validation_matched")
"""The names of validation splits in order of preference."""
_LOCATION = re.compile(r"(?P<path>.+?)(?:\[(?P<split>[\w.-]+)\])?")
# The number of rows in a piece. A Hugging Face data set has no row groups that could be pieces.
_ROWS_OF_A_PIECE = 1000


class _DatasetTable(Table):
    def __init__(self, dataset: Any, name: str) -> None:
        self.name, self._dataset = name, dataset
        self.schema = dataset.features.arrow_schema

    @cached_property
    def sizes(self) -> list[int]:
        number = len(self._dataset)
        starts = range(0, number, _ROWS_OF_A_PIECE)
        return [min(_ROWS_OF_A_PIECE, number - start) for start in starts]

    def whole_columns(self, index: int, columns: list[str]) -> ArrowTable:
        # Select the columns first, so that other columns, such as images, are not decoded.
        chosen = self._dataset.select_columns(columns).with_format("arrow")
        return chosen[index * _ROWS_OF_A_PIECE : (index + 1) * _ROWS_OF_A_PIECE]


@dataclass(frozen=True)
class HubData:
    """An opened Hugging Face data set.

    Attributes:
      name: The name of the source.
      splits: The splits by name. If a data set was saved without splits, it has only ``train``.
      split: The split that the source names, or None if it names no split.
    """

    name: str
    splits: Mapping[str, Any]
    split: str | None

    @property
    def validation(self) -> str | None:
        """The name of the published validation split.

        It is None if there is no such split, or if the source names a split.
        """
        published = filter(self.splits.__contains__, VALIDATION)
        return None if self.split is not None else next(published, None)

    @property
    def training(self) -> str:
        """The name of the split to train on.

        Raises:
          DataError: The training split is missing, and the source does not name another split.
        """
        known, split = ", ".join(self.splits), self.split or "train"
        remedy = f"name one, as {self.name.partition('#')[0]}[{next(iter(self.splits))}]"
        problem = f"{self.name!r} has no train split (its splits are {known}): {remedy}"
        # If the source names a split, `open_hub` has checked that it exists.
        require(split in self.splits, problem, DataError)
        return split

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all columns and of all fields of structs, such as ``translation.en``."""
        # Without a split to train on, read the columns of the first split.
        split = self.split or ("train" if "train" in self.splits else next(iter(self.splits)))
        return tuple(_DatasetTable(self.splits[split], self.name).paths)

    def to_evaluate(self, names: tuple[str, ...]) -> str | None:
        """Returns the name of the split to evaluate on, or None if there is no such split.

        The result is the split that the source names, the only split of the data set, or the first
        of ``names`` that exists.

        Args:
          names: The usual names of splits, in order of preference.
        """
        only = next(iter(self.splits)) if len(self.splits) == 1 else None
        published = filter(self.splits.__contains__, names)
        return self.split or next(published, only)

    def rows(self, split: str) -> Rows:
        """Returns the rows of the split with the given name."""
        table = _DatasetTable(self.splits[split], f"{self.name} {split}")
        return Rows(self.name, KIND, (table,))

    def identity(self, split: str) -> tuple[str, ...]:
        """Returns metadata that identify a split's content, with a hash from ``datasets``."""
        # The package provides no public access to this hash.
        return KIND, split, str(self.splits[split]._fingerprint), str(len(self.splits[split]))

    def class_names(self, column: str) -> tuple[str, ...] | None:
        """Returns the class names of a column that contains class ids or lists of class ids."""
        feature = self.splits[self.training].features
        for part in column.split("."):
            feature = feature.get(part) if isinstance(feature, dict) else None
        # If a column contains lists, the feature of the items is inside the feature of the list.
        feature = getattr(feature, "feature", feature)
        names = getattr(feature, "names", None)
        return None if names is None else tuple(names)


def open_hub(location: str, name: str) -> HubData:
    """Opens a data set, and downloads it first if necessary.

    Args:
      location: The part of the source name after the kind: ``NAME/CONFIG[SPLIT]``.
      name: The name of the source, for messages.

    Raises:
      DataError: The package ``datasets`` is missing; the data set or the split is unknown; or the
        data set is not on this machine and cannot be downloaded.
    """
    problem = f"source {name!r} is incomplete: write hf:NAME/CONFIG[SPLIT]#column"
    match = require_value(_LOCATION.fullmatch(location), problem, DataError)
    splits = _splits(match["path"], name.partition("#")[0])
    if match["split"] is not None:
        require_one_of(f"the split of {name!r}", match["split"], splits, error=DataError)
    return HubData(name, splits, match["split"])


@lru_cache(maxsize=8)
def _splits(path: str, name: str) -> Mapping[str, Any]:
    """Opens all splits. The result is cached, because a data set is opened several times."""
    with required_package("datasets", f"reading {name!r}", "pip install 'flaxzoo[datasets]'"):
        import datasets as package
    # Disable type checks: the functions have many parameters that are not used here.
    datasets: Any = package
    # A folder or a URL must be the output of `save_to_disk`; any other path is a name on the hub.
    load, attempts = datasets.load_from_disk, [(path,)]
    if not is_url(path) and not Path(path).expanduser().is_dir():
        load, attempts = datasets.load_dataset, list(_names(path))
    # Use the first interpretation of the path that can be loaded; otherwise report why each failed.
    reasons: list[str] = []
    for names in attempts:
        try:
            loaded = load(*names)
            return loaded if isinstance(loaded, Mapping) else {"train": loaded}
        # Catch all exceptions, because the package does not wrap the exceptions of downloads
        # and parsers.
        except Exception as error:
            reasons.append(reason_of(error)[:200])
    raise DataError(
        f"cannot load {name!r} ({'; '.join(reasons)}): check the name, connect to the network, or "
        "copy a folder of save_to_disk to this machine and name it as hf:FOLDER. For a folder of "
        "other files, name the files, as parquet:FOLDER/*.parquet"
    ) from None


def _names(path: str) -> Iterator[tuple[str, ...]]:
    """Yields the possible ways to split a path into a data set's name and a configuration."""
    parts = path.split("/")
    # A name may include an owner, so NAME/CONFIG and OWNER/NAME look alike.
    if len(parts) <= 2:
        yield (path,)
    if len(parts) >= 2:
        yield "/".join(parts[:-1]), parts[-1]

"""Applies the names that the user gives to labels that are whole numbers (``data.label_names``)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...common.errors import DataError
from ...common.fields import require
from ...common.numbering import numbered
from ...sources.labelled_names import Record
from ..labelled import LabelledData
from ..labelled_examples import E


@dataclass(frozen=True, kw_only=True)
class NamedLabelData(LabelledData[E]):
    """Labeled data whose labels may be numbers. The user can give names for these numbers."""

    label_names: tuple[str, ...] = ()
    """The names of labels that are numbers: first the name of 0, then the name of 1, and so on. The
    run stores the names, `predict` shows them, and `export` writes them as id2label. Defaults to
    the names that a published data set declares.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        names = self.label_names
        # An empty tuple is valid, but not a single name: there must be at least two labels.
        distinct = len(set(names)) == len(names) != 1 and all(name.strip() for name in names)
        problem = f"data.label_names must be different names, two or more, got {', '.join(names)!r}"
        require(distinct, f"{problem}: give the name of 0, of 1 and so on", DataError)

    @property
    def has_several_labels(self) -> bool:
        """Whether an example may have several labels."""
        return True

    def named(
        self, records: list[Record], names: tuple[str, ...] | None
    ) -> tuple[list[Record], tuple[str, ...] | None]:
        """See ``LabelledData``; if the user gives names, labels are converted to numbers."""
        if not self.label_names:
            return records, names
        return list(map(self._with_ids, records)), self.label_names

    def _with_ids(self, record: Record) -> Record:
        values, at = list(record.values), self.label_field
        read = ids_of if self.has_several_labels else id_of
        values[at] = read(values[at], self.label_names, record.location)
        return replace(record, values=tuple(values))


def parts_of(value: object) -> list[object]:
    """Returns the labels in a value: a comma-separated text, a list, or one label; drops blanks."""
    parts = value.split(",") if isinstance(value, str) else value
    parts = parts if isinstance(parts, list) else [parts]
    return [part for part in parts if str(part).strip()]


def ids_of(value: object, names: Sequence[str], location: str) -> list[int]:
    """Returns the ids of one or several labels.

    Args:
      value: A whole number, which may be a text; one of the names; or several numbers or names, as
        a list or separated by commas.
      names: The names of the labels, in the order of their ids.
      location: The location of the example, for messages.

    Raises:
      DataError: The value is neither a name nor the index of a name.
    """
    # A name may contain a comma, so first look for the whole value among the names.
    parts = [value] if value in names else parts_of(value)
    return [id_of(part, names, location) for part in parts]


def id_of(value: object, names: Sequence[str], location: str) -> int:
    """Returns the id of a label; takes the same arguments as ``ids_of``.

    Raises:
      DataError: The value is neither a name nor the index of a name.
    """
    text = str(value).strip()
    # If a whole number is itself the name of a label, it means this label.
    known = numbered(map(str, range(len(names)))) | numbered(names)
    if text not in known:
        raise DataError(
            f"{location} has the label {text!r}, but data.label_names has {len(names)} names: give "
            f"a number from 0 to {len(names) - 1}, one of {', '.join(names)}, or more names"
        )
    return known[text]

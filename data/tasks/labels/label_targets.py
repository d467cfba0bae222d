"""Defines the types of labels that texts can have: how to read, encode and predict them."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...common.errors import DataError
from ...common.fields import require
from ...common.numbering import numbered
from ...dataset import ArraySpec, Values
from ...features.predictions import Prediction, label_id, sigmoid, softmax
from ..base import Target
from .given_labels import parts_of

Label = str | tuple[str, ...] | float
"""The name of a label, the names of several labels, or a score."""
Located = Sequence[tuple[Any, str]]
"""The label of each example, together with the location of the example for messages."""
Names = tuple[str, ...]


@dataclass(frozen=True)
class LabelTarget:
    """A type of label.

    Attributes:
      read: Converts a value from a file to a label. Its arguments are the value, the names of the
        labels (if labels are numbers, as in published data sets), and the location of the example.
      spec: Describes the array that contains an example's labels, given the number of label names.
      encode: Converts the labels of n examples to an array, given the names of the L outputs.
      decode: Converts logits, float [n, L], to a prediction for each example.
      num_labels: The minimum and the maximum number of different labels that a source may have.
      assumed: Placeholders for the names of the outputs, for a plan that is made before data are
        read.
    """

    read: Callable[[Any, Names | None, str], Label]
    spec: Callable[[int], ArraySpec]
    encode: Callable[[Located, Names], np.ndarray]
    decode: Callable[[np.ndarray, Names], Iterable[Prediction]]
    num_labels: tuple[int, float] = (1, math.inf)
    assumed: Names = ("a", "b")


def names_of(label: Label | None) -> Names:
    """Returns the names that a label consists of; a score has no names."""
    if isinstance(label, str):
        return (label,)
    return label if isinstance(label, tuple) else ()


def in_order(names: Iterable[str]) -> list[str]:
    """Sorts labels: whole numbers by value, so that 10 comes after 9, and other labels by name."""
    found = list(names)
    if all(name.removeprefix("-").isdecimal() and name.isascii() for name in found):
        return sorted(found, key=lambda name: (int(name), name))
    return sorted(found)


def _read_one(value: Any, names: Names | None, location: str) -> str:
    name = _name(value, names, location)
    require(name, f"{location} has no label: its column is empty", error=DataError)
    return name


def _read_several(value: Any, names: Names | None, location: str) -> Names:
    return tuple(_name(one, names, location) for one in parts_of(value))


def _read_score(value: Any, names: Names | None, location: str) -> float:
    del names
    try:
        score = float(value)
    except (TypeError, ValueError):
        score = math.nan
    problem = f"{location} has the score {value!r}: with target regression it must be a number"
    require(math.isfinite(score), problem, error=DataError)
    return score


def _name(value: Any, names: Names | None, location: str) -> str:
    if names is not None:
        # In published test splits, the id -1 replaces the label.
        problem = f"{location} has no label ({value}): choose a data set with labels"
        require(0 <= value < len(names), problem, error=DataError)
        return names[value]
    require(
        isinstance(value, str | int),
        f"{location} has the label {value!r}: a label is a word or a whole number; for other "
        "numbers choose target regression",
        error=DataError,
    )
    return str(value).lower() if isinstance(value, bool) else str(value).strip()


def _ids(labels: Located, names: Names) -> np.ndarray:
    ids = numbered(names)
    return np.array([label_id(label, ids, location) for label, location in labels], np.int32)


def _flags(labels: Located, names: Names) -> np.ndarray:
    """Returns a row for each example, with 1 for its labels and 0 otherwise, float32 [n, L]."""
    ids = numbered(names)
    values = np.zeros((len(labels), len(names)), np.float32)
    for row, (label, location) in zip(values, labels, strict=True):
        row[[label_id(name, ids, location) for name in label]] = 1
    return values


def _named(row: np.ndarray, names: Names) -> dict[str, float]:
    return dict(zip(names, row.tolist(), strict=True))


def _most_probable(logits: np.ndarray, names: Names) -> Iterable[Prediction]:
    for row in softmax(logits):
        yield {"label": names[int(row.argmax())], "probabilities": _named(row, names)}


def _applies_or_not(logits: np.ndarray, names: Names) -> Iterable[Prediction]:
    words = f"not {names[0]}", names[0]
    for row in sigmoid(logits):
        yield {"label": words[int(row[0] > 0.5)], "probabilities": _named(row, names)}


def _above_half(logits: np.ndarray, names: Names) -> Iterable[Prediction]:
    for row in sigmoid(logits):
        found = [name for name, p in zip(names, row, strict=True) if p > 0.5]
        yield {"labels": found, "probabilities": _named(row, names)}


def _flag_spec(num_labels: int) -> ArraySpec:
    return ArraySpec((num_labels,), Values.LABEL, "float32", num_classes=2)


TARGETS: dict[Target, LabelTarget] = {
    "single_label": LabelTarget(
        read=_read_one,
        spec=lambda num_labels: ArraySpec((), Values.LABEL, num_classes=num_labels),
        encode=_ids,
        decode=_most_probable,
        num_labels=(2, math.inf),
    ),
    "binary": LabelTarget(
        read=_read_one,
        spec=_flag_spec,
        # Any label other than the second means "not the second label".
        encode=lambda labels, names: np.array([[x == names[0]] for x, _ in labels], np.float32),
        decode=_applies_or_not,
        num_labels=(2, 2),
        assumed=("b",),
    ),
    "multi_label": LabelTarget(
        read=_read_several, spec=_flag_spec, encode=_flags, decode=_above_half
    ),
    "regression": LabelTarget(
        read=_read_score,
        spec=lambda num_labels: ArraySpec((), Values.LABEL, "float32"),
        encode=lambda labels, names: np.array([score for score, _ in labels], np.float32),
        decode=lambda logits, names: ({"score": score} for score in logits[:, 0].tolist()),
        assumed=("score",),
    ),
}
"""The types of labels, by their names in ``data.target``."""

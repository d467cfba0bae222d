"""The arrays of a batch before there are any data: names, shapes and types, by kind of data.

What decides them stands in a run's settings, but for the number of labels and of choices.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ..features import masking as mlm
from ..packing import packed_rows as row_records
from . import bert_pretraining as pretraining
from . import translation
from .base import DataConfig


class RowShape(NamedTuple):
    """An array of one row."""

    shape: tuple[int, ...]
    dtype: str = "int32"


RowShapes = dict[str, RowShape]


def row_shapes(data: DataConfig, num_labels: int, num_choices: int) -> RowShapes:
    """The arrays of a row.

    Args:
        data: The settings.
        num_labels: Different labels, L, where there are several to a text.
        num_choices: Choices of a question, C.
    """
    return _SHAPES[data.kind](data, num_labels, num_choices)


def _each(names: tuple[str, ...], *shape: int) -> RowShapes:
    return dict.fromkeys(names, RowShape(shape))


def _pretraining(data: Any, *_: int) -> RowShapes:
    predictions = data.max_predictions or math.ceil(round(data.masking_rate * data.length, 6))
    label = {"next_sentence_label": RowShape(())} if data.next_sentence else {}
    tokens = _each(pretraining.ARRAYS, data.length)
    return {**tokens, **_each(mlm.PREDICTIONS, predictions), **label}


def _classification(data: Any, num_labels: int, _: int) -> RowShapes:
    labels = {
        "one": RowShape(()),
        "several": RowShape((num_labels,), "float32"),
        "score": RowShape((), "float32"),
    }
    return {**_each(pretraining.ARRAYS, data.length), "labels": labels[data.target]}


_SHAPES: dict[str, Callable[[Any, int, int], RowShapes]] = {
    "causal": lambda data, *_: _each(row_records.ARRAYS, data.length),
    "pretraining": _pretraining,
    "translation": lambda data, *_: _each(translation.ARRAYS, data.length),
    "classify": _classification,
    "tag": lambda data, *_: _each((*pretraining.ARRAYS, "labels"), data.length),
    "span": lambda data, *_: {
        **_each(pretraining.ARRAYS, data.length),
        **_each(("start_positions", "end_positions")),
    },
    "choice": lambda data, _, choices: {
        **_each(pretraining.ARRAYS, choices, data.length),
        **_each(("labels",)),
    },
}

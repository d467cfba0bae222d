"""Computes labels and probabilities from model outputs, for all types of labeled data."""

from typing import Any, cast

import numpy as np

from ..common.errors import DataError
from ..common.fields import require

Prediction = dict[str, Any]
"""The prediction for one labeled example, which can be written as JSON."""


def label_id(label: str, ids: dict[str, int], location: str) -> int:
    """Returns the id of a label from the training data.

    Raises:
      DataError: The label does not occur in the training data. The message lists known labels.
    """
    if label not in ids:
        known = list(ids)
        shown = ", ".join(known[:20]) + (f" … ({len(known)} in all)" if len(known) > 20 else "")
        raise DataError(
            f"{location}: the label {label!r} is not in the training data, whose labels are "
            f"{shown}. Correct the label, or add the name of the labels' column to the source: "
            "FILE#COLUMN"
        )
    return ids[label]


def output(predictions: dict[str, np.ndarray], name: str, rows: int) -> np.ndarray:
    """Checks that a model output has one item per row, and returns the output."""
    values = np.asarray(predictions[name])
    problem = f"{name} has {len(values)} rows, but there are {rows}: pass all outputs"
    require(len(values) == rows, problem)
    return cast(np.ndarray, values)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Returns the probabilities over the last axis, float64."""
    logits = np.asarray(logits, np.float64)
    # Subtract the maximum, so that the exponentials do not overflow.
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Returns the independent probability of each item, float64."""
    # In contrast to 1 / (1 + exp(-x)), this formula cannot overflow.
    return 0.5 * (1 + np.tanh(0.5 * np.asarray(logits, np.float64)))

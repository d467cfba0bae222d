"""The three families whose laws run without `--all`, and batches for the laws of all families."""

from collections.abc import Container, Iterable, Sequence

import numpy as np
import pytest

ARCHETYPES = ("GPT", "BERT", "T5")


def cases(names: Iterable[str], without: Container[str] = ()) -> list:
    """Return the names as parameters of a test; archetypes have the mark `law`.

    Args:
        names: the kinds of models.
        without: names to leave out, because another name proves the law for them.
    """
    return [
        pytest.param(name, marks=pytest.mark.law) if name in ARCHETYPES else name
        for name in names
        if name not in without
    ]


def padded(rows: Sequence[tuple[np.ndarray, int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids and the mask of rows in one batch, so that one program computes all of them.

    Args:
        rows: the ids of each row, and the number of padded positions on its left.
        length: the length that all rows are padded to, on the right.
    """
    ids, mask = (np.zeros((len(rows), length), np.int32) for _ in range(2))
    for index, (row, left) in enumerate(rows):
        ids[index, left : left + len(row)] = row
        mask[index, left : left + len(row)] = 1
    return ids, mask

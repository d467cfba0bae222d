"""Ids of names: their indices in a list, such as the pieces of a vocabulary or the labels."""

import itertools
from collections.abc import Iterable


def numbered(names: Iterable[str]) -> dict[str, int]:
    """Returns the index of each name; the last index of a name that occurs several times."""
    return dict(zip(names, itertools.count(), strict=False))

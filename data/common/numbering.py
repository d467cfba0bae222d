"""Ids of names, such as the pieces of a vocabulary or labels: their indices in a list."""

from collections.abc import Iterable


def numbered(names: Iterable[str]) -> dict[str, int]:
    """Returns the index of each name; the last index of a name that occurs several times."""
    return {name: index for index, name in enumerate(names)}

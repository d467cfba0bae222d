"""Numbers the names in a list, such as labels or the pieces of a vocabulary."""

from collections.abc import Iterable


def numbered(names: Iterable[str]) -> dict[str, int]:
    """Maps each name to its index. If a name occurs several times, its last index is used."""
    return {name: index for index, name in enumerate(names)}

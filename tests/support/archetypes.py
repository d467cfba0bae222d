"""The three families whose laws run without `--all`."""

from collections.abc import Container, Iterable

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

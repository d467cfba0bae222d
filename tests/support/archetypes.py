"""The three families whose laws run without `--all`."""

from collections.abc import Iterable

import pytest

ARCHETYPES = ("GPT", "BERT", "T5")


def cases(names: Iterable[str]) -> list:
    """The names as parameters of a test; archetypes have the mark `law`."""
    return [
        pytest.param(name, marks=pytest.mark.law) if name in ARCHETYPES else name for name in names
    ]

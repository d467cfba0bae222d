"""Errors that the person at the keyboard can mend.

`models`, `data` and `train` all import this file; it imports nothing of ours.
"""

import difflib
from collections.abc import Sequence


class UserError(ValueError):
    """Bad input: one line that names the thing, the value seen and the remedy.

    Every error that a user can cause and mend derives from this class. The command line prints
    it as one line; any other exception is a bug and keeps its traceback.
    """


class DataError(UserError):
    """A source, a file, an example or a tokenizer that cannot be used."""


def similar_names(name: str, valid: Sequence[str]) -> list[str]:
    """Returns up to three of `valid` that `name` may be a misspelling of."""
    return difflib.get_close_matches(name, valid, n=3, cutoff=0.4)


def suggest(name: str, valid: Sequence[str]) -> str:
    """Returns `valid` as text for an error message, the names most like `name` first."""
    similar = similar_names(name, valid)
    return f"did you mean {' or '.join(similar)}?" if similar else f"choose from {', '.join(valid)}"

"""Errors: bad input that a user can fix, and failed steps of a run.

`models`, `data` and `train` all import this file; it imports no other file of flaxzoo.
"""

import contextlib
import difflib
from collections.abc import Iterator, Sequence
from typing import TypeVar

R = TypeVar("R")


class UserError(ValueError):
    """Bad input; the message, one line, says what is wrong, which value was found, and the remedy.

    Every error that a user can cause and fix derives from this class. The command line prints it as
    one line; any other exception is a bug and keeps its traceback.
    """


class DataError(UserError):
    """A source, a file, an example or a tokenizer that cannot be used."""


class RunError(UserError):
    """A run folder that cannot be used as requested."""


class NonFiniteLoss(ArithmeticError):
    """The loss is no longer finite."""


class ReportedByPrimary(RunError):
    """An error of another process, which process 0 reports."""


class StepNotTaken(Exception):
    """A function on the host failed before a step changed anything, on all processes.

    The cause (`__cause__`) is the error of the function.
    """


def reason_of(error: BaseException) -> str:
    """Returns the message of an error in one line, or the name of its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def reported(
    problem: str, remedy: str, *kinds: type[Exception], error: type[UserError] = DataError
) -> Iterator[None]:
    """Turns the exceptions of a library into one-line errors: "PROBLEM (reason): REMEDY".

    Args:
      problem: What failed: "cannot write notes.txt".
      remedy: What the user can do: "name another file".
      kinds: The classes of the exceptions.
      error: The class of the error to raise.

    Raises:
      UserError: The library raised one of these exceptions; raised as `error`. A `UserError` stays
        as it is.
    """
    try:
        yield
    except UserError:
        raise
    except kinds as failure:
        # The text of an OSError repeats the path, but its `strerror` does not. A library may set
        # `strerror` to several lines, or to a number.
        text = str(getattr(failure, "strerror", None) or reason_of(failure))
        reason = " ".join(text.split())[:200]
        raise error(f"{problem} ({reason}): {remedy}") from None


@contextlib.contextmanager
def required_package(package: str, reader: str, remedy: str) -> Iterator[None]:
    """Reports a missing Python package: "reading x.txt needs the Python package p: install it".

    Args:
      package: The name of the package.
      reader: What needs the package: "reading x.txt".
      remedy: How to install the package: "pip install p".

    Raises:
      DataError: An import fails.
    """
    try:
        yield
    except ImportError:
        raise DataError(f"{reader} needs the Python package {package}: {remedy}") from None


def counted(number: int, noun: str) -> str:
    """Returns a count with its noun: "1 file", "3,000 files"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def similar_names(name: str, valid: Sequence[str]) -> list[str]:
    """Returns up to three of `valid` that `name` may be a misspelling of."""
    return difflib.get_close_matches(name, valid, n=3, cutoff=0.4)


def misspelled(name: str, valid: Sequence[str]) -> str | None:
    """Returns the name in `valid` that differs from `name` by a letter or two, if any."""
    # Nearly equal names of another length are often valid names of something else.
    for choice in difflib.get_close_matches(name, valid, n=1, cutoff=0.8):
        if choice != name and abs(len(choice) - len(name)) <= 1:
            return choice
    return None


def suggest(name: str, valid: Sequence[str]) -> str:
    """Returns `valid` as text for an error message, the names most like `name` first."""
    similar = similar_names(name, valid)
    return f"did you mean {' or '.join(similar)}?" if similar else f"choose from {', '.join(valid)}"

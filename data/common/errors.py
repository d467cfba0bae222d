"""Exceptions for input that a user can correct and for failed training steps.

`models`, `data` and `train` all import this file, so it does not import other files of flaxzoo.
"""

import contextlib
import difflib
from collections.abc import Iterator, Sequence
from typing import TypeVar

R = TypeVar("R")


class UserError(ValueError):
    """Invalid input. The message is one line with the problem, the given value and the remedy.

    All errors that a user can cause and correct are subclasses. The command line prints such an
    error as one line. Any other exception is a bug and is shown with its traceback.
    """


class DataError(UserError):
    """A source, a file, an example or a tokenizer cannot be used."""


class RunError(UserError):
    """A run folder cannot be used as requested."""


class NonFiniteLoss(ArithmeticError):
    """The loss is no longer finite."""


class ReportedByPrimary(RunError):
    """Another process failed, and process 0 reports the error."""


class StepNotTaken(Exception):
    """A host function failed in a training step, before the step changed the state of any process.

    The cause (`__cause__`) is the exception that the function raised.
    """


def reason_of(error: BaseException) -> str:
    """Returns the message of an error as one line; if it is empty, the name of the error's type."""
    return " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def reported(
    problem: str, remedy: str, *kinds: type[Exception], error: type[UserError] = DataError
) -> Iterator[None]:
    """Converts the exceptions of a library to one-line errors: "PROBLEM (reason): REMEDY".

    Args:
      problem: The operation that failed, such as "cannot write notes.txt".
      remedy: An instruction for the user, such as "name another file".
      kinds: The exception classes to convert.
      error: The class of the error to raise.

    Raises:
      UserError: The library raised one of these exceptions. The class of the raised error is
        `error`. A `UserError` in the block is raised unchanged.
    """
    try:
        yield
    except UserError:
        raise
    except kinds as failure:
        # Prefer `strerror`, because the text of an OSError repeats the path. A library may set
        # `strerror` to several lines or to a number.
        text = str(getattr(failure, "strerror", None) or reason_of(failure))
        reason = " ".join(text.split())[:200]
        raise error(f"{problem} ({reason}): {remedy}") from None


@contextlib.contextmanager
def required_package(package: str, reader: str, remedy: str) -> Iterator[None]:
    """Reports a missing Python package, as in "reading x.txt needs the Python package p: REMEDY".

    Args:
      package: The name of the package.
      reader: The operation that needs the package, such as "reading x.txt".
      remedy: How to install the package, such as "pip install p".

    Raises:
      DataError: An import in the block fails.
    """
    try:
        yield
    except ImportError:
        raise DataError(f"{reader} needs the Python package {package}: {remedy}") from None


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, such as "1 file" or "3,000 files"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def similar_names(name: str, valid: Sequence[str]) -> list[str]:
    """Returns up to three names in `valid` that are similar to `name`."""
    return difflib.get_close_matches(name, valid, n=3, cutoff=0.4)


def misspelled(name: str, valid: Sequence[str]) -> str | None:
    """Returns a name in `valid` that differs from `name` by a letter or two, or None."""
    # Names whose lengths differ by more than one letter are often valid names of something else.
    for choice in difflib.get_close_matches(name, valid, n=1, cutoff=0.8):
        if choice != name and abs(len(choice) - len(name)) <= 1:
            return choice
    return None


def suggest(name: str, valid: Sequence[str]) -> str:
    """Returns a remedy for an error message: the names similar to `name`, or all of `valid`."""
    similar = similar_names(name, valid)
    return f"did you mean {' or '.join(similar)}?" if similar else f"choose from {', '.join(valid)}"

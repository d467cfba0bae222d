"""Errors: bad input that a user can mend, and failed steps of a run.

`models`, `data` and `train` all import this file; it imports nothing of ours.
"""

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

R = TypeVar("R")


class UserError(ValueError):
    """Bad input: one line that names the thing, the value seen and the remedy.

    Every error that a user can cause and mend derives from this class. The command line prints
    it as one line; any other exception is a bug and keeps its traceback.
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

    The cause is its error.
    """


def counted(number: int, noun: str) -> str:
    """Returns a count with its noun: "1 file", "3,000 files"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def similar_names(name: str, valid: Sequence[str]) -> list[str]:
    """Returns up to three of `valid` that `name` may be a misspelling of."""
    return difflib.get_close_matches(name, valid, n=3, cutoff=0.4)


def misspelled(name: str, valid: Sequence[str]) -> str | None:
    """Returns the one of `valid` that `name` is but for a letter or two, if there is one."""
    for choice in difflib.get_close_matches(name, valid, n=1, cutoff=0.8):
        if choice != name and abs(len(choice) - len(name)) <= 1:
            return choice
    return None


def suggest(name: str, valid: Sequence[str]) -> str:
    """Returns `valid` as text for an error message, the names most like `name` first."""
    similar = similar_names(name, valid)
    return f"did you mean {' or '.join(similar)}?" if similar else f"choose from {', '.join(valid)}"


def check_whole(name: str, value: object) -> None:
    """Checks that a value is an integer of Python or numpy, and neither a bool nor a float.

    Raises:
      UserError: The value is another.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UserError(f"{name} {value!r} must be a whole number")


def check_finite_number(name: str, value: object) -> None:
    """Checks that a value is a finite number of Python or numpy, and not a bool.

    Raises:
      UserError: The value is another.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(float(value)):
        raise UserError(f"{name} {value!r} must be a finite number")


def check_choices(record: object) -> None:
    """Checks the fields of a dataclass whose type is a `Literal`, or that or None.

    Raises:
      UserError: A field has a value that its type does not name.
    """
    for field in dataclasses.fields(record):  # pyright: ignore[reportArgumentType]
        kinds = [field.type, *get_args(field.type)]
        literals = [kind for kind in kinds if get_origin(kind) is Literal]
        choices = [choice for kind in literals for choice in get_args(kind)]
        value = getattr(record, field.name)
        if choices and value is not None and value not in choices:
            raise UserError(
                f"{field.name} {value!r} is unknown: {suggest(str(value), list(map(str, choices)))}"
            )


def check_types(record: object) -> None:
    """Checks the types of a dataclass's fields, whose values may come from a file.

    An integer is also a float, a list also a tuple, and a truth value no number.

    Raises:
      UserError: A field has a value of another type.
    """
    for field in dataclasses.fields(record):  # pyright: ignore[reportArgumentType]
        value = getattr(record, field.name)
        if not _is_of(value, field.type):
            name = getattr(field.type, "__name__", str(field.type))
            raise UserError(f"{field.name} {value!r} is not of type {name}: correct it")


def checked_record(cls: type[R], fields: Mapping[str, Any], prefix: str = "") -> R:
    """Makes a dataclass from what a file gives for its fields.

    Args:
      cls: The dataclass.
      fields: Its fields by name, as JSON has them.
      prefix: What is before the names in messages.

    Raises:
      UserError: A field is unknown or missing, or a value is not of its type or choices.
    """
    known = {field.name: field for field in dataclasses.fields(cls)}  # pyright: ignore
    for name in fields:
        if name not in known:
            raise UserError(f"unknown field {prefix}{name}")
    for name, field in known.items():
        if name not in fields and field.default is field.default_factory is dataclasses.MISSING:
            raise UserError(f"the field {prefix}{name} is missing")
    hints = get_type_hints(cls)
    for name, value in fields.items():
        hint = hints[name]
        literals = [kind for kind in (hint, *get_args(hint)) if get_origin(kind) is Literal]
        choices = [choice for kind in literals for choice in get_args(kind)]
        limit = math.inf if isinstance(value, float) else 2**63
        too_large = isinstance(value, int | float) and not abs(value) < limit  # NaN, too
        unknown = choices and value is not None and value not in choices
        if too_large or unknown or not _is_of(value, hint):
            kind = str(hint) if get_origin(hint) else hint.__name__
            raise UserError(
                f"{prefix}{name} {value!r} must be of the type {kind.replace('typing.', '')}"
            )
    return cls(**fields)


def _is_of(value: object, kind: object) -> bool:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_is_of(value, one) for one in arguments)
    if kind in (None, type(None)):
        return value is None
    if kind in (int, float):
        number = Integral if kind is int else Real
        return isinstance(value, number) and not isinstance(value, bool)
    if origin is tuple:
        items = arguments[:1] if arguments[-1:] == (...,) else arguments
        some = isinstance(value, tuple | list)
        return some and (len(items) != 1 or all(_is_of(x, items[0]) for x in value))
    return not isinstance(kind, type) or isinstance(value, kind)  # else `check_choices` checks it

"""Checks configuration fields that declare their ranges, such as `beta1: Rate = 0.9`.

A dataclass derived from `Checked` checks all fields against their types when an instance is
created. The declared type also determines the error message ("beta1 must be at least 0 and below 1,
got 1.0"), the check of the command-line option, and the line in `--help`. Only relations between
fields need code: `__post_init__` checks them with `require` and `require_default` after calling
`super().__post_init__()`.

There are also functions for values that are not fields: `check_value("steps", steps, PositiveInt)`
checks an argument, and `require_one_of("preset", name, PRESETS)` checks that a name is in a table.
"""

import ast
import contextlib
import dataclasses
import inspect
import itertools
import math
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from pathlib import PurePath
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from .errors import UserError, similar_names

K = TypeVar("K")
R = TypeVar("R")
V = TypeVar("V")


class Rule:
    """An annotation that restricts a type, as in `Annotated[int, Rule()]`.

    The text of a rule describes the values that the rule accepts. This base class accepts all
    values.
    """

    def __contains__(self, value: Any) -> bool:
        return True

    def __str__(self) -> str:
        return ""


@dataclasses.dataclass(frozen=True)
class Range(Rule):
    """The range of numbers that a field accepts, as in `Annotated[float, Range(above=0)]`.

    Attributes:
      least: The inclusive lower bound.
      above: The exclusive lower bound.
      most: The inclusive upper bound.
      below: The exclusive upper bound.
    """

    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    below: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most and self.above < value < self.below

    def __str__(self) -> str:
        bounds = {
            "at least": self.least,
            "above": self.above,
            "at most": self.most,
            "below": self.below,
        }
        stated = (f"{word} {x:,}" for word, x in bounds.items() if math.isfinite(x))
        return " and ".join(stated)


@dataclasses.dataclass(frozen=True)
class Suffix(Rule):
    """The accepted endings of a file name, as in `Annotated[Path, Suffix((".npy", ".png"))]`."""

    endings: tuple[str, ...]

    def __contains__(self, path: PurePath) -> bool:
        return path.suffix in self.endings

    def __str__(self) -> str:
        return f"a file name with the ending {' or '.join(self.endings)}"


Positive = Annotated[float, Range(above=0)]
NonNegative = Annotated[float, Range(least=0)]
Rate = Annotated[float, Range(least=0, below=1)]
Fraction = Annotated[float, Range(least=0, most=1)]
PositiveInt = Annotated[int, Range(least=1)]
NonNegativeInt = Annotated[int, Range(least=0)]
Seed = Annotated[int, Range(least=0, most=2**32 - 1)]


class FieldError(UserError):
    """The value of a field violates its declaration, or conflicts with another field."""

    def __init__(self, field: str, problem: str) -> None:
        """Creates the error.

        Args:
          field: The name of the field.
          problem: The problem, such as "must be positive, got -1".
        """
        super().__init__(field, problem)
        self.field, self.problem = field, problem

    def __str__(self) -> str:
        return f"{self.field} {self.problem}"


class Checked:
    """Base class for dataclasses that check their fields against the declared types.

    Lists (from JSON) are converted to tuples, and numpy numbers to Python numbers.

    Raises:
      FieldError: The value of a field has the wrong type or is out of range.
    """

    def __post_init__(self) -> None:
        """Checks all fields."""
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            value = _plain(getattr(self, field.name))
            # Use `object.__setattr__`, because the dataclass may be frozen.
            object.__setattr__(self, field.name, value)
            check_value(field.name, value, field.type)


def field_names(cls: Any) -> frozenset[str]:
    """Returns the names of the fields of a dataclass or a dataclass instance."""
    return frozenset(field.name for field in dataclasses.fields(cls))


def without_none(values: Mapping[K, V | None]) -> dict[K, V]:
    """Returns the items whose values are not None."""
    return {key: value for key, value in values.items() if value is not None}


def _plain(value: object) -> object:
    """Converts lists to tuples, and numbers of any type to int or float, for JSON."""
    if type(value) in (list, tuple):
        return tuple(map(_plain, value))  # pyright: ignore
    if isinstance(value, int | float):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def check_value(name: str, value: object, hint: object) -> None:
    """Checks a value against a type with a range, as in `check_value("steps", 0, PositiveInt)`.

    Raises:
      FieldError: The value has the wrong type or is out of range.
    """
    if expected := expectation(value, hint):
        shown = repr(value)
        # Shorten a long value, because it would obscure the message.
        shown = shown if len(shown) <= 100 else f"{shown[:100]}…"
        raise FieldError(name, f"must be {expected}, got {shown}")


def expectation(value: Any, hint: object) -> str:
    """Returns the requirement that a value violates, such as "above 0"; "" if it is valid.

    An integer is accepted as a float, and a list is accepted as a tuple. A Boolean is not accepted
    as a number. For a class without rules in this file, the value must be an instance; all other
    types accept every value.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        missed = (str(rule) for rule in arguments[1:] if value not in rule)
        return expectation(value, arguments[0]) or next(missed, "")
    # A union accepts every value that one of its types accepts.
    if origin in (Union, UnionType):
        expected = [expectation(value, one) for one in arguments]
        return " or ".join(expected) if all(expected) else ""
    if origin is Literal:
        return "" if value in arguments else f"one of {', '.join(map(str, arguments))}"
    if origin in _CONTAINERS:
        return _expected_items(value, origin, arguments)
    if hint in _SCALARS:
        return next((name for name, accepts in _SCALARS[hint] if not accepts(value)), "")
    return hint.__name__ if isinstance(hint, type) and not isinstance(value, hint) else ""


def _expected_items(value: Any, origin: object, arguments: tuple[object, ...]) -> str:
    noun, kind = _CONTAINERS[origin]
    if not isinstance(value, kind):
        return noun
    # Mapping[str, int], tuple[int, ...] and Sequence[int] declare one type for all of their values.
    items, hint = (value.values(), arguments[-1]) if kind is Mapping else (value, arguments[0])
    has_one = kind is Mapping or arguments[1:] in ((), (...,))
    missed = filter(None, map(expectation, items, itertools.repeat(hint) if has_one else arguments))
    return next((f"{noun} of values that are {expected}" for expected in missed), "")


def _is_number(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind) and not isinstance(value, bool)


_CONTAINERS: dict[object, tuple[str, Any]] = {
    tuple: ("a tuple", tuple | list),
    Sequence: ("a tuple", tuple | list),
    Mapping: ("an object", Mapping),
}
"""Maps a type to its description in error messages and to the classes that it accepts."""

_SCALARS: dict[object, list[tuple[str, Callable[[Any], bool]]]] = {
    int: [
        ("a whole number", _is_number(Integral)),
        ("below 2⁶³", lambda value: -(2**63) <= value < 2**63),
    ],
    float: [
        ("a number", _is_number(Real)),
        ("finite", lambda value: abs(value) <= sys.float_info.max),  # false for NaN too
    ],
    bool: [("True or False", lambda value: isinstance(value, bool))],
    str: [("text", lambda value: isinstance(value, str))],
    NoneType: [("None", lambda value: value is None)],
    Any: [],
    object: [],
}
"""Maps a type to its tests in order. Each test has a description for error messages."""


def require(condition: object, message: str, error: type[UserError] = UserError) -> None:
    """Raises an error with a message if a condition does not hold.

    Raises:
      UserError: The condition does not hold. The class of the raised error is `error`.
    """
    if not condition:
        raise error(message)


def require_value(value: V | None, message: str, error: type[UserError] = UserError) -> V:
    """Checks that a value is not None, and returns it.

    Raises:
      UserError: The value is None. The class of the raised error is `error`.
    """
    require(value is not None, message, error)
    return cast(V, value)


def require_type(
    value: object, kind: type[V], message: str, error: type[UserError] = UserError
) -> V:
    """Checks that a value is an instance of a class, and returns it.

    Raises:
      UserError: The value is not an instance of the class. The class of the raised error is
        `error`.
    """
    require(isinstance(value, kind), message, error)
    return cast(V, value)


def require_one_of(
    name: str, value: object, choices: Iterable[object], *, error: type[UserError] = UserError
) -> None:
    """Checks that a value is one of the given choices.

    For example, `require_one_of("preset", preset, PRESETS)` checks the name of a preset. If there
    are more than a dozen choices and some are similar to the value, the message shows only these.

    Args:
      name: The setting as the user knows it, such as "--preset" or "FILE: role".
      value: The value.
      choices: The valid values, for example a tuple or the keys of a table.
      error: The class of the error to raise.

    Raises:
      UserError: The value is not a choice, for example "role must be one of user, system, got
        'usr': did you mean user?". The class of the raised error is `error`.
    """
    # Compare with a list, because a value from a file may not be hashable.
    known = list(choices)
    if value in known:
        return
    names = list(map(str, known))
    similar = similar_names(str(value), names)
    listed = f"{len(names)} names" if similar and len(names) > 12 else ", ".join(names)
    remedy = f": did you mean {' or '.join(similar)}?" if similar else ""
    raise error(f"{name} must be one of {listed}, got {value!r}{remedy}")


def require_default(record: object, names: Iterable[str], problem: str) -> None:
    """Checks that fields without effect have their default values.

    Args:
      record: The dataclass instance.
      names: The names of the fields.
      problem: The reason why the fields have no effect, such as "requires grpo, got ppo".

    Raises:
      FieldError: A field does not have its default value.
    """
    for name in names:
        value = getattr(record, name)
        if value != type(record).__dataclass_fields__[name].default:  # pyright: ignore
            raise FieldError(name, f"{value!r} {problem}: leave it out")


def make_record(cls: type[R], fields: Mapping[str, object], prefix: str = "") -> R:
    """Creates a dataclass instance from the fields in a file.

    Args:
      cls: The dataclass, which derives from `Checked`.
      fields: The values of the fields by name, as in JSON; a nested dataclass is an object.
      prefix: The text that messages put before the names, such as "optimizer.".

    Raises:
      UserError: A field is unknown or missing, or a value has the wrong type or is out of range.
    """
    known = {field.name: field for field in dataclasses.fields(cls)}  # pyright: ignore
    # Report unknown fields first, because a misspelled field is also missing.
    unknown = sorted(fields.keys() - known)
    require(not unknown, f"unknown field {prefix}{', '.join(unknown)}")
    for name, field in known.items():
        # If a field has no default, both attributes are MISSING.
        has_default = field.default is not field.default_factory
        require(has_default or name in fields, f"the field {prefix}{name} is missing")
    values: dict[str, object] = {}
    for name, value in fields.items():
        hint = known[name].type
        kind = next(filter(dataclasses.is_dataclass, (hint, *get_args(hint))), None)
        # A nested dataclass reports its fields with their full names.
        if isinstance(kind, type) and isinstance(value, Mapping):
            value = make_record(kind, value, f"{prefix}{name}.")
        values[name] = _plain(value)
        check_value(prefix + name, values[name], hint)
    with named_below(prefix):
        return cls(**values)


@contextlib.contextmanager
def named_below(prefix: str) -> Iterator[None]:
    """Puts a prefix before the field name in errors, such as `optimizer.` before `beta1`."""
    try:
        yield
    except FieldError as error:
        raise FieldError(prefix + error.field, error.problem) from None


@dataclasses.dataclass(frozen=True)
class Description:
    """A description of a field for help texts and reference pages.

    Attributes:
      name: The name of the field; a field of a nested configuration has a dot, as in
        `optimizer.beta1`.
      hint: The type of the field.
      default: The value of the field in the described configuration.
      range: The range that the field accepts, such as "at least 0 and below 1"; "" if it has no
        range.
      text: The docstring below the field, as one line.
    """

    name: str
    hint: object
    default: object
    range: str
    text: str


def describe(
    record: object,
    prefix: str = "",
    *,
    nested: Mapping[str, Callable[[], object]] = {},
    with_text: bool = True,
) -> Iterator[Description]:
    """Describes each field of a configuration, including nested configurations.

    Args:
      record: A dataclass instance.
      prefix: The text before the names of the fields.
      nested: Maps the name of a field that is None to a function that creates the configuration to
          describe instead.
      with_text: Whether to read the docstrings from the source code, which takes time.
    """
    # Resolve annotations that are strings, and keep their ranges.
    hints = get_type_hints(type(record), include_extras=True)
    docs = field_docs(type(record)) if with_text else {}
    for field in dataclasses.fields(record):  # pyright: ignore[reportArgumentType]
        value, name = getattr(record, field.name), prefix + field.name
        if value is None and name in nested:
            value = nested[name]()
        if dataclasses.is_dataclass(value):
            yield from describe(value, f"{name}.", nested=nested, with_text=with_text)
        else:
            hint, text = hints[field.name], docs.get(field.name, "")
            yield Description(name, hint, value, range_of(hint), text)


def range_of(hint: object) -> str:
    """Returns the range of a type as text, such as "above 0"; "" if it has no range."""
    if get_origin(hint) is Annotated:
        return ", ".join(filter(None, map(str, get_args(hint)[1:])))
    # A union or a tuple has the ranges of all types in it.
    return ", ".join(filter(None, map(range_of, get_args(hint))))


def field_docs(cls: type) -> dict[str, str]:
    """Returns the docstrings of the fields of a dataclass and its bases, each as one line."""
    docs = {}
    for base in filter(dataclasses.is_dataclass, reversed(cls.__mro__)):
        # Python discards these docstrings, so read them from the source code.
        module = ast.parse(textwrap.dedent(inspect.getsource(base)))  # pyright: ignore
        definition = cast(ast.ClassDef, module.body[0])
        for field, following in itertools.pairwise(definition.body):
            match field, following:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    docs[name] = " ".join(text.split())
    return docs

"""Configuration fields that declare their range: `beta1: Rate = 0.9`.

A dataclass that derives from `Checked` checks every field against its type when it is made. The
same declaration determines the error message ("beta1 must be at least 0 and below 1, got 1.0"), the
check of the command-line option, and the line of `--help`. Only relations between fields need code,
in `__post_init__` after `super().__post_init__()`; `require` and `require_default` check relations.

For values that are not fields, `check_value("steps", steps, PositiveInt)` checks an argument, and
`require_one_of("preset", name, PRESETS)` checks a name that must be in a table.
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
    """An annotation of a type, `Annotated[int, Rule()]`; by default it accepts every value.

    The text of a rule says what a value must be.
    """

    def __contains__(self, value: Any) -> bool:
        return True

    def __str__(self) -> str:
        return ""


@dataclasses.dataclass(frozen=True)
class Range(Rule):
    """The numbers that a field accepts: an annotation, `Annotated[float, Range(above=0)]`.

    Attributes:
      least: Inclusive lower bound.
      above: Exclusive lower bound.
      most: Inclusive upper bound.
      below: Exclusive upper bound.
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
    """The endings of a file's name: an annotation, `Annotated[Path, Suffix((".npy", ".png"))]`."""

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
    """A field has a value that its declaration, or the value of another field, does not allow."""

    def __init__(self, field: str, problem: str) -> None:
        """Creates the error.

        Args:
          field: The name of the field.
          problem: What is wrong: "must be positive, got -1".
        """
        super().__init__(field, problem)
        self.field, self.problem = field, problem

    def __str__(self) -> str:
        return f"{self.field} {self.problem}"


class Checked:
    """Base class of dataclasses whose fields are checked against their types.

    Lists, as in JSON, become tuples, and numbers of numpy become numbers of Python.

    Raises:
      FieldError: A field has a value of another type, or out of its range.
    """

    def __post_init__(self) -> None:
        """Checks all fields."""
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            value = _plain(getattr(self, field.name))
            # The dataclass may be frozen.
            object.__setattr__(self, field.name, value)
            check_value(field.name, value, field.type)


def field_names(cls: Any) -> frozenset[str]:
    """Returns the names of the fields of a dataclass or of an instance of one."""
    return frozenset(field.name for field in dataclasses.fields(cls))


def without_none(values: Mapping[K, V | None]) -> dict[K, V]:
    """Returns the items whose value is not None."""
    return {key: value for key, value in values.items() if value is not None}


def _plain(value: object) -> object:
    """Returns a list as a tuple, and a number of any kind as an int or a float, for JSON."""
    if type(value) in (list, tuple):
        return tuple(map(_plain, value))  # pyright: ignore
    if isinstance(value, int | float):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def check_value(name: str, value: object, hint: object) -> None:
    """Checks a value against a type and its range: `check_value("steps", 0, PositiveInt)`.

    Raises:
      FieldError: The value is of another type, or out of the range.
    """
    if expected := expectation(value, hint):
        shown = repr(value)
        # A long value would hide the message.
        shown = shown if len(shown) <= 100 else f"{shown[:100]}…"
        raise FieldError(name, f"must be {expected}, got {shown}")


def expectation(value: Any, hint: object) -> str:
    """Returns what a value of a type must be: "above 0", "a whole number"; "" if it is valid.

    An integer is accepted as a float, and a list as a tuple; a Boolean is not a number. A type that
    this file does not know accepts every value.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        missed = (str(rule) for rule in arguments[1:] if value not in rule)
        return expectation(value, arguments[0]) or next(missed, "")
    # A union accepts a value that one of its types accepts.
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
    # Mapping[str, int], tuple[int, ...] and Sequence[int] declare one type for all their values.
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
"""Type → what an error says that the value must be, and the classes that are accepted."""

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
"""Type → the tests of a value in order, each with what an error says that the value must be."""


def require(condition: object, message: str, error: type[UserError] = UserError) -> None:
    """Checks a relation between fields or arguments.

    Raises:
      UserError: The condition does not hold; raised as `error`, with the message.
    """
    if not condition:
        raise error(message)


def require_value(value: V | None, message: str, error: type[UserError] = UserError) -> V:
    """Returns a value after checking that it is not None.

    Raises:
      UserError: The value is None; raised as `error`, with the message.
    """
    require(value is not None, message, error)
    return cast(V, value)


def require_type(
    value: object, kind: type[V], message: str, error: type[UserError] = UserError
) -> V:
    """Returns a value after checking that it is an instance of a class.

    Raises:
      UserError: The value is an instance of another class; raised as `error`, with the message.
    """
    require(isinstance(value, kind), message, error)
    return cast(V, value)


def require_one_of(
    name: str, value: object, choices: Iterable[object], *, error: type[UserError] = UserError
) -> None:
    """Checks that a value is one of the choices: `require_one_of("preset", preset, PRESETS)`.

    If there are more than a dozen choices, the message shows only choices that are similar to the
    value.

    Args:
      name: The setting, as the user writes it: "--preset", "FILE: role".
      value: The value.
      choices: The valid values, such as a tuple or the keys of a table.
      error: The exception to raise.

    Raises:
      UserError: "role must be one of user, system, got 'usr': did you mean user?", as `error`.
    """
    # Use a list, because a value from a file need not be hashable.
    known = list(choices)
    if value in known:
        return
    names = list(map(str, known))
    similar = similar_names(str(value), names)
    listed = f"{len(names)} names" if similar and len(names) > 12 else ", ".join(names)
    remedy = f": did you mean {' or '.join(similar)}?" if similar else ""
    raise error(f"{name} must be one of {listed}, got {value!r}{remedy}")


def require_default(record: object, names: Iterable[str], problem: str) -> None:
    """Checks that fields which have no effect are at their defaults.

    Args:
      record: The dataclass.
      names: The fields.
      problem: Why the fields have no effect: "requires grpo, got ppo".

    Raises:
      FieldError: A field has another value.
    """
    for name in names:
        value = getattr(record, name)
        if value != type(record).__dataclass_fields__[name].default:  # pyright: ignore
            raise FieldError(name, f"{value!r} {problem}: leave it out")


def make_record(cls: type[R], fields: Mapping[str, object], prefix: str = "") -> R:
    """Makes a dataclass from the fields in a file.

    Args:
      cls: The dataclass, which derives from `Checked`.
      fields: Its fields by name, as in JSON; a nested dataclass is an object.
      prefix: The text before the names in messages: "optimizer.".

    Raises:
      UserError: A field is unknown or missing, or a value is not of its type or range.
    """
    known = {field.name: field for field in dataclasses.fields(cls)}  # pyright: ignore
    # Report unknown fields first, because a misspelled field is also a missing field.
    unknown = sorted(fields.keys() - known)
    require(not unknown, f"unknown field {prefix}{', '.join(unknown)}")
    for name, field in known.items():
        # If the field has no default, both attributes are MISSING.
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
    """Puts a prefix before the field that an error names: `optimizer.` before `beta1`."""
    try:
        yield
    except FieldError as error:
        raise FieldError(prefix + error.field, error.problem) from None


@dataclasses.dataclass(frozen=True)
class Description:
    """The description of a field for readers.

    Attributes:
      name: The field, in a nested configuration with a dot: `optimizer.beta1`.
      hint: The type of the field.
      default: The value of the field in the configuration that is described.
      range: The numbers that the field accepts: "at least 0 and below 1"; "" if it has no range.
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
    """Describes each field of a configuration and of its nested configurations.

    Args:
      record: A dataclass instance.
      prefix: The text to put before the names of the fields.
      nested: Name of a field that is None → function that makes a configuration to describe
          instead.
      with_text: Whether to read the docstrings from the source code, which takes time.
    """
    # Annotations may be strings; resolve them and keep their ranges.
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
    """Returns the range that a type declares, as text: "above 0"; "" if it declares none."""
    if get_origin(hint) is Annotated:
        return ", ".join(filter(None, map(str, get_args(hint)[1:])))
    # A union or a tuple shows the ranges of the types that it is made of.
    return ", ".join(filter(None, map(range_of, get_args(hint))))


def field_docs(cls: type) -> dict[str, str]:
    """Returns the docstrings below the fields of a dataclass and of its bases, each as one line."""
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

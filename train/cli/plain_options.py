"""A run's options read with nothing but Python's own library.

The other commands read theirs with tyro, which a bare image of a GPU machine has not; the
options are the same.
"""

import argparse
import dataclasses
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from ...data.errors import UserError, similar_names


class OptionParser(argparse.ArgumentParser):
    """Says in one line what is wrong, as ValueError."""

    def read(self, arguments: list[str]) -> argparse.Namespace:
        """All arguments.

        Raises:
          UserError: an option is unknown (the message names the nearest) or has no such value.
        """
        parsed, unknown = self.parse_known_args(arguments)
        if unknown:
            name = unknown[0].partition("=")[0]
            known = [flag for action in self._actions for flag in action.option_strings]
            near = similar_names(name, known) if name.startswith("-") else []
            meant = f": did you mean {' or '.join(near)}?" if near else ""
            self.error(f"nothing is called {name}{meant}")
        return parsed

    def error(self, message: str) -> NoReturn:
        """Raises ValueError."""
        raise UserError(f"{message} (all options: {self.prog} --help)")


def add_options(parser: argparse.ArgumentParser, config: Any) -> None:
    """An option for each field of a configuration, those within it as `--model.num-layers`."""
    for name, value, hint in _fields(config):
        _add(parser, name, hint, f"{_choices(hint)}by default {value}".replace("%", "%%"))


def with_options(config: Any, parsed: argparse.Namespace, prefix: str = "") -> Any:
    """The configuration with what was given in place of its own.

    Raises:
      UserError: a value is out of its range.
    """
    given = {}
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            given[field.name] = with_options(value, parsed, f"{name}.")
        elif hasattr(parsed, name):
            read = getattr(parsed, name)
            given[field.name] = tuple(read) if isinstance(read, list) else read
    return dataclasses.replace(config, **given)


def _fields(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Name, value and type of each field that is no configuration itself."""
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            yield from _fields(value, f"{name}.")
        else:
            yield name, value, hints[field.name]


def _add(parser: argparse.ArgumentParser, name: str, hint: Any, help: str) -> None:
    parent, dot, own = name.replace("_", "-").rpartition(".")
    flag = f"--{parent}{dot}{own}"
    common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
    if hint is bool:
        parser.add_argument(flag, action="store_true", help=help, **common)
        parser.add_argument(f"--{parent}{dot}no-{own}", action="store_false", **common)
        return
    if get_origin(hint) in (tuple, Sequence):
        common |= {"nargs": "*", "type": get_args(hint)[0]}
    else:
        common |= {"type": _reader(hint)}
    parser.add_argument(flag, help=help, metavar=own.upper(), **common)


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _choices(hint: Any) -> str:
    words = [
        word for kind in _kinds(hint) if get_origin(kind) is Literal for word in get_args(kind)
    ]
    return f"{' | '.join(words)}; " if words else ""


def _reader(hint: Any) -> Callable[[str], Any]:
    """What makes a value of a type out of a word; None is written so."""
    kinds = _kinds(hint)
    kind = next(k for k in kinds if k is not type(None))

    def read(word: str) -> Any:
        if word == "None" and type(None) in kinds:
            return None
        if get_origin(kind) is not Literal:
            return kind(word)
        if word not in get_args(kind):
            raise argparse.ArgumentTypeError(f"{word!r}: choose from {', '.join(get_args(kind))}")
        return word

    read.__name__ = getattr(kind, "__name__", "value")  # argparse: "invalid int value"
    return read

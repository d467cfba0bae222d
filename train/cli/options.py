"""Reads the options of every command: each field of a dataclass is an option of argparse.

Every error is a one-line `UserError` that names the option, the value and the remedy. This file
imports only the standard library, because `flaxzoo bench` runs on machines that have only jax,
flax and optax, and because help should appear without delay.
"""

import argparse
import contextlib
import dataclasses
import inspect
import itertools
import re
import shutil
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import (
    Annotated,
    Any,
    NoReturn,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from ...data.common.errors import UserError
from ...data.common.fields import Rule, expectation, field_docs, range_of, require
from ..settings.familiar_names import flag_of, remedy_for

Options = TypeVar("Options")


@dataclasses.dataclass(frozen=True)
class Positional(Rule):
    """Marks a field as a positional argument: `Annotated[str, Positional(…)]`.

    Attributes:
        name: the name of the argument in the help.
    """

    name: str


RunName = Annotated[str, Positional("RUN")]
RunFolder = Annotated[Path, Positional("RUN")]
SourceName = Annotated[str, Positional("SOURCE")]
OutputPath = Annotated[Path, Positional("OUTPUT")]

_flags: dict[str, str] = {}
"""Maps each field name to the option of the current command, to rewrite messages that name a field.
"""


def log(line: str) -> None:
    """Prints a message to standard error, with options as the user writes them.

    Standard output is for results.
    """
    print(with_flags(line), file=sys.stderr)


def read_line(prompt: str) -> str:
    """Reads a line of standard input; shows the prompt only at a terminal.

    Raises:
        EOFError: the input has ended.
    """
    return input(prompt if sys.stdin.isatty() else "")


def is_given(options: Any, name: str) -> bool:
    """Returns whether the value of an option from `parse` differs from the option's default."""
    return getattr(options, name) != type(options).__dataclass_fields__[name].default


def check_applies(options: object, name: str, to: str) -> None:
    """Checks that an option is given only together with the option that it applies to.

    Raises:
        UserError: the option is given alone.
    """
    require(
        is_given(options, to) or not is_given(options, name),
        f"{flag_of(name)} {getattr(options, name)!r} applies to {flag_of(to)}: give both, or leave "
        f"{flag_of(name)} out",
    )


def check_one_given(options: object, *names: str, least: int = 1) -> None:
    """Checks that exactly one of the options is given, or at most one if `least` is 0.

    Raises:
        UserError: too many or too few of the options are given.
    """
    flags = list(map(flag_of, names))
    number = sum(is_given(options, name) for name in names)
    require(number <= 1, f"{' and '.join(flags)} are both given: leave one of them out")
    require(number >= least, f"neither {' nor '.join(flags)} is given: give one of them")


def asks_for_help(arguments: list[str]) -> bool:
    """Returns whether a command is called without arguments or with `--help` first."""
    return arguments[:1] in ([], ["-h"], ["--help"])


def split_at_dashes(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Returns the arguments before `--`, and the arguments after `--`."""
    before = list(itertools.takewhile("--".__ne__, arguments))
    return before, arguments[len(before) + 1 :]


def parse(
    cls: type[Options], arguments: list[str], command: str, *, renamed: Mapping[str, str] = {}
) -> Options:
    """Reads the options of a command.

    Args:
        cls: a dataclass whose fields are the options. The docstring of the class describes the
          command, and the docstrings of the fields describe the options.
        arguments: the user's arguments after the name of the command.
        command: the command, for messages: "flaxzoo generate".
        renamed: maps field names in messages of the library to options whose names differ.

    Raises:
        UserError: an option or a value is invalid or missing.
    """
    hints = get_type_hints(cls, include_extras=True)
    helping = not {"-h", "--help"}.isdisjoint(arguments)
    # Field docstrings are read from the source code, which is slow; only help needs them.
    docs = field_docs(cls) if helping else {}
    parser = OptionParser(command, (inspect.getdoc(cls) or "").strip())
    parser.add_help_option()
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    declared = vars(cls).get("__annotations__", {})

    def order(field: dataclasses.Field[object]) -> tuple[bool, bool]:
        """Puts required options first, then the options that the class itself declares."""
        optional = field.default is not dataclasses.MISSING
        return optional, optional and field.name not in declared

    words = [command]
    for field in sorted(fields, key=order):
        # Do not show empty and false defaults, because the help text describes what happens without
        # the option.
        default = None if str(field.default) in ("", "()", "False") else field.default
        text = docs.get(field.name, "")
        # The type of the field determines how an argument is parsed and checked.
        action = add_option(parser, field.name, hints[field.name], text, default=default)
        if action.required:
            words.append(" ".join([*action.option_strings[:1], str(action.metavar)]))
    parser.usage = " ".join([*words, "[options]"])
    # Options that are not given are absent, so that the defaults of `cls` apply.
    given = vars(parser.read(arguments))
    _flags.update(renamed)
    return cls(**given)


class OptionParser(argparse.ArgumentParser):
    """A parser that reports every error as a one-line `UserError`."""

    def __init__(self, command: str, description: str, usage: str | None = None) -> None:
        """Creates a parser without options.

        Args:
            command: the command, for messages: "flaxzoo generate".
            description: the description in the help.
            usage: the usage line of the help.
        """
        super().__init__(
            prog=command,
            usage=usage,
            description=description,
            formatter_class=HelpFormatter,
            allow_abbrev=False,
            exit_on_error=False,
            add_help=False,
        )

    def add_help_option(self) -> None:
        """Adds `--help`."""
        self.add_argument("-h", "--help", action="help", help="Show this help.")

    def peek(self, arguments: Iterable[str]) -> dict[str, Any]:
        """Returns the values of this parser's options, and ignores all other options.

        Raises:
            UserError: an option has no value.
        """
        return vars(self._parsed([_with_hyphens(x, self._flags) for x in arguments])[0])

    def read(self, arguments: Iterable[str]) -> argparse.Namespace:
        """Returns the values of the given options.

        Raises:
            UserError: an option is unknown (the message names the closest match), a value is
              invalid, or a required option is missing.
        """
        # Check the names first: argparse would take an unknown option's value as positional.
        known = self._flags
        words = [_with_hyphens(word, known) for word in arguments]
        for word in itertools.takewhile("--".__ne__, words):
            name = word.partition("=")[0]
            if _looks_like_option(word) and name not in known:
                self.error(f"unknown option {name}{remedy_for(name, known)}")
        parsed, unexpected = self._parsed(words)
        if unexpected:
            self.error(
                f"unexpected argument {unexpected[0]!r}: write its option before it, and quote "
                "a value that has spaces"
            )
        # Errors of the library name fields; `with_flags` replaces them with these options.
        _flags.clear()
        # A switch has two options (`--x` and `--no-x`). In reverse order, the first replaces the
        # second.
        options = reversed(self._option_string_actions.items())
        _flags.update((action.dest, flag) for flag, action in options)
        return parsed

    def _parse_optional(self, arg_string: str) -> Any:
        """Reads words such as `---` as values; argparse would read them as unknown options."""
        name = arg_string.partition("=")[0]
        return super()._parse_optional(arg_string) if _looks_like_option(name) else None

    @property
    def _flags(self) -> list[str]:
        return list(self._option_string_actions)

    def _parsed(self, words: list[str]) -> tuple[argparse.Namespace, list[str]]:
        """Returns the values of known options, and all other words."""
        try:
            return self.parse_known_args(words)
        except argparse.ArgumentError as error:
            self.error(_complaint(error))

    def error(self, message: str) -> NoReturn:
        """Raises UserError instead of ending the process."""
        if message.startswith("the following arguments are required: "):
            missing = message.partition(": ")[2].replace(", ", " and ")
            message = f"{self.prog.removeprefix('flaxzoo ')} needs {missing}"
        raise UserError(f"{message} (see {self.prog} --help)")


def with_flags(message: str) -> str:
    """Returns a message of the library with field names replaced by this command's options.

    `data.tokenizer.vocab_size 9` becomes `--data.tokenizer.vocab-size 9`, and `data.shuffle False`
    becomes `--data.no-shuffle`. A field name that is a single word may also be an ordinary word. It
    is therefore replaced only at the start of a message that says what the value must be.
    """
    # Do not match inside paths, quotes or longer names.
    word = r"(?<![\w./'\"`-])([a-z]\w*(?:[._]\w+)+)(?![\w/'\"`-]|\.\w)"
    message = re.sub(word, lambda match: _option_named(match[1]), message)
    start = r"^((?:\w+: )?)([a-z]+)(?= (?:\S+ )?must )"
    message = re.sub(start, lambda match: match[1] + _flags.get(match[2], match[2]), message)
    # Write booleans as switches: `--x False` becomes `--no-x`, `--x True` becomes `--x`.
    message = re.sub(r"(--(?:[\w-]+\.)*)([\w-]+) False\b", r"\1no-\2", message)
    return re.sub(r"(--[\w.-]+) True\b", r"\1", message)


def forget_flags() -> None:
    """Clears the options of a command, so that later messages of this process name fields."""
    _flags.clear()


def _option_named(name: str) -> str:
    """Returns the option that sets a field, or the name itself if no or several options fit.

    `data.tokenizer.path` is also known as `tokenizer.path`, and `model.d_model` as `d_model`.
    """
    similar = {flag for field, flag in _flags.items() if field.endswith(f".{name}")}
    return _flags.get(name) or (similar.pop() if len(similar) == 1 else name)


def _looks_like_option(word: str) -> bool:
    return re.fullmatch(r"--?[A-Za-z][^ ]*", word) is not None


def _complaint(error: argparse.ArgumentError) -> str:
    """Rewrites argparse's message in the style of this file."""
    name, message = (error.argument_name or "").partition("/")[0], error.message
    if message.startswith("expected"):
        return f"{name} has no value: add a value"
    if message.startswith("ignored explicit argument"):
        return f"{name} takes no value: leave {message.split()[-1]} out"
    return f"{name} {message}".strip()


def _with_hyphens(argument: str, known: Sequence[str]) -> str:
    """Returns `--model.num_layers=2` as `--model.num-layers=2`, and other arguments unchanged."""
    name, equals, value = argument.partition("=")
    hyphenated = name.replace("_", "-")
    return f"{hyphenated}{equals}{value}" if hyphenated in known else argument


def line_length() -> int:
    """Returns the columns of the terminal; at least 40 and at most 100, which read well."""
    return max(40, min(shutil.get_terminal_size().columns, 100))


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps lines at 98 columns or fewer, but never within names such as `tfds:a/de-en`."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=line_length() - 2)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        # Join the lines of a paragraph, but keep the breaks after a period or a colon.
        paragraphs = re.sub(r"(?<![.:\n])\n(?=\S)", " ", text).splitlines()
        filled = (textwrap.fill(line, width, break_on_hyphens=False) for line in paragraphs)
        return textwrap.indent("\n".join(filled), indent)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


class _Switch(argparse.Action):
    """Stores True if the first of its two option strings is used, and otherwise False."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, option_string == self.option_strings[0])


class _Tuple(argparse.Action):
    """Stores the values of an option that takes several values as a tuple."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, tuple(values))


def add_option(
    group: argparse._ActionsContainer,
    name: str,
    hint: Any,
    help_text: str,
    *,
    default: object = dataclasses.MISSING,
) -> argparse.Action:
    """Adds the option that sets a field.

    Args:
        group: a parser or an option group.
        name: the field, with dots for nested fields: `model.num_layers`.
        hint: the type of the field, with its range.
        help_text: the text for `--help`, which appends the range and the default value.
        default: the value to show in the help. If MISSING, the option is required. The parser
          stores only the given options.
    """
    # argparse formats help texts with `%`, so escape it.
    text = _with_notes(help_text, hint, default).replace("%", "%%")
    flag = flag_of(name)
    if hint in (bool, bool | None):
        parent, dot, last = flag.removeprefix("--").rpartition(".")
        return group.add_argument(
            flag,
            f"--{parent}{dot}no-{last}",
            action=_Switch,
            nargs=0,
            dest=name,
            default=argparse.SUPPRESS,
            help=text,
        )
    # Any other option takes one word, or several for a tuple.
    item, several = _hint_of_word(hint)
    kind = _plain(item)
    # Positional arguments need no `required`, because argparse always requires them.
    marks = [mark for mark in get_args(hint) if isinstance(mark, Positional)]
    words: dict[str, Any] = {"nargs": "+" if marks else "*", "action": _Tuple} if several else {}
    if marks:
        return group.add_argument(
            name, type=reader(item), metavar=marks[0].name, help=text, **words
        )
    return group.add_argument(
        flag,
        **words,
        type=reader(item),
        metavar=_METAVARS.get(kind, f"{{{','.join(get_args(kind))}}}"),
        dest=name,
        default=argparse.SUPPRESS,
        required=default is dataclasses.MISSING,
        help=text,
    )


def _with_notes(text: str, hint: object, default: object) -> str:
    """Returns a help text followed by the field's range and default value."""
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
    has_default = shown not in (dataclasses.MISSING, None)
    notes = [range_of(hint), f"default: {'none' if shown == '' else shown}" * has_default]
    joined = "; ".join(filter(None, notes))
    return f"{text} ({joined})" if joined else text


_METAVARS = {str: "TEXT", int: "INT", float: "NUMBER", Path: "PATH"}
"""Maps a type to the placeholder for its values in the help. The help lists the values of a
`Literal` instead."""


def _hint_of_word(hint: Any) -> tuple[Any, bool]:
    """Returns the type of a single value of an option, and whether it takes several values."""
    for kind in (hint, *get_args(hint)):
        if get_origin(kind) in (tuple, Sequence):
            return get_args(kind)[0], True
    return hint, False


def _plain(hint: Any) -> Any:
    """Returns a type without its range annotation and without None."""
    if get_origin(hint) in (Annotated, Union, types.UnionType):
        return _plain(next(kind for kind in get_args(hint) if kind is not type(None)))
    return hint


def reader(hint: Any) -> Callable[[str], Any]:
    """Returns a function that converts a word to a type and checks its range.

    The word `None` is converted to None if the type allows None.
    """
    kind = _plain(hint)
    convert = {int: int, float: float, Path: Path}.get(kind, str)

    def read(word: str) -> Any:
        if word == "None" and not expectation(None, hint):
            return None
        value = word
        # If the conversion fails, the word stays a string, which the check below rejects.
        with contextlib.suppress(ValueError):
            value = convert(word)
        if expected := expectation(value, hint):
            shown = repr(word) if value == word else word
            expected = expected.removesuffix(" or None")
            raise argparse.ArgumentTypeError(f"must be {expected}, got {shown}")
        return value

    return read

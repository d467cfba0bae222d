"""Reads the options of `flaxzoo train`, `plan` and `bench`: a recipe's configuration.

Every field of the configuration is an option, a nested one as `--model.num-layers`. This file
needs only the standard library, because `flaxzoo bench` runs on machines that have jax, flax and
optax and no other package. The help lists the options in titled groups; tyro, which reads the
options of all other commands, cannot group the fields of one class.
"""

import argparse
import ast
import dataclasses
import inspect
import itertools
import textwrap
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from ...data.errors import UserError, similar_names
from ..config import TrainConfig
from ..recipes import RECIPES, recipe

Config = TypeVar("Config")

GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "run": (
        "How long to train, on batches of what size, and from which parameters.",
        (
            *("steps", "epochs", "batch_size", "micro_batches", "seed"),
            *("init_from", "init_step", "label_smoothing"),
        ),
    ),
    "data": ("The examples to train and validate on.", ("data.",)),
    "tokenizer": ("The vocabulary: an existing one, or one to train.", ("data.tokenizer.",)),
    "model": ("Sizes and variants of the model.", ("model.",)),
    "optimizer": ("The update rule and the learning rate.", ("optimizer.",)),
    "devices": (
        "Placement on the devices, precision, and memory.",
        ("mesh.", "execution.", "parallel"),
    ),
    "checkpoints and evaluation": (
        "When to save and to validate, and what to keep.",
        (
            *("evaluate_every", "checkpoint_every", "keep_last", "keep_best"),
            *("sample_prompt", "skip_bad_steps"),
        ),
    ),
    "logging": ("Metrics during the run.", ("log_every", "wandb_project")),
}
"""The groups of the help in their order: a description, and the fields. A name that ends in a dot
stands for all fields below it that no other group names."""


class RecipeParser(argparse.ArgumentParser):
    """Parses the options of a command that takes a recipe.

    The command's own options are added with `add_argument`. They come first in the help.

    Attributes:
      groups: the titled groups of the help.
    """

    def __init__(
        self, command: str, arguments: Sequence[str], description: str | None = None
    ) -> None:
        """Creates a parser with the options of a recipe.

        Args:
          command: `train`, `plan` or `bench`.
          arguments: the name of the recipe, and the options.
          description: of the command; None: that of the recipe.

        Raises:
          UserError: no recipe has this name.
        """
        name, *self._options = arguments
        self._config = recipe(name)
        super().__init__(
            prog=f"flaxzoo {command} {name}",
            usage=f"flaxzoo {command} {name} [options]",
            description=description or f"{RECIPES[name].summary}\n\n{RECIPES[name].details}",
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
        )
        self.groups = {
            title: self.add_argument_group(title, text) for title, (text, _) in GROUPS.items()
        }
        helping = not {"-h", "--help"}.isdisjoint(self._options)
        add_options(self.groups, self._config, helping=helping)

    def read(self) -> tuple[argparse.Namespace, TrainConfig]:
        """Returns the command's own options and the recipe's configuration with all changes.

        Raises:
          UserError: an option is unknown (the message names the nearest), or a value is invalid.
        """
        known = [flag for action in self._actions for flag in action.option_strings]
        parsed, unknown = self.parse_known_args([_with_hyphens(a, known) for a in self._options])
        if unknown:
            name = unknown[0].partition("=")[0]
            similar = similar_names(name, known) if name.startswith("-") else []
            meant = f": did you mean {' or '.join(similar)}?" if similar else ""
            self.error(f"unknown option {name}{meant}")
        return parsed, with_options(self._config, parsed)

    def error(self, message: str) -> NoReturn:
        """Raises UserError instead of ending the process."""
        raise UserError(f"{message} (all options: {self.prog} --help)")


def add_options(groups: dict[str, Any], config: TrainConfig, *, helping: bool) -> None:
    """Adds an option for each field of a configuration to the group that it belongs to.

    Args:
      groups: titles of `GROUPS` → groups of an argparse parser.
      config: supplies the fields and their default values.
      helping: whether to read the help texts from the source code, which takes time.
    """
    fields = {name: (value, hint, text) for name, value, hint, text in _fields(config, helping)}
    title_of = {entry: title for title, (_, entries) in GROUPS.items() for entry in entries}
    entry_of = {
        name: max((e for e in title_of if _covers(e, name)), key=len, default="") for name in fields
    }
    order = ["", *title_of]  # a field that no group names goes into the first
    for name in sorted(fields, key=lambda name: order.index(entry_of[name])):
        value, hint, text = fields[name]
        group = groups[title_of.get(entry_of[name], next(iter(GROUPS)))]
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
        help_text = f"{text} (default: {shown if shown != '' else 'none'})".strip()
        _add_option(group, name, hint, help_text.replace("%", "%%"))


def with_options(config: Config, parsed: argparse.Namespace, prefix: str = "") -> Config:
    """Returns `config` with the values that were given on the command line.

    Raises:
      UserError: a value is out of range.
    """
    given: dict[str, Any] = {}
    for field in dataclasses.fields(config):  # pyright: ignore[reportArgumentType]
        value, name = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            given[field.name] = with_options(value, parsed, f"{name}.")
        elif hasattr(parsed, name):
            read = getattr(parsed, name)
            given[field.name] = tuple(read) if isinstance(read, list) else read
    return type(config)(**{**vars(config), **given})


def field_docs(cls: type) -> dict[str, str]:
    """Returns the docstrings below the fields of a dataclass and of its bases, each as one line."""
    docs = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body  # pyright: ignore
        assert isinstance(definition, ast.ClassDef)
        for field, following in itertools.pairwise(definition.body):
            match field, following:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    docs[name] = " ".join(text.split())
    return docs


def _fields(
    config: object, helping: bool, prefix: str = ""
) -> Iterator[tuple[str, object, Any, str]]:
    """Yields name, value, type and help text of each field that is not itself a configuration."""
    hints = get_type_hints(type(config))
    docs = field_docs(type(config)) if helping else {}
    for field in dataclasses.fields(config):  # pyright: ignore[reportArgumentType]
        value, name = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            yield from _fields(value, helping, f"{name}.")
        else:
            text = docs.get(field.name, "")
            if choices := field.metadata.get("choices"):
                text = f"{text} Choices: {', '.join(choices)}."
            yield name, value, hints[field.name], text


def _covers(entry: str, name: str) -> bool:
    return name == entry or (entry.endswith(".") and name.startswith(entry))


def _with_hyphens(argument: str, known: Sequence[str]) -> str:
    """Returns `--model.num_layers=2` as `--model.num-layers=2`, and other arguments unchanged."""
    name, equals, value = argument.partition("=")
    hyphenated = name.replace("_", "-")
    return f"{hyphenated}{equals}{value}" if hyphenated in known else argument


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of descriptions, and does not split names such as `tfds:a/de-en`."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


class _Switch(argparse.Action):
    """Stores True for the first of its two option strings, and False for the second."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, option_string == self.option_strings[0])


def _add_option(group: Any, name: str, hint: Any, help_text: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    common = {"dest": name, "default": argparse.SUPPRESS, "help": help_text}
    if hint is bool:
        parent, dot, own = flag.removeprefix("--").rpartition(".")
        group.add_argument(flag, f"--{parent}{dot}no-{own}", action=_Switch, nargs=0, **common)
        return
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kind = next(k for k in kinds if k is not type(None))
    if get_origin(kind) in (tuple, Sequence):
        common["nargs"] = "*"
        kind = get_args(kind)[0]
    optional = type(None) in kinds
    group.add_argument(flag, type=_reader(kind, optional), metavar=_metavar(kind), **common)


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"{{{','.join(get_args(kind))}}}"
    return "TEXT" if kind is str else kind.__name__.upper()


def _reader(kind: Any, optional: bool) -> Callable[[str], Any]:
    """Returns a function that converts a word to `kind`; the word `None` stands for None."""

    def read(word: str) -> Any:
        if word == "None" and optional:
            return None
        if get_origin(kind) is not Literal:
            return kind(word)
        if word not in get_args(kind):
            raise argparse.ArgumentTypeError(f"{word!r}: choose from {', '.join(get_args(kind))}")
        return word

    read.__name__ = getattr(kind, "__name__", "value")  # argparse: "invalid int value"
    return read

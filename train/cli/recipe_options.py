"""Reads the options of `flaxzoo train`, `plan` and `bench`: a recipe's configuration.

Every field of the configuration is an option, a nested one as `--model.num-layers`. `--help`
shows the ones that most runs need, with their values in the recipe, and `--help-all` shows all,
in titled groups. This file needs only the standard library, as `options.py` does.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ...data.common.errors import UserError
from ...data.common.fields import describe, named_below
from ...models.adapters.lora import LoRAConfig
from ...models.registry import preset as published_preset
from ...models.rotary_scaling import RotaryScaling
from ..config import TrainConfig, differences, flatten, to_dict
from ..recipes import RECIPES, recipe
from .options import OptionParser, add_option, log

Config = TypeVar("Config")

VOCABULARY = (
    "model.vocab_size",
    *("data.tokenizer.kind", "data.tokenizer.vocab_size", "data.tokenizer.path"),
)
"""The options that name a vocabulary."""

GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "run": (
        "How long to train, on batches of what size, and from which parameters.",
        (
            *("steps", "epochs", "batch_size", "micro_batches", "seed"),
            *("init_from", "init_step"),
        ),
    ),
    "data": ("The examples to train and validate on.", ("data.",)),
    "objective": ("What is learned from the examples.", ("objective.",)),
    "tokenizer": ("The vocabulary: an existing one, or one to train.", ("data.tokenizer.",)),
    "model": ("Sizes and variants of the model.", ("model.",)),
    "adapters": (
        "LoRA: any of these options freezes the model of --init-from and trains adapters to it.",
        ("lora.",),
    ),
    "optimizer": ("The update rule and the learning rate.", ("optimizer.",)),
    "devices": (
        "Placement on the devices, precision, and memory.",
        ("mesh.", "execution.", "parallel", "gather"),
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


OPTIONAL: dict[str, Callable[[], Any]] = {
    "lora": LoRAConfig,
    "model.rope_scaling": functools.partial(
        RotaryScaling, kind="llama3", factor=8.0, original_length=8192
    ),
}
"""The nested configurations that are None by default; any option of one makes it."""

MOST_USED = (
    *("preset", "data.source", "data.validation", "data.length", "init_from", "steps", "epochs"),
    *("batch_size", "optimizer.peak_learning_rate", "execution.dtype"),
    *("objective.rewards", "objective.max_new_tokens", "objective.num_generations"),
    "objective.beta",
)
"""The options that `--help` shows after the command's own."""


class RecipeParser(OptionParser):
    """Parses the options of a command that takes a recipe.

    The command's own options are added with `add_argument`. They come first in the help.

    Attributes:
        groups: the titled groups of the help.
    """

    def __init__(
        self,
        command: str,
        arguments: Sequence[str],
        description: str | None = None,
        example: str | None = None,
    ) -> None:
        """Creates a parser with the options of a recipe.

        Args:
            command: `train`, `plan` or `bench`.
            arguments: the name of the recipe, and the options.
            description: of the command; None: that of the recipe.
            example: options to show with the recipe; None: the command in the recipe's details.

        Raises:
            UserError: no recipe has this name, or it does not have the preset.
        """
        name, *self._options = arguments
        preset = _value_of("preset", self._options)
        if preset == "" or (preset or "").startswith("--"):
            raise UserError(f"--preset has no value: add one (see flaxzoo {command} {name} --help)")
        self._config = recipe(name, preset)
        named = RECIPES[name]
        self.everything = "--help-all" in self._options
        helping = self.everything or not {"-h", "--help"}.isdisjoint(self._options)
        beginning = _value_of("init-from", self._options) or self._config.init_from
        if preset is None and named.of_model is not None and beginning and not helping:
            run = Path(_value_of("workdir", self._options) or default_workdir(name))
            self._config = _begun(name, beginning, command, run) or self._config
        self._command, self._preset = command, preset or named.preset
        documented, about = _split_example(f"{named.summary}\n\n{named.details}")
        whole = f"flaxzoo {command} {name}"
        self._example = documented if example is None else f"{whole} {example}"
        super().__init__(whole, description or about, usage=f"{whole} [options]")
        self.add_argument("--help-all", action=_HelpAll, nargs=0, help="Show all options.")
        self.groups = {
            title: self.add_argument_group(title, text)
            for title, (text, _) in GROUPS.items()
            if title != "objective" or dataclasses.fields(self._config.objective)
        }
        if named.of_preset is not None or named.of_model is not None:
            text = "A published size, from `flaxzoo list`."
            add_option(self.groups["run"], "preset", str, text, default=named.preset)
        add_options(self.groups, self._config, helping=helping)

    def read_recipe(self) -> tuple[argparse.Namespace, TrainConfig]:
        """Returns the command's own options and the recipe's configuration with all changes.

        Raises:
            UserError: an option is unknown (the message names the nearest), or a value is invalid.
        """
        parsed = self.read(self._options)
        for field in ("head", "labels"):
            if hasattr(parsed, f"model.{field}"):
                raise UserError(
                    f"--model.{field} follows from the data, and {self._config.data.kind} data "
                    f"train the head {self._config.model.head}: leave it out, or choose a recipe "
                    "of other data (flaxzoo list)"
                )
        return parsed, self._with_vocabulary(parsed, with_options(self._config, _sized(parsed)))

    def _with_vocabulary(self, parsed: argparse.Namespace, config: TrainConfig) -> TrainConfig:
        """Returns the run with the published vocabulary of its preset, unless options name one.

        A plan and a benchmark are of the published model. Training makes a vocabulary from the
        text, whose size is another, and says so.
        """
        named = any(hasattr(parsed, option) for option in VOCABULARY)
        if self._preset is None or config.init_from is not None or named:
            return config
        published, own = published_preset(self._preset).vocab_size, config.data.tokenizer.vocab_size
        if own in (None, published) or config.model.vocab_size == published:
            return config
        if self._command == "train":
            log(
                f"the vocabulary is made from the text and has {own:,} tokens; that of "
                f"{self._preset} has {published:,} (--data.tokenizer.path names one)"
            )
            return config
        log(
            f"assumed: the {published:,} tokens of {self._preset}; training makes a vocabulary of "
            f"{own:,} from the text (--data.tokenizer.vocab-size {own} plans that)"
        )
        return dataclasses.replace(
            config, model=dataclasses.replace(config.model, vocab_size=published)
        )

    def format_help(self) -> str:
        """Returns the help: an example and the most used options, or all of them."""
        if self.everything:
            return super().format_help()
        grouped = {action for group in self.groups.values() for action in group._group_actions}
        own = [action for action in self._actions if action not in grouped]
        by_field = {action.dest: action for action in self._actions}
        shown = [*own, *(by_field[name] for name in MOST_USED if name in by_field)]
        formatter = self.formatter_class(prog=self.prog)
        formatter.add_usage(self.usage, [], [])
        formatter.add_text(f"example: {self._example}")
        formatter.add_text(self.description)
        formatter.start_section("options")
        formatter.add_arguments(shown)
        formatter.end_section()
        formatter.add_text(f"All {len(self._actions)} options: {self.prog} --help-all")
        return formatter.format_help()


def _sized(parsed: argparse.Namespace) -> argparse.Namespace:
    """Leaves out the recipe's size of a vocabulary if options name one that has its own size.

    Raises:
        UserError: options name a vocabulary, and the settings of one to be trained.
    """
    kind, size = "data.tokenizer.kind", "data.tokenizer.vocab_size"
    if getattr(parsed, "data.tokenizer.path", None) is not None:
        for option in (kind, size, "data.tokenizer.lowercase"):
            if hasattr(parsed, option):
                raise UserError(
                    f"{option} is for a vocabulary that is trained, and data.tokenizer.path names "
                    "one: leave one of them out"
                )
    if getattr(parsed, kind, None) in ("characters", "words") and not hasattr(parsed, size):
        setattr(parsed, size, None)
    return parsed


def default_workdir(name: str) -> Path:
    """Returns the run folder of a recipe if options name none."""
    return Path("runs") / name


def _begun(name: str, beginning: str, command: str, run: Path) -> TrainConfig | None:
    """Returns the recipe for a run that begins with a model, if the run or the model is here.

    A plan and a benchmark download nothing.
    """
    folder = Path(beginning).expanduser()
    if command == "train":
        from ...models.hub import local_folder

        if (resumed := _resumed(name, beginning, run)) is not None:
            return resumed
        with contextlib.suppress(FileNotFoundError):  # which training reports
            folder = local_folder(beginning)
    if not (folder / "config.json").is_file():
        return None
    from ..runs.load_run import begin_with

    return begin_with(name, folder)


def _resumed(name: str, beginning: str, run: Path) -> TrainConfig | None:
    """Returns the recipe for a run that exists; None if there is none with this beginning.

    What follows from its beginning is that of the run, for the beginning may be gone by now.
    """
    from ..runs.load_run import config_of_run

    config, of_model = RECIPES[name].config, RECIPES[name].of_model
    if of_model is None or not (run / "config.json").is_file():
        return None
    made = config_of_run(run)
    if made.init_from != beginning or type(made.data) is not type(config.data):
        return None
    follows = {"init_from", "execution.remat", *differences(config, of_model(made.model))}
    stored = flatten(to_dict(made))
    own = {x: stored[x] for x in follows if not x.startswith("model.")}
    return with_options(config, argparse.Namespace(**own))


class _HelpAll(argparse.Action):
    """Prints the help with all options, and ends the program."""

    def __call__(
        self, parser: argparse.ArgumentParser, *_: object, option_string: str | None = None
    ) -> None:
        parser.print_help()
        parser.exit()


def _value_of(option: str, words: Sequence[str]) -> str | None:
    """Returns the value of an option that has to be known before all others are."""
    for word, following in itertools.pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if name == f"--{option}":
            return value if equals else following
    return None


def _split_example(doc: str) -> tuple[str, str]:
    """Returns the command that a recipe's docstring shows, and the rest of the docstring."""
    found = re.search(r"^Run: ((?:.*\\\n)*.*)\n?", doc, re.MULTILINE)
    if found is None:
        return "", doc
    example = re.sub(r"\s*\\\n\s*", " ", found[1])
    return example, (doc[: found.start()] + doc[found.end() :]).strip()


def add_options(
    groups: Mapping[str, argparse._ArgumentGroup], config: TrainConfig, *, helping: bool
) -> None:
    """Adds an option for each field of a configuration to the group that it belongs to.

    Args:
        groups: titles of `GROUPS` → groups of an argparse parser.
        config: supplies the fields and their default values.
        helping: whether to read the help texts from the source code, which takes time.
    """
    fields = {x.name: x for x in describe(config, nested=OPTIONAL, with_text=helping)}
    title_of = {entry: title for title, (_, entries) in GROUPS.items() for entry in entries}
    entry_of = {
        name: max((e for e in title_of if _covers(e, name)), key=len, default="") for name in fields
    }
    order = ["", *title_of]  # a field that no group names goes into the first
    for name in sorted(fields, key=lambda name: order.index(entry_of[name])):
        field = fields[name]
        group = groups[title_of.get(entry_of[name], next(iter(GROUPS)))]
        add_option(group, name, field.hint, field.text, default=field.default)


def with_options(config: Config, parsed: argparse.Namespace, prefix: str = "") -> Config:
    """Returns `config` with the values that were given on the command line.

    Raises:
        UserError: a value is out of range.
    """
    given: dict[str, Any] = {}
    for field in dataclasses.fields(config):  # pyright: ignore[reportArgumentType]
        value, name = getattr(config, field.name), prefix + field.name
        if value is None and name in OPTIONAL and _gives_any(parsed, name):
            value = OPTIONAL[name]()
        if dataclasses.is_dataclass(value):
            given[field.name] = with_options(value, parsed, f"{name}.")
        elif hasattr(parsed, name):
            read = getattr(parsed, name)
            given[field.name] = tuple(read) if isinstance(read, list) else read
    with named_below(prefix):
        return dataclasses.replace(config, **given)  # pyright: ignore[reportArgumentType]


def _gives_any(parsed: argparse.Namespace, name: str) -> bool:
    return any(given.startswith(f"{name}.") for given in vars(parsed))


def _covers(entry: str, name: str) -> bool:
    return name == entry or (entry.endswith(".") and name.startswith(entry))

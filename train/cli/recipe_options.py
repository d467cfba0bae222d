"""Reads the options of `flaxzoo train`, `plan` and `bench`: a recipe's configuration.

Every field of the configuration is an option; nested fields are written `--model.num-layers`.
`--help` shows the options that most runs need, with the recipe's values, and `--help-all` shows
all in titled groups. Like `options.py`, this file imports only the standard library.
"""

import argparse
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...models.registry import preset as published_preset
from ..config import TrainConfig, is_below
from ..objectives.table import objectives_of
from ..settings.configure import (
    DERIVED,
    OBJECTIVE,
    is_run,
    named_recipe,
    settings_of,
    starting_config,
    with_settings,
)
from ..settings.settings_file import SUFFIX, read_settings
from .options import OptionParser, add_option, log

VOCABULARY = (
    "model.vocab_size",
    *("data.tokenizer.kind", "data.tokenizer.vocab_size", "data.tokenizer.path"),
)
"""The options that choose a vocabulary."""

GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "run": (
        "The length of the training, the size of a batch, and the source of the initial "
        "parameters.",
        (
            *("steps", "epochs", "batch_size", "micro_batches", "seed"),
            *("init_from", "init_step"),
        ),
    ),
    "data": ("The examples to train and validate on.", ("data",)),
    "objective": ("The loss and its hyperparameters.", ("objective",)),
    "tokenizer": ("The vocabulary, which exists or is trained.", ("data.tokenizer",)),
    "model": ("Sizes and variants of the model.", ("model",)),
    "adapters": (
        "LoRA: any of these options freezes the model of --init-from and trains adapters to it.",
        ("lora",),
    ),
    "optimizer": ("The update rule and the learning rate.", ("optimizer",)),
    "devices": (
        "Placement on the devices, precision, and memory.",
        ("mesh", "execution", "parallel", "gather"),
    ),
    "checkpoints and evaluation": (
        "The intervals of checkpoints and evaluations, and the checkpoints to keep.",
        (
            *(
                "evaluate_every",
                "evaluate",
                "checkpoint_every",
                "keep_last",
                "keep_best",
                "best_metric",
            ),
            *("sample_prompt", "skip_bad_steps"),
        ),
    ),
    "logging": ("Metrics during the run.", ("log_every", "wandb_project")),
}
"""Maps the title of each help group to its description and its fields, in order. A field includes
its nested fields, except nested fields that another group lists."""


MOST_USED = (
    *("preset", "data.source", "data.validation", "data.length", "init_from", "steps", "epochs"),
    *("batch_size", "optimizer.peak_learning_rate", "execution.dtype"),
    *("objective.rewards", "objective.max_new_tokens", "objective.num_generations"),
    *("objective.kind", "objective.beta"),
)
"""The options that `--help` shows after the command-specific options."""


class RecipeParser(OptionParser):
    """Parses the options of a command that takes a recipe.

    Command-specific options are added with `add_argument` and come first in the help.

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
            arguments: the name of the recipe, a run folder or a file of settings, then the options.
            description: the description of the command. Defaults to the details of the recipe.
            example: the options in the example that the help shows. Defaults to the example in the
              recipe's details.

        Raises:
            UserError: the recipe is unknown or does not have the preset.
        """
        name, *self._options = _expanded(arguments)
        # These options determine the defaults, so read them before the other options are parsed.
        whole = f"flaxzoo {command} {name}"
        early = OptionParser(whole, "")
        for option in ("preset", "init_from", OBJECTIVE, "workdir"):
            add_option(early, option, str, "", default=None)
        first = early.peek(self._options)
        self.everything = "--help-all" in self._options
        helping = not {"-h", "--help", "--help-all"}.isdisjoint(self._options)
        run = Path(first.pop("workdir", default_workdir(arguments[0])))
        # To show the help, the initial model need not be opened.
        self._config = starting_config(name, first, command=command, run=run, opens=not helping)
        named = named_recipe(name)
        self._command, self._preset = command, first.get("preset", named.preset)
        documented, about = _split_example(f"{named.summary}\n\n{named.details}")
        self._example = documented if example is None else f"{whole} {example}"
        super().__init__(whole, description or about, usage=f"{whole} [options]")
        self.add_help_option()
        self.add_argument("--help-all", action=_HelpAll, nargs=0, help="Show all options.")
        # The recipe determines which presets, objectives and fields exist.
        others = objectives_of(self._config.data)
        has_choices = len(others) > 1 or dataclasses.fields(self._config.objective)
        self.groups = {
            title: self.add_argument_group(title, text)
            for title, (text, _) in GROUPS.items()
            if title != "objective" or has_choices
        }
        if named.of_preset is not None or named.of_model is not None:
            text = "A published size, from `flaxzoo list`."
            add_option(self.groups["run"], "preset", str, text, default=named.preset)
        if len(others) > 1:
            text = f"The objective: {', '.join(others)}. The kind of data determines the default."
            add_option(self.groups["objective"], OBJECTIVE, str, text, default=None)
        add_options(self.groups, self._config, helping=helping)

    def read_recipe(self) -> tuple[argparse.Namespace, TrainConfig]:
        """Returns the command's own options and the recipe's configuration with all changes.

        Raises:
            UserError: an option is unknown (the message names the closest match), or a value is
              invalid.
        """
        parsed = self.read(self._options)
        return parsed, self._with_vocabulary(parsed, with_settings(self._config, vars(parsed)))

    def _with_vocabulary(self, parsed: argparse.Namespace, config: TrainConfig) -> TrainConfig:
        """Returns the configuration with the preset's published vocabulary size, if applicable.

        Options that choose a vocabulary take precedence. `plan` and `bench` assume the published
        model. `train` builds a vocabulary of a different size from the text, and logs this size.
        """
        is_chosen = not vars(parsed).keys().isdisjoint(VOCABULARY)
        if self._preset is None or config.init_from is not None or is_chosen:
            return config
        published = published_preset(self._preset).vocab_size
        trained = config.data.tokenizer.vocab_size
        if trained in (None, published) or config.model.vocab_size == published:
            return config
        if self._command == "train":
            log(
                f"the vocabulary is trained on the text and has {trained:,} tokens; {self._preset} "
                f"has {published:,} (data.tokenizer.path names an existing vocabulary)"
            )
            return config
        log(
            f"the plan assumes the {published:,} tokens of {self._preset}, but training makes a "
            f"vocabulary of {trained:,} tokens from the text (data.tokenizer.vocab_size {trained} "
            "plans this size)"
        )
        model = dataclasses.replace(config.model, vocab_size=published)
        # A tokenizer with more tokens would enlarge the vocabulary of the model.
        tokenizer = dataclasses.replace(config.data.tokenizer, vocab_size=published)
        data = dataclasses.replace(config.data, tokenizer=tokenizer)
        return dataclasses.replace(config, model=model, data=data)

    def format_help(self) -> str:
        """Returns the help: an example and the most used options, or all options."""
        if self.everything:
            return super().format_help()
        by_field = {action.dest: action for action in self._actions}
        most_used = (by_field[name] for name in MOST_USED if name in by_field)
        # Only argparse can format options, so build the short help from its parts.
        formatter = self.formatter_class(prog=self.prog)
        formatter.add_usage(self.usage, [], [])
        formatter.add_text(f"example: {self._example}")
        formatter.add_text(self.description)
        formatter.start_section("options")
        # The options that belong to no titled group are specific to the command.
        formatter.add_arguments([*self._optionals._group_actions, *most_used])
        formatter.end_section()
        formatter.add_text(f"All {len(self._actions)} options: {self.prog} --help-all")
        return formatter.format_help()


def _expanded(arguments: Sequence[str]) -> list[str]:
    """Returns the recipe and the options; a settings file is replaced by its content."""
    name, *options = arguments
    if not name.endswith(SUFFIX):
        return [name, *options]
    return [*read_settings(Path(name).expanduser()), *options]


def default_workdir(name: str) -> Path:
    """Returns the default run folder of a recipe, a file of settings, or a run folder."""
    folder = Path(name).expanduser()
    return folder if is_run(folder) else Path("runs") / folder.name.removesuffix(SUFFIX)


class _HelpAll(argparse.Action):
    """Prints the help with all options and exits."""

    def __call__(
        self, parser: argparse.ArgumentParser, *_: object, option_string: str | None = None
    ) -> None:
        parser.print_help()
        parser.exit()


def _split_example(doc: str) -> tuple[str, str]:
    """Splits a recipe's text into its example command and the rest."""
    match = re.search(r"^Run: ((?:.*\\\n)*.*)\n?", doc, re.MULTILINE)
    if match is None:
        return "", doc
    example = re.sub(r"\s*\\\n\s*", " ", match[1])
    return example, (doc[: match.start()] + doc[match.end() :]).strip()


def add_options(
    groups: Mapping[str, argparse._ArgumentGroup], config: TrainConfig, *, helping: bool
) -> None:
    """Adds an option for each field of a configuration to its group.

    Args:
        groups: title in `GROUPS` → argparse group.
        config: supplies the fields and their default values.
        helping: whether the help is shown. The help texts are read from the source code, which is
          slow.
    """
    fields = {x.name: x for x in settings_of(config, with_text=helping)}
    # A field goes into the group with the longest name that is a prefix of the field.
    title_of = {entry: title for title, (_, entries) in GROUPS.items() for entry in entries}
    entry_of = {
        name: max((e for e in title_of if is_below(name, [e])), key=len, default="")
        for name in fields
    }
    # A field without such a prefix goes into the first group.
    order = ["", *title_of]
    shown = [name for name in fields if not (helping and name in DERIVED)]
    for name in sorted(shown, key=lambda name: order.index(entry_of[name])):
        field = fields[name]
        group = groups[title_of.get(entry_of[name], next(iter(GROUPS)))]
        add_option(group, name, field.hint, field.text, default=field.default)

"""Reads and writes files of settings, for `flaxzoo train run.toml` and `--save-config run.toml`."""

import contextlib
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

from ...data.common.atomic_io import write_file
from ...data.common.errors import UserError
from ...data.common.fields import require, without_none
from ...models.registry import families
from ..config import TrainConfig, flatten, is_below, to_dict
from ..recipes import RECIPES
from .configure import DERIVED, INTERNAL, OBJECTIVE, starting_config, with_settings
from .familiar_names import flag_of

SUFFIX = ".toml"
RECIPE = "recipe"
"""The key of the recipe's name in a file."""


def read_settings(file: Path) -> list[str]:
    """Returns the recipe and the options of a file, as words of the command line.

    The keys in the file are names of options, such as `steps`, or `peak-learning-rate` in the
    section `[optimizer]`. A name may have underscores instead of hyphens.

    Raises:
        FileNotFoundError: The file does not exist.
        UserError: The file is not TOML, or it does not name a recipe.
    """
    try:
        fields = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not TOML ({error}): correct it") from None
    name = fields.pop(RECIPE, None)
    require(
        isinstance(name, str),
        f"{file}: {RECIPE} must be the name of a recipe, got {name!r}: write {RECIPE} = "
        '"quickstart" in its first line',
    )
    words = (word for setting, value in flatten(fields).items() for word in _words(setting, value))
    return [str(name), *words]


def _words(setting: str, value: object) -> Iterator[str]:
    """Yields a setting as words of the command line."""
    flag = flag_of(setting)
    if isinstance(value, bool):
        # A switch takes no value, and --no-NAME turns it off.
        section, dot, last = flag.removeprefix("--").rpartition(".")
        yield flag if value else f"--{section}{dot}no-{last}"
    elif isinstance(value, list) and len(value) != 1:
        yield from (flag, *map(str, value))
    elif isinstance(value, list):
        # A single value may look like an option, so join it to the option.
        yield f"{flag}={value[0]}"
    else:
        yield f"{flag}={value}"


def write_settings(file: Path, config: TrainConfig) -> None:
    """Writes the recipe that is closest to a configuration, and the settings that differ from it.

    Raises:
        UserError: No recipe trains this kind of model on this kind of data.
        OSError: The file cannot be written.
    """
    described = [x for choice in _recipes_like(config) if (x := _settings(choice, config))]
    require(
        described,
        f"no recipe trains {type(config.model).__name__} on {config.data.kind} data, so a file of "
        "settings cannot describe this run: use its config.json",
    )
    # TOML requires settings without a section before the first section.
    sections: dict[str, list[str]] = {"": []}
    # Use the recipe that describes this configuration with the fewest settings.
    for name, value in min(described, key=len).items():
        section, _, last = name.rpartition(".")
        sections.setdefault(section, []).append(f"{last} = {_toml(value)}")
    titled = [[f"[{title}]"] * bool(title) + lines for title, lines in sections.items()]
    text = "\n\n".join(map("\n".join, titled))
    write_file(file, f"{text}\n".encode())


def _recipes_like(config: TrainConfig) -> Iterator[dict[str, str]]:
    """Yields the recipes for the same kinds of model and data, each as a dict of settings."""
    # A run that starts from a model has the sizes of that model, not of the recipe.
    start = without_none({"init_from": config.init_from})
    for name, named in RECIPES.items():
        if type(named.config.data) is not type(config.data):
            continue
        if start or type(named.config.model) is type(config.model):
            yield {RECIPE: name, **start}
        # If no published size of a family can be trained, the family rejects every preset.
        if not start and name in families():
            yield from ({RECIPE: name, "preset": x} for x in families()[name].presets)


def _settings(choice: dict[str, str], config: TrainConfig) -> dict[str, object] | None:
    """Returns the settings for a file, or None if they would result in a different configuration.

    Args:
        choice: The recipe, with its preset or the initial model.
        config: The configuration.
    """
    name, kind = choice[RECIPE], config.objective.kind
    # A recipe may raise UserError for a preset.
    with contextlib.suppress(UserError):
        base = starting_config(name, choice)
        # Settings cannot turn a model of another family into this model.
        if config.init_from is None and type(base.model) is not type(config.model):
            return None
        if base.objective.kind != kind:
            choice = {**choice, OBJECTIVE: kind}
            base = starting_config(name, choice)
        given = {**choice, **_differing(base, config)}
        made = with_settings(base, given)
        # The head is not a setting, so compare it here. A different recipe for the same data may
        # have a different head.
        same = made.model.head == config.model.head or config.init_from is not None
        return given if same and not _differing(made, config) else None
    return None


def _differing(base: TrainConfig, config: TrainConfig) -> dict[str, object]:
    """Returns the fields of `config` that differ from `base` and that a user can set."""
    stated, usual = flatten(to_dict(config)), flatten(to_dict(base))
    # Other settings determine these fields. A file describes a single stage of a run, so the fields
    # of earlier stages are also left out.
    implied = ("data.kind", OBJECTIVE, *DERIVED, *INTERNAL)
    if config.init_from is not None:
        implied += ("model", "data.tokenizer")
    # The initial model determines all other fields of the model.
    return {
        name: value
        for name, value in stated.items()
        if (name == "model.dropout_rate" or not is_below(name, implied))
        and usual.get(name, ...) != value
    }


def _toml(value: object) -> str:
    """Returns a value as TOML. TOML has no null, so None becomes "None", as in an option."""
    # A JSON string is also a TOML string, and a JSON list is also a TOML list.
    return json.dumps("None" if value is None else value, ensure_ascii=False)

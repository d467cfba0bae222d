"""Makes the configuration of a recipe or a run, and replaces its fields with settings.

The name of a setting is the name of a field, with dots for nested fields, such as
`optimizer.peak_learning_rate`. This module reads settings from Python, from files and from the
command line. It imports only what is needed to describe a run, because `flaxzoo bench` runs on
machines that have only jax, flax and optax.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ...data.common.fields import Description, describe, named_below, require
from ...models.adapters.lora import LoRAConfig
from ...models.config import TransformerConfig
from ...models.rotary_scaling import RotaryScaling
from ...models.run_files import CONFIG_FILE, is_foreign, read_fields
from ..config import Recipe, TrainConfig, differences, flatten, to_dict
from ..objectives.table import objective_for
from ..recipes import RECIPES
from ..recipes import recipe as named_config
from .familiar_names import flag_of, remedy_for

Config = TypeVar("Config")
OfModel = Callable[[TransformerConfig], TrainConfig]
"""Returns the configuration of a recipe for a given model; see `Recipe.of_model`."""

DERIVED = ("model.head", "model.labels")
"""The fields that the data determine. The help text does not show these fields, and it is an error
to set them."""

INTERNAL = ("stage",)
"""The fields that users cannot set."""

OPTIONAL: dict[str, Callable[[], Any]] = {
    "lora": LoRAConfig,
    "model.rope_scaling": functools.partial(
        RotaryScaling, kind="llama3", factor=8.0, original_length=8192
    ),
}
"""Nested configurations that default to None. Any option of such a configuration creates it."""

OBJECTIVE = "objective.kind"
"""The name of the setting that chooses the objective."""


def recipe(name: str, preset: str | None = None, **settings: Any) -> TrainConfig:
    """Returns the configuration of a named recipe, with settings that replace its fields.

    Example::

        train.recipe("quickstart", steps=10, **{"optimizer.peak_learning_rate": 1e-3})

    Args:
        name: A recipe such as `quickstart`, or a family such as `gpt`.
        preset: A published size of the family, such as `gpt2-large`. Recipes of post-training
            accept the sizes of all families. Other recipes have a fixed size.
        settings: Values of fields by name, with dots for nested fields. The names are the options
          of `flaxzoo train` with underscores, and the same checks apply.

    Raises:
        UserError: The recipe, the preset or a setting is unknown (the message names the closest
            match), the recipe has a fixed size, or a value is out of range.
    """
    config = starting_config(name, {"preset": preset, **settings}, opens="init_from" in settings)
    known = {x.name for x in settings_of(config, with_text=False)} | {OBJECTIVE}
    flags = list(map(flag_of, sorted(known)))
    for setting in settings:
        # A Python caller uses names of fields, but the message would name options.
        remedy = re.sub(
            r"--([\w.-]+)", lambda x: x[1].replace("-", "_"), remedy_for(setting, flags)
        )
        require(setting in known, f"unknown field {setting}{remedy}")
    return with_settings(config, settings)


def settings_of(config: TrainConfig, *, with_text: bool) -> Iterator[Description]:
    """Describes the settings of a configuration; see `describe`."""
    for field in describe(config, nested=OPTIONAL, with_text=with_text):
        if field.name.partition(".")[0] not in INTERNAL:
            yield field


def named_recipe(name: str) -> Recipe:
    """Returns a recipe, or the configuration of a run folder as a recipe.

    Raises:
        UserError: The name is neither a recipe nor a run folder.
    """
    folder = Path(name).expanduser()
    # A recipe takes precedence over a folder of the same name.
    if name in RECIPES or not is_run(folder):
        named_config(name)  # raises UserError if the name is unknown
        return RECIPES[name]
    from ..runs.load_run import config_of_run

    return Recipe(
        summary=f"The run in {name}: this command resumes the run.",
        details=(
            f"Run: flaxzoo train {name} --extend-to 1000\n"
            "The defaults of all options are the settings of the run. --extend-to adds a stage of "
            "more steps, with other settings if given, and --save-config writes the settings to a "
            "file."
        ),
        config=config_of_run(folder),
    )


def is_run(folder: Path) -> bool:
    """Returns whether a folder has the `config.json` of a run."""
    return (folder / CONFIG_FILE).is_file() and not is_foreign(read_fields(folder))


def starting_config(
    name: str,
    given: Mapping[str, Any],
    *,
    command: str = "train",
    run: Path | None = None,
    opens: bool = True,
) -> TrainConfig:
    """Returns the configuration before settings are applied.

    Args:
        name: A recipe or a run folder.
        given: All settings. The preset, the initial model and the objective determine the other
          fields and their defaults.
        command: The command. Only `train` downloads the initial model.
        run: The folder of the run, which may already exist.
        opens: Whether the initial model may be opened.

    Raises:
        UserError: The recipe, the preset or the objective is unknown.
    """
    named, preset = named_recipe(name), given.get("preset")
    config = named.config if preset is None else named_config(name, preset)
    init_from = given.get("init_from") or config.init_from
    if preset is None and named.of_model is not None and init_from and opens:
        config = _config_for(name, init_from, command, run, of_model=named.of_model)
    kind, objective = given.get(OBJECTIVE), config.objective
    # If the kind of data changes, a default objective also changes, but an objective that the user
    # named does not.
    if kind is None or (kind == objective.kind and not objective.is_default):
        return config
    return dataclasses.replace(config, objective=objective_for(config.data, kind))


def with_settings(config: TrainConfig, given: Mapping[str, Any]) -> TrainConfig:
    """Returns a configuration with the given fields replaced. The caller has checked their names.

    Raises:
        UserError: A value is out of range, or two settings contradict each other.
    """
    heads = " or ".join(config.objective.heads(config.data))
    for field in DERIVED:
        require(
            field not in given,
            f"{field} follows from the data, which train the head {heads} "
            f"({config.data.kind} data): leave it out, or choose a recipe of other data "
            f"(flaxzoo list)",
        )
    return _replaced(config, _sized(given))


def _sized(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Removes the recipe's vocabulary size if the text determines the size of the vocabulary.

    Raises:
        UserError: There are settings for an existing vocabulary, and also settings for training a
          new one.
    """
    kind, size = "data.tokenizer.kind", "data.tokenizer.vocab_size"
    is_named = given.get("data.tokenizer.path") is not None
    for option in (kind, size, "data.tokenizer.lowercase"):
        require(
            not (is_named and option in given),
            f"{option} requires a vocabulary to train, but data.tokenizer.path names an existing "
            "vocabulary: leave one of these options out",
        )
    return {size: None, **given} if given.get(kind) in ("characters", "words") else given


def _replaced(config: Config, given: Mapping[str, Any], prefix: str = "") -> Config:
    """Returns `config` with the given values.

    Raises:
        UserError: A value is out of range.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):  # pyright: ignore[reportArgumentType]
        value, name = getattr(config, field.name), prefix + field.name
        # Copy only the nested configurations that change, because a default objective has a mark
        # that a copy would lose.
        if any(x.startswith(f"{name}.") for x in given):
            nested = OPTIONAL[name]() if value is None else value
            values[field.name] = _replaced(nested, given, f"{name}.")
        elif name in given and not dataclasses.is_dataclass(value):
            # JSON and TOML have lists instead of tuples.
            values[field.name] = tuple(x) if isinstance(x := given[name], list) else x
    # Errors of nested configurations then name the whole field, such as `model.num_layers`.
    with named_below(prefix):
        return dataclasses.replace(config, **values)  # pyright: ignore[reportArgumentType]


def _config_for(
    name: str, init_from: str, command: str, run: Path | None, *, of_model: OfModel
) -> TrainConfig:
    """Returns the recipe for a run that starts from a model.

    If the model is missing, returns the recipe unchanged. `plan` and `bench` do not download
    models.
    """
    folder = Path(init_from).expanduser()
    if command == "train":
        from ...models.hub import local_folder

        if resumed := _resumed(name, init_from, run, of_model):
            return resumed
        # If the model is missing, training reports it later.
        with contextlib.suppress(FileNotFoundError):
            folder = local_folder(init_from)
    if not (folder / CONFIG_FILE).is_file():
        return RECIPES[name].config
    # Import late, because `flaxzoo bench` runs on machines that lack the packages for this module.
    from ..runs.load_run import begin_with

    return begin_with(name, folder)


def _resumed(name: str, init_from: str, run: Path | None, of_model: OfModel) -> TrainConfig | None:
    """Returns the recipe for an existing run, or None if the run did not start from this model.

    Settings that follow from the initial model are read from the run, because the initial model
    may have been deleted.
    """
    if run is None or not (run / CONFIG_FILE).is_file():
        return None
    from ..runs.load_run import config_of_run

    config, stored = RECIPES[name].config, config_of_run(run)
    if (stored.init_from, type(stored.data)) != (init_from, type(config.data)):
        return None
    # The fields that the recipe derives from the run's model.
    derived = {"init_from", "execution.remat", *differences(config, of_model(stored.model))}
    values = flatten(to_dict(stored))
    return _replaced(config, {x: values[x] for x in derived if not x.startswith("model.")})

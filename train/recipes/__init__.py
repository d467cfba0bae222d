"""Named recipes: the typed configurations of runs, each with what a person is told of it.

The command line can set any field: `flaxzoo train quickstart --steps 500`. The recipe of a family
trains any of its published sizes: `flaxzoo train gpt --preset gpt2-large`.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from ...data.errors import UserError, suggest
from ...models.registry import FAMILIES, families
from ..config import Recipe, TrainConfig
from .decoders import recipe_of_family


def _recipes_of(file: str) -> dict[str, Recipe]:
    """Returns the recipes of a file of this folder, or of a family that has none of its own."""
    if find_spec(f".{file}", __name__) is None:
        return {file: recipe_of_family(file)}
    return import_module(f".{file}", __name__).RECIPES


RECIPES: dict[str, Recipe] = {
    name: recipe
    for file in (*FAMILIES, "post_training", "reinforcement")
    for name, recipe in _recipes_of(file).items()
}
"""Every recipe by name: the `RECIPES` of the file that a family has in this folder, or one for all
of its sizes, and those of post-training."""


def recipe(name: str, preset: str | None = None) -> TrainConfig:
    """Returns the configuration of a named recipe.

    Args:
        name: The recipe: `quickstart`, or a family: `gpt`.
        preset: A published size of the family: `gpt2-large`. Only for the recipe of a family; one
            of post-training has the sizes of all families.

    Raises:
        UserError: There is no such recipe or preset (the message names the nearest), or the
            recipe has a size of its own.
    """
    family_of = {size: family for family, x in families().items() for size in x.presets}
    if name not in RECIPES:
        if name in family_of:
            raise UserError(
                f"{name} is a preset, not a recipe: train it by its family's recipe, "
                f"flaxzoo train {family_of[name]} --preset {name}"
            )
        if (Path(name) / "config.json").is_file():
            raise UserError(
                f"{name} is a folder with a model, not a recipe: give the run's recipe and "
                f"--workdir {name} to resume it, or a recipe and --init-from {name} to begin with "
                "its parameters"
            )
        if "/" in name:
            raise UserError(f"{name} is no recipe, and no such folder: see flaxzoo list")
        raise UserError(f"no recipe named {name!r}: {suggest(name, list(RECIPES))}")
    if preset is None:
        return RECIPES[name].config
    if preset not in family_of:
        own = [size for size, family in family_of.items() if name in (family, preset)]
        raise UserError(f"no preset named {preset!r}: {suggest(preset, own or list(family_of))}")
    of_preset = RECIPES[name].of_preset
    if of_preset is None or not (RECIPES[name].any_family or family_of[preset] == name):
        raise UserError(
            f"the recipe {name} does not have the preset {preset!r}: "
            f"flaxzoo train {family_of[preset]} --preset {preset}"
        )
    return of_preset(preset)

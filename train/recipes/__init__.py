"""Named recipes: typed configurations of runs, with their help texts.

The command line can set any field of a recipe: `flaxzoo train quickstart --steps 500`. The recipe
of a model family trains any published size of this family: `flaxzoo train gpt --preset gpt2-large`.
"""

import functools
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from ...data.common.errors import UserError, suggest
from ...models import registry
from ...models.registry import FAMILIES, families, family_of_preset, presets
from ..config import Recipe, TrainConfig
from . import decoders, encoders

FILES = (*FAMILIES, "post_training", "reinforcement", "embedding")
"""The files and families that define recipes, in the order of `flaxzoo list`. Some families have no
file in this folder."""


class _Recipes(Mapping[str, Recipe]):
    """Maps the names of all recipes to the recipes, which are in `RECIPES` of each file.

    Looking up a name imports files until one of them contains the recipe. Iterating imports all
    files.
    """

    def __getitem__(self, name: str) -> Recipe:
        # Many recipe names begin with the name of their file, so try that file first.
        for file in sorted(FILES, key=lambda file: not name.startswith(file)):
            if name in (recipes := _recipes_of(file)):
                return recipes[name]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for file in FILES for name in _recipes_of(file))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@functools.cache
def _recipes_of(file: str) -> Mapping[str, Recipe]:
    """Returns the recipes of a file in this folder, or the recipe of a family without a file."""
    if find_spec(f".{file}", __name__) is None:
        make = encoders if FAMILIES[file].startswith("encoders") else decoders
        return {file: make.recipe_of_family(file)}
    return import_module(f".{file}", __name__).RECIPES


RECIPES: Mapping[str, Recipe] = _Recipes()
"""Maps the name of a recipe to the recipe. The recipes of a model family are in the file of this
family. A family without a file in this folder has one recipe for all of its sizes. The recipes for
post-training, reinforcement learning and embedding models have separate files."""


def recipe(name: str, preset: str | None = None) -> TrainConfig:
    """Returns the configuration of a named recipe.

    Args:
        name: A recipe such as `quickstart`, or a family such as `gpt`.
        preset: A published size, such as `gpt2-large`. The recipe of a family accepts the sizes of
            this family, and post-training recipes accept the sizes of all families. Other recipes
            have a fixed size.

    Raises:
        UserError: The recipe or preset is unknown (the message names the closest match), or the
            recipe has a fixed size.
    """
    if name not in RECIPES:
        raise UserError(_unknown(name))
    if preset is None:
        return RECIPES[name].config
    # Look up the preset in the family first, because `presets` imports all families.
    if name in FAMILIES and preset not in families()[name].presets and preset not in presets():
        family_presets = list(families()[name].presets)
        raise UserError(f"no preset named {preset!r}: {suggest(preset, family_presets)}")
    # Post-training recipes accept models of any family.
    if (of_model := RECIPES[name].of_model) is not None:
        return of_model(registry.preset(preset))
    # Recipes of a family accept only the presets of this family.
    family, of_preset = family_of_preset(preset), RECIPES[name].of_preset
    if of_preset is None or family != name:
        raise UserError(
            f"the recipe {name} does not have the preset {preset!r}: "
            f"flaxzoo train {family} --preset {preset}"
        )
    return of_preset(preset)


def _unknown(name: str) -> str:
    """Returns the error message for a name that is not a recipe."""
    if name in presets():
        family = family_of_preset(name)
        return (
            f"{name} is a preset, not a recipe: use its family's recipe, "
            f"flaxzoo train {family} --preset {name}"
        )
    # A user may confuse recipes with run folders.
    if (Path(name) / "config.json").is_file():
        return (
            f"{name} is a folder with a model, not a recipe: give a recipe and --init-from {name} "
            "to start from it"
        )
    return f"no recipe named {name!r}: {suggest(name, list(RECIPES))}"

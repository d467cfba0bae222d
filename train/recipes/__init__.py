"""Named recipes: the typed configurations of runs, each with what a person is told of it.

The command line can set any field: `flaxzoo train quickstart --steps 500`.
"""

from importlib import import_module

from ...data.errors import UserError, suggest
from ...models.registry import FAMILIES
from ..config import Recipe, TrainConfig

RECIPES: dict[str, Recipe] = {
    name: recipe
    for family in FAMILIES
    for name, recipe in import_module(f".{family}", __name__).RECIPES.items()
}
"""Every recipe by name: the `RECIPES` of the file that each family has in this folder."""


def recipe(name: str) -> TrainConfig:
    """Returns the configuration of a named recipe.

    Raises:
      UserError: There is no such recipe; the message names the nearest.
    """
    if name not in RECIPES:
        raise UserError(f"no recipe named {name!r}: {suggest(name, list(RECIPES))}")
    return RECIPES[name].config

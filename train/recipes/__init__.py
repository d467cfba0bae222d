"""Named recipes: functions that return the typed configuration of a run.

The command line can set any field: `flaxzoo train quickstart --steps 500`.
"""

from collections.abc import Callable
from importlib import import_module

from ...data.errors import UserError, suggest
from ...models.registry import FAMILIES
from ..config import TrainConfig

RECIPES: dict[str, Callable[[], TrainConfig]] = {
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
    return RECIPES[name]()


def describe(name: str) -> str:
    """Returns the first line of a recipe's description."""
    return (RECIPES[name].__doc__ or "").split("\n")[0]

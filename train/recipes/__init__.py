"""Named recipes: functions that return a typed configuration.

Any field is set on the command line: `flaxzoo train quickstart --steps 500`.
"""

from collections.abc import Callable

from ...data.errors import UserError, suggest
from ..config import TrainConfig
from .bert import BERT_RECIPES
from .gpt import GPT_RECIPES
from .translation import TRANSLATION_RECIPES

RECIPES: dict[str, Callable[[], TrainConfig]] = {
    **GPT_RECIPES,
    **BERT_RECIPES,
    **TRANSLATION_RECIPES,
}


def recipe(name: str) -> TrainConfig:
    """The configuration of a named recipe.

    Raises:
      UserError: no such recipe; the message names the nearest.
    """
    if name not in RECIPES:
        raise UserError(f"no recipe named {name!r}: {suggest(name, list(RECIPES))}")
    return RECIPES[name]()


def describe(name: str) -> str:
    """A recipe in one line."""
    return (RECIPES[name].__doc__ or "").split("\n")[0]

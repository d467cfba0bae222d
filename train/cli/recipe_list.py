"""Lists the recipes in groups, for `flaxzoo list` and `flaxzoo train --help`."""

import textwrap
from collections.abc import Callable

from ..config import Recipe
from ..recipes import RECIPES
from .options import line_length

AS_PUBLISHED = "as published, on data sets that are downloaded"
"""The title of the recipes with published settings."""
GROUPS: dict[str, Callable[[Recipe], bool]] = {
    "small models and toy tasks, without a download": lambda recipe: (
        recipe.of_preset is None and recipe.config.data.source_name.startswith("builtin:")
    ),
    "your own files: fine-tuning, assistants, translation": lambda recipe: (
        not recipe.config.data.source_name.startswith(("builtin:", "tfds:"))
    ),
    "any published size, on your own text: --preset NAME": lambda recipe: (
        recipe.of_preset is not None
    ),
    AS_PUBLISHED: lambda recipe: recipe.config.data.source_name.startswith("tfds:"),
}
"""Maps the title of each group to a function that returns whether a recipe belongs to the group.
Each recipe belongs to exactly one group."""


def listed_recipes() -> str:
    """Returns the names and summaries of all recipes in groups, wrapped to the terminal."""
    columns = line_length()
    groups = []
    for title, accepts in GROUPS.items():
        summaries = {name: x.summary for name, x in RECIPES.items() if accepts(x)}
        width = max(map(len, summaries))
        rows = (
            textwrap.fill(
                summary,
                columns,
                initial_indent=f"  {name:<{width}}  ",
                subsequent_indent=" " * (width + 4),
                break_on_hyphens=False,
            )
            for name, summary in summaries.items()
        )
        groups.append("\n".join([title, *rows]))
    return "\n\n".join(groups)

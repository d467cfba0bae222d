"""The command `flaxzoo list`."""

import dataclasses
import shutil
import textwrap

from ...models.registry import families
from ..recipes import RECIPES
from .options import parse


@dataclasses.dataclass(frozen=True)
class ListArguments:
    """Prints the recipes and the published model sizes."""


def list_command(arguments: list[str]) -> None:
    """Runs `flaxzoo list`: the recipes, and each family's sizes by paper."""
    parse(ListArguments, arguments, "flaxzoo list")
    print("recipes: flaxzoo train RECIPE")
    width = max(map(len, RECIPES))
    for name, recipe in RECIPES.items():
        print(f"  {name:<{width}}  {recipe.summary}")
    columns = min(shutil.get_terminal_size().columns, 120)
    for family, record in families().items():
        print(f"\npresets of {family}: flaxzoo train {family} --preset NAME")
        by_paper: dict[tuple[str, int], list[str]] = {}
        notes: dict[str, list[str]] = {}
        for name, preset in record.presets.items():
            by_paper.setdefault((preset.paper, preset.config.max_length), []).append(
                f"{name} ({preset.published})"
            )
            if preset.note:
                notes.setdefault(preset.note, []).append(name)
        lines = [
            f"{paper}, context {context:,}: {'; '.join(sizes)}"
            for (paper, context), sizes in by_paper.items()
        ]
        for line in [*lines, *(f"{', '.join(names)}: {note}" for note, names in notes.items())]:
            wrapped = textwrap.wrap(line, columns - 4, break_on_hyphens=False)
            print(textwrap.indent("\n  ".join(wrapped), "  ", lambda text: True))
    print("\nIn parentheses: the number of parameters that the paper states.")

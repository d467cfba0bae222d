"""The command `flaxzoo list`."""

import dataclasses
import shutil
import textwrap

from ...models.config import TransformerConfig
from ...models.registry import families
from ..recipes import RECIPES
from .options import parse


def count(config: TransformerConfig) -> int:
    """Returns the number of parameters of a model, without creating them."""
    from ...models.init import parameter_shapes
    from ...models.registry import create
    from ..state import count_parameters

    return count_parameters(parameter_shapes(create(config)))


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
            parameters = record.num_parameters.get(name) or count(preset.config)
            said = f"{name} {parameters:,} ({preset.published})"
            by_paper.setdefault((preset.paper, preset.config.max_length), []).append(said)
            if preset.note:
                notes.setdefault(preset.note, []).append(name)
        lines = [
            f"{paper}, context {context:,}: {'; '.join(sizes)}"
            for (paper, context), sizes in by_paper.items()
        ]
        for line in [*lines, *(f"{', '.join(names)}: {note}" for note, names in notes.items())]:
            wrapped = textwrap.wrap(line, columns - 4, break_on_hyphens=False)
            print(textwrap.indent("\n  ".join(wrapped), "  ", lambda text: True))
    print("\nIn parentheses: the number of parameters that the paper prints.")

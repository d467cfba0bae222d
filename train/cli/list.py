"""The command `flaxzoo list`."""

import dataclasses

from rich.console import Console
from rich.table import Column, Table

from ...models.config import TransformerConfig
from ...models.init import parameter_shapes
from ...models.registry import create, presets
from ..recipes import RECIPES
from ..state import count_parameters
from .options import parse


def preset_parameters(config: TransformerConfig) -> int:
    """Returns the number of parameters of a model, without creating them."""
    return count_parameters(parameter_shapes(create(config)))


@dataclasses.dataclass(frozen=True)
class ListArguments:
    """Prints the published model sizes and the recipes."""


def list_command(arguments: list[str]) -> None:
    """Runs `flaxzoo list`: the sizes with paper, parameters and context length, and the recipes."""
    parse(ListArguments, arguments, "flaxzoo list")
    console = Console(soft_wrap=True, width=160)  # lines wrap in a narrow terminal
    columns = ("preset", "paper", "parameters", "published as", "context")
    table = Table(*(Column(name, no_wrap=True) for name in columns), box=None)
    for name, preset in presets().items():
        parameters = f"{preset_parameters(preset.config):,}"
        context = f"{preset.config.max_length:,}"
        table.add_row(name, preset.paper, parameters, preset.published, context)
    console.print(table)
    noted = {}
    for name, preset in presets().items():
        noted.setdefault(preset.note, []).append(name)
    notes = [f"{', '.join(names)}: {note}" for note, names in noted.items() if note]
    console.print("", *notes, "", sep="\n", highlight=False)
    for name, recipe in RECIPES.items():
        console.print(f"recipe {name}: {recipe.summary}", highlight=False)

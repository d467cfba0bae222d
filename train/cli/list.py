"""`flaxzoo list`: what there is."""

from rich.console import Console
from rich.table import Column, Table

from ...models.config import TransformerConfig
from ...models.init import parameter_shapes
from ...models.registry import create, presets
from ..recipes import RECIPES, describe
from ..state import count_parameters


def preset_parameters(config: TransformerConfig) -> int:
    """How many parameters a model of this configuration has; makes none of them."""
    return count_parameters(parameter_shapes(create(config)))


def print_catalogue() -> None:
    """Prints the published sizes with paper, parameters and context, and the recipes."""
    console = Console(soft_wrap=True, width=160)  # a narrow terminal wraps, and nothing is cut
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
    for name in RECIPES:
        console.print(f"recipe {name}: {describe(name)}", highlight=False)

"""`flaxzoo list`: what there is."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Column, Table

from ..models.config import TransformerConfig, create, presets
from .recipes import RECIPES
from .state import count_parameters


def preset_parameters(config: TransformerConfig) -> int:
    """How many parameters a model of this configuration has; makes none of them."""
    model = create(config)
    ids = jnp.zeros((1, 1), jnp.int32)
    return count_parameters(jax.eval_shape(model.init, jax.random.key(0), input_ids=ids)["params"])


def print_catalogue() -> None:
    """Prints the published sizes with paper, parameters and context, and the recipes."""
    console = Console(soft_wrap=True)
    columns = ("preset", "paper", "parameters", "published as", "context")
    table = Table(*(Column(name, no_wrap=True) for name in columns), box=None)
    for name, preset in presets().items():
        parameters = f"{preset_parameters(preset.config):,}"
        context = f"{preset.config.max_length:,}"
        table.add_row(name, preset.paper, parameters, preset.published, context)
    console.print(table)
    notes = [f"{name}: {preset.note}" for name, preset in presets().items() if preset.note]
    console.print("", *notes, "", sep="\n", highlight=False)
    for name, make in RECIPES.items():
        console.print(f"recipe {name}: {first_line(make)}", highlight=False)


def first_line(function: Callable[..., Any]) -> str:
    """The first line of a function's docstring."""
    return (function.__doc__ or "").split("\n")[0]

"""The command `flaxzoo list`."""

import dataclasses
import textwrap

from ....models.config import TransformerConfig
from ....models.registry import families
from ..options import line_length, parse
from ..recipe_list import listed_recipes


def count(config: TransformerConfig) -> int:
    """Returns the number of parameters of a model, without creating them."""
    from ....models.init import parameter_shapes
    from ....models.registry import create
    from ...state import count_parameters

    return count_parameters(parameter_shapes(create(config)))


@dataclasses.dataclass(frozen=True)
class ListArguments:
    """Prints the recipes and the published model sizes."""


def list_command(arguments: list[str]) -> None:
    """Runs `flaxzoo list`, which prints the recipes and the published sizes of each family."""
    parse(ListArguments, arguments, "flaxzoo list")
    print(f"recipes: flaxzoo train RECIPE\n\n{listed_recipes()}")
    columns = line_length()
    for family, record in families().items():
        if not record.presets:
            continue
        print(f"\npresets of {family}: flaxzoo train {family} --preset NAME")
        rows = [("", "parameters", "printed", "GB", "context", "paper")]
        notes: dict[str, list[str]] = {}
        for name, preset in record.presets.items():
            parameters = record.num_parameters.get(name) or count(preset.config)
            context = f"{preset.config.max_length:,}"
            # A float32 parameter takes four bytes.
            gigabytes = 4 * parameters / 1e9
            digits = 2 if gigabytes < 10 else 1 if gigabytes < 100 else 0
            size = f"{gigabytes:.{digits}f}"
            rows.append((name, f"{parameters:,}", preset.published, size, context, preset.paper))
            if preset.note:
                notes.setdefault(preset.note, []).append(name)
        # Align columns of numbers to the right, and columns of names and papers to the left.
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for name, *numbers, paper in rows:
            aligned = [f"{x:>{width}}" for x, width in zip(numbers, widths[1:], strict=False)]
            print("  " + "  ".join([f"{name:<{widths[0]}}", *aligned, paper]))
        # Print each note once, with all presets that share it.
        for note, names in notes.items():
            wrapped = textwrap.wrap(
                f"{', '.join(names)}: {note}", columns - 4, break_on_hyphens=False
            )
            print("  " + "\n    ".join(wrapped))
    print("\nprinted: the paper's number of parameters; GB: in float32, four bytes each")

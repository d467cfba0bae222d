"""The command `flaxzoo list`."""

import dataclasses
import shutil
import textwrap

from ...models.config import TransformerConfig
from ...models.registry import families
from ..recipes import RECIPES
from .options import parse

# fmt: off
PARAMETERS = {
    "gpt": 116_534_784, "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large":
    774_030_080, "gpt2-xl": 1_557_611_200, "gpt3-small": 125_226_240, "gpt3-medium": 355_871_744,
    "gpt3-large": 760_300_032, "gpt3-xl": 1_315_723_264, "gpt3-2.7b": 2_651_553_280, "gpt3-6.7b":
    6_658_404_352, "gpt3-13b": 12_853_386_240, "gpt3-175b": 174_604_259_328, "bert-tiny":
    4_433_468, "bert-mini": 11_267_900, "bert-small": 29_058_876, "bert-medium": 41_668_412,
    "bert-base": 110_106_428, "bert-large": 336_226_108, "roberta-base": 124_697_433,
    "roberta-large": 355_412_057, "distilbert-base": 66_985_530, "transformer-base": 63_045_632,
    "transformer-big": 214_171_648, "transformer-1-head": 63_045_632, "transformer-4-heads":
    63_045_632, "transformer-16-heads": 63_045_632, "transformer-32-heads": 63_045_632,
    "transformer-keys-16": 55_967_744, "transformer-keys-32": 58_327_040, "transformer-2-layers":
    33_644_544, "transformer-4-layers": 48_345_088, "transformer-8-layers": 77_746_176,
    "transformer-d-256": 26_816_512, "transformer-d-1024": 163_815_424, "transformer-ff-1024":
    50_450_432, "transformer-ff-4096": 88_236_032, "transformer-learned": 64_094_208, "llama-7b":
    6_738_415_616, "llama-13b": 13_015_864_320, "llama-33b": 32_528_943_616, "llama-65b":
    65_285_660_672, "llama2-7b": 6_738_415_616, "llama2-13b": 13_015_864_320, "llama2-70b":
    68_976_648_192, "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496,
}
# fmt: on
"""The number of parameters of each preset, which takes seconds to count, as `count` counts it."""


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
            parameters = PARAMETERS.get(name) or count(preset.config)
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

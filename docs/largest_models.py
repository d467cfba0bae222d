"""Writes `docs/scale/largest.md`: the largest published model for a topology, by arithmetic.

    python docs/largest_models.py

The script evaluates shapes only, and takes a few minutes.
"""

import functools
from pathlib import Path

from flaxzoo import models
from flaxzoo.models.registry import families
from flaxzoo.train.cli.recipe_list import AS_PUBLISHED, GROUPS
from flaxzoo.train.cli.recipe_options import RecipeParser
from flaxzoo.train.cli.training.list import count
from flaxzoo.train.config import TrainConfig
from flaxzoo.train.plan.least_memory import WAYS, LeastMemory, least_memory, trained_by
from flaxzoo.train.plan.placeholders import without_data
from flaxzoo.train.plan.topology import Topology, parse_topology
from flaxzoo.train.recipes import RECIPES

TOPOLOGIES = (
    *("l4:1", "a100-40gb:1", "h100:1", "h100:8", "2*h100:8", "4*h100:8"),
    *("v5e:2x2", "v5e:4x4", "v6e:4x4", "v5p:4x4x4", "v6e:16x16"),
)
BOUND = "lower bound"
HEAD = ["vocabulary", "parameters", "state and gradients", f"topology ({BOUND})"]
PAGE = Path(__file__).parent / "scale" / "largest.md"
INTRO = """\
# The largest models

`python docs/largest_models.py` writes this page. The figures are the minimum memory of a step:
parameters, optimizer state and gradients, divided over all devices (`--mesh.fsdp`), and on each
device the inputs of all layers for one row, and the parameters of a layer or of the vocabulary with
their gradient, with `--execution.remat full` and bfloat16. The figures are computed from shapes.
The temporary buffers of a compiled step need more memory: with 2,048 tokens on eight virtual
devices, `llama3.2-1b` needs 3.9 GiB by this computation, and 6.6 GiB as compiled.
[`flaxzoo plan`](plan.md) decides whether a step fits.

The tables therefore compare a lower bound of the memory with the memory of the devices. A larger
published size does not fit. The size in the table may not fit either. For example, AdamW needs at
least 15.1 GiB of the 15.75 GiB on each chip of `v5e:4x4` for `phi3-medium` (14.0 B), and at least
10.5 GiB for `llama3.1-8b` (8.0 B). As compiled, the parts of the step of `llama3.1-8b` with 32 rows
add up to 17.31 GiB ([Plan the memory](plan.md)).

Programs can use three quarters of the memory of a GPU (`XLA_CLIENT_MEM_FRACTION`).
"""
SIZES = """## What each family needs

For each family, the table shows the largest published size, trained with AdamW at the row length of
its recipe. The topology is the first one in the table above whose memory is at least the lower
bound.
"""

PUBLISHED = """## The published recipes

For each recipe with published settings, the topology is the first one in the first table whose
memory is at least the lower bound of the recipe's step, with the optimizer of the recipe.
"""


def planned(family: str, preset: str) -> TrainConfig:
    """Returns the run that `flaxzoo plan FAMILY --preset PRESET` plans."""
    # A model whose windows extend to both sides cannot predict next tokens. It embeds texts.
    recipe = family if getattr(models.preset(preset), "causal", True) else "embed"
    return planned_recipe(recipe, "--preset", preset)


def planned_recipe(*words: str) -> TrainConfig:
    """Returns the run that `flaxzoo plan` plans, given its command line."""
    config = RecipeParser("plan", list(words)).read_recipe()[1]
    return without_data(config, lambda line: None)


@functools.cache
def needed(family: str, preset: str, way: str) -> LeastMemory:
    """Returns the minimum memory that a step needs on a single device."""
    return least_memory(trained_by(planned(family, preset), way), 1)


def fits(memory: LeastMemory, topology: Topology) -> bool:
    """Returns whether a step fits on the devices, given the memory that it needs on one device."""
    number = topology.num_devices
    return memory.state / number + memory.activations <= topology.chip.usable_memory


def first_fit(memory: LeastMemory) -> str:
    """Returns the name of the first topology that a step fits on."""
    names = (name for name in TOPOLOGIES if fits(memory, parse_topology(name)))
    return next((f"`{name}`" for name in names), "larger")


def sizes_of(config: TrainConfig, memory: LeastMemory) -> list[str]:
    """Returns the vocabulary, the parameters, the memory of the state, and the topology."""
    vocabulary, state = f"{config.model.vocab_size:,}", f"{memory.state / 2**30:,.1f} GiB"
    return [vocabulary, f"{memory.parameters:,}", state, first_fit(memory)]


def published() -> str:
    """Returns the table of the recipes with published settings."""
    rows = []
    for name in filter(lambda name: GROUPS[AS_PUBLISHED](RECIPES[name]), RECIPES):
        config = planned_recipe(name)
        rows.append([f"`{name}`", *sizes_of(config, least_memory(config, 1))])
    return table(["recipe", *HEAD], rows)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Returns a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page() -> str:
    """Returns the text of the page."""
    sizes = {
        (family, preset): record.num_parameters.get(preset) or count(entry.config)
        for family, record in families().items()
        for preset, entry in record.presets.items()
    }
    by_size = sorted(sizes, key=lambda size: -sizes[size])
    topologies = [parse_topology(name) for name in TOPOLOGIES]
    largest = [
        [f"`{x.name}`", *(_largest(sizes, by_size, way, x) for way in WAYS)] for x in topologies
    ]
    rows = []
    for family in dict(by_size):
        preset = next(preset for name, preset in by_size if name == family)
        of_size = sizes_of(planned(family, preset), needed(family, preset, "AdamW"))
        rows.append([family, f"`{preset}`", *of_size])
    sizes_table = table(["family", "size", *HEAD], sorted(rows))
    largest_table = table(["topology", *(f"{way} ({BOUND})" for way in WAYS)], largest)
    text = [INTRO, largest_table, SIZES, sizes_table, PUBLISHED, published()]
    return "\n".join(text)


def _largest(
    sizes: dict[tuple[str, str], int], by_size: list[tuple[str, str]], way: str, topology: Topology
) -> str:
    """Returns the name of the largest size that fits and the number of its parameters."""
    memory = topology.chip.usable_memory * topology.num_devices
    for family, preset in by_size:
        # The parameters alone (2 bytes each if they are frozen) may need too much memory.
        at_least = sizes[family, preset] * (2 if "LoRA" in way else 10)
        if at_least <= memory and fits(needed(family, preset, way), topology):
            return f"`{preset}` ({sizes[family, preset] / 1e9:.1f} B)"
    return "–"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""The command `flaxzoo plan`."""

import dataclasses

from ...data.errors import UserError
from ..config import TrainConfig
from ..recipes import RECIPES
from .commands import parse_recipe, say


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanArguments(TrainConfig):
    """A recipe's configuration, and the devices it is planned for."""

    topology: str = ""
    """Needed: v5p:8x8x8 and the like; several slices: 4*v6e:16x16; virtual devices: cpu:512."""
    search: bool = False
    """Try meshes and what is recomputed, and print a table, best first."""
    tries: int = 6
    """At most so many of them are compiled."""


def plan_command(arguments: list[str]) -> int:
    """The command `flaxzoo plan RECIPE --topology NAME [options]`.

    Answers 0, or 1 where the step does not fit.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(
            "usage: flaxzoo plan RECIPE --topology v5p:8x8x8 [--mesh.fsdp N] [--search] …\n\n"
            "Compiles a recipe's train step for devices that need not be here, and says whether\n"
            "it fits, what it computes and sends, and how fast it might be. Reads no data.\n\n"
            f"recipes: {', '.join(RECIPES)}\n\nAll options: flaxzoo plan quickstart --help"
        )
        return 0
    parsed, config = parse_recipe(
        PlanArguments, arguments, f"flaxzoo plan {arguments[0]}", PlanArguments.__doc__
    )
    from ..plan.hardware import parse_topology
    from ..plan.placeholders import without_data
    from ..plan.plan import make_plan
    from ..plan.report import report
    from ..plan.search import search

    if not parsed.topology:
        raise UserError("plan needs the devices' name: --topology v5e:4x4, or cpu:8")
    topology = parse_topology(parsed.topology)
    config = without_data(config, say)
    if parsed.search:
        return search(config, topology, parsed.tries, say)
    plan = make_plan(config, topology)
    print("\n".join(report(plan, config, topology)))
    return 0 if plan.out_of_memory is None else 1

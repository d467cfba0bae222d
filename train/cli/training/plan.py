"""The command `flaxzoo plan`."""

from ....data.common.fields import Positive, require
from ..options import asks_for_help, log, reader
from ..recipe_options import RecipeParser

DESCRIPTION = """\
Compiles a recipe's train step for devices that need not be present, and prints
whether it fits into their memory, what it computes and communicates, and an
estimate of its speed. Reads no data."""


def plan_command(arguments: list[str]) -> int:
    """Runs `flaxzoo plan RECIPE --topology NAME [options]`.

    Returns:
        0, or 1 if the step does not fit.
    """
    if asks_for_help(arguments):
        print(
            "usage: flaxzoo plan RECIPE --topology h100:8 [--mesh.fsdp N] …\n\n"
            f"{DESCRIPTION}\n\nRecipes: flaxzoo list\n"
            "Options of a recipe: flaxzoo plan quickstart --help"
        )
        return 0
    parser = RecipeParser("plan", arguments, DESCRIPTION, "--topology v5e:4x4 --mesh.fsdp 8")
    parser.add_argument(
        "--topology",
        default="",
        help="Required: v5p:8x8x8, h100:8 and the like; several slices or hosts: 4*v6e:16x16, "
        "2*h100:8; virtual devices: cpu:512.",
    )
    parser.add_argument(
        "--price",
        type=reader(Positive),
        help="Price of one device for an hour. The estimate then includes the cost of the run.",
    )
    parser.add_argument(
        "--bytes-per-token",
        type=reader(Positive),
        default=4.0,
        help="Bytes of text in a token: about 4 in English with a vocabulary of sub-words, 1 with "
        "characters. By default 4.",
    )
    parsed, config = parser.read_recipe()
    from ...plan.placeholders import without_data
    from ...plan.plan import make_plan
    from ...plan.report import report
    from ...plan.topology import parse_topology

    problem = "plan needs the name of the devices: --topology h100:8, v5e:4x4, or cpu:8"
    require(parsed.topology, problem)
    topology = parse_topology(parsed.topology)
    require(
        parsed.price is None or not topology.is_virtual,
        f"--price {parsed.price} needs a chip whose speed is known, got the topology "
        f"{topology.name}: name one, such as h100:8, or leave it out",
    )
    # Use placeholders for fields whose values depend on the data. The step is compiled in another
    # process.
    config = without_data(config, log)
    plan = make_plan(config, topology)
    totals = {"price": parsed.price, "bytes_per_token": parsed.bytes_per_token}
    print("\n".join(report(plan, config, topology, **totals)))
    return 0 if plan.fits(topology) else 1

"""The command `flaxzoo bench`. This module needs only jax, flax and optax."""

import functools
import sys
from pathlib import Path

from ....data.common.errors import UserError
from ....data.common.fields import PositiveInt
from ...compilation_cache import enable_compilation_cache
from ..options import asks_for_help, reader
from ..recipe_options import RecipeParser

DESCRIPTION = """\
Times a recipe's train step on the devices of this machine, on synthetic
batches. Reads no data, and needs only jax, flax and optax."""


def bench_command(arguments: list[str]) -> None:
    """Runs `flaxzoo bench RECIPE [options]`."""
    if asks_for_help(arguments):
        print(
            "usage: flaxzoo bench RECIPE [--timed-steps N] [--profile FOLDER] …\n\n"
            f"{DESCRIPTION}\n\nRecipes: flaxzoo list\n"
            "Options of a recipe: flaxzoo bench quickstart --help"
        )
        return
    parser = RecipeParser("bench", arguments, DESCRIPTION, "--batch-size 8 --timed-steps 20")
    parser.add_argument(
        "--timed-steps",
        type=reader(PositiveInt),
        default=20,
        metavar="INT",
        help="Number of steps to time. (at least 1; default: 20)",
    )
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FOLDER",
        help="Save a trace of a few steps here, for xprof or Perfetto.",
    )
    parsed, config = parser.read_recipe()
    # Create the folder before the measurement, to fail fast.
    if parsed.profile is not None:
        try:
            parsed.profile.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"--profile {parsed.profile} cannot be made ({error.strerror}): name another folder"
            ) from None
    enable_compilation_cache()
    from ...plan.bench import bench, report
    from ...plan.placeholders import without_data

    measured = bench(
        without_data(config, functools.partial(print, file=sys.stderr)),
        timed_steps=parsed.timed_steps,
        profile=parsed.profile,
    )
    print("\n".join(report(measured)))
    if parsed.profile is not None:
        print(f"trace        {parsed.profile}: open it with xprof or ui.perfetto.dev")

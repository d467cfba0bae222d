"""The command `flaxzoo bench`; it needs jax, flax and optax, and nothing else."""

import argparse
import functools
import sys
from pathlib import Path

from ...data.errors import UserError
from ..compilation_cache import enable_compilation_cache
from ..recipes import RECIPES, recipe
from .plain_options import OptionParser, add_options, with_options

WHAT = (
    "Times a recipe's train step on the devices here, on rows that are made up: reads no data.\n"
    "It runs where there are jax, flax and optax alone."
)


def bench_command(arguments: list[str]) -> None:
    """The command `flaxzoo bench RECIPE [options]`."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(
            "usage: flaxzoo bench RECIPE [--timed-steps N] [--profile FOLDER] …\n\n"
            f"{WHAT}\n\nrecipes: {', '.join(RECIPES)}\n\n"
            "All options: flaxzoo bench quickstart --help"
        )
        return
    base = recipe(arguments[0])
    parser = _parser(arguments[0])
    add_options(parser, base)
    parsed = parser.read(arguments[1:])
    config = with_options(base, parsed)
    if parsed.profile is not None:
        _make_folder(parsed.profile)
    enable_compilation_cache()
    from ..plan.bench import bench, report
    from ..plan.placeholders import without_data

    measured = bench(
        without_data(config, functools.partial(print, file=sys.stderr)),
        timed_steps=parsed.timed_steps,
        profile=parsed.profile,
    )
    print("\n".join(report(measured)))
    if parsed.profile is not None:
        print(f"trace        {parsed.profile}: open it with xprof or ui.perfetto.dev")


def _parser(name: str) -> OptionParser:
    program = f"flaxzoo bench {name}"
    parser = OptionParser(
        prog=program,
        usage=f"{program} [options]",
        description=WHAT,
        epilog=f"The others are those of a run: flaxzoo train {name} --help tells what they mean.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--timed-steps", type=_at_least_one, default=20, help="how many are timed; by default 20"
    )
    parser.add_argument(
        "--profile", type=Path, help="a folder for a trace of a few steps, for xprof or Perfetto"
    )
    return parser


def _make_folder(path: Path) -> None:
    """Before anything is measured."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--profile {path} cannot be made ({error.strerror}): name another folder"
        ) from None


def _at_least_one(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} must be at least 1")
    return number

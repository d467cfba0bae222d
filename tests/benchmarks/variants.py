"""Train a recipe several times, with each of some values of one option, and compare the scores.

    python tests/benchmarks/variants.py RECIPE OPTION VALUE VALUE … [--seeds 0 1] [more options]
    python tests/benchmarks/variants.py numbers-en-fr label-smoothing 0 0.1 --steps 300
    python tests/benchmarks/variants.py numbers-en-fr model.encoder-causal false true --steps 300

Every run has the same data, steps and seed; the options that follow hold for all of them. Prints
the scores of `flaxzoo evaluate` for each value as a row of a table (the mean over the seeds, with
the range behind it), and the seconds that the run took.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from flaxzoo import train
from flaxzoo.train.cli.recipe_options import RecipeParser


def scores_of(recipe: str, options: list[str]) -> dict[str, float]:
    """Train one run, and return its scores and the seconds of its training."""
    _, config = RecipeParser("train", [recipe, *options]).read_recipe()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        train.train(config, Path(folder) / "run")
        seconds = time.perf_counter() - start
        scores = train.score_run(Path(folder) / "run", log=lambda line: None)
    numbers = {name: x for name, x in scores.items() if isinstance(x, int | float)}
    return {**numbers, "seconds": seconds}


def main() -> None:
    """Train all runs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("option")
    parser.add_argument("values", nargs="+")
    parser.add_argument("--seeds", nargs="+", default=["0"])
    arguments, common = parser.parse_known_args()
    table: dict[str, list[dict[str, float]]] = {}
    for value in arguments.values:
        for seed in arguments.seeds:
            *section, name = arguments.option.split(".")
            if value == "false":
                name = f"no-{name}"
            chosen = [] if value in ("true", "false") else [value]
            options = [f"--{'.'.join([*section, name])}", *chosen, "--seed", seed, *common]
            scores = scores_of(arguments.recipe, options)
            print(json.dumps({arguments.option: value, "seed": seed, **scores}), file=sys.stderr)
            table.setdefault(value, []).append(scores)
    names = list(next(iter(table.values()))[0])
    print(f"| {arguments.option} | {' | '.join(names)} |\n|{' --- |' * (len(names) + 1)}")
    for value, runs in table.items():
        cells = []
        for name in names:
            numbers = [run[name] for run in runs]
            mean, low, high = sum(numbers) / len(numbers), min(numbers), max(numbers)
            cells.append(f"{mean:.4g}" + (f" ({low:.4g} to {high:.4g})" if low < high else ""))
        print(f"| {value} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

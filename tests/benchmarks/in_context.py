"""Train the recipe `in-context` in several sizes, and print the accuracy by number of examples.

    python tests/benchmarks/in_context.py [--sizes 1x32 2x32 3x64] [options of the recipe]

A size is layers x width. All models see the same tasks in the same order, and are asked about 200
tasks that none of them has seen, without examples and after up to 16. Prints a row for each size
and kind of task; an answer is right if the model writes it whole.
"""

import argparse
import dataclasses
import sys
import tempfile
import time
from pathlib import Path

from flaxzoo import data, models, train
from flaxzoo.train.cli.recipe_options import RecipeParser

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.in_context import accuracy_by_shots  # noqa: E402

SHOTS = (0, 1, 2, 4, 8, 16)


def main() -> None:
    """Train all sizes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=["1x32", "2x32", "3x64"])
    arguments, options = parser.parse_known_args()
    _, config = RecipeParser("train", ["in-context", *options]).read_recipe()
    patterns = data.Patterns.parse(config.data.source_name)
    print(f"| layers x width | parameters | seconds | kind | {' | '.join(map(str, SHOTS))} |")
    print("|" + " --- |" * (4 + len(SHOTS)))
    for size in arguments.sizes:
        layers, width = map(int, size.split("x"))
        model = dataclasses.replace(
            config.model, num_layers=layers, d_model=width, d_ff=None, init_std=width**-0.5
        )
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            train.train(dataclasses.replace(config, model=model), Path(folder) / "run")
            seconds = time.perf_counter() - start
            trained, params = models.load(Path(folder) / "run")
            tokenizer = data.load_tokenizer(Path(folder) / "run")
        table = accuracy_by_shots(trained, params, tokenizer, patterns.held_out, SHOTS)
        number = f"{train.count_parameters(params):,}"
        for kind, accuracy in table.items():
            cells = " | ".join(f"{accuracy[k]:.0%}" for k in SHOTS)
            print(f"| {size} | {number} | {seconds:.0f} | {kind} | {cells} |", flush=True)


if __name__ == "__main__":
    main()

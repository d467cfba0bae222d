"""Train the recipe `in-context` in several sizes, and print the accuracy by number of examples.

    python tests/benchmarks/in_context.py [--sizes 1x32 2x32 2x64] [options of the recipe]

A size is layers x width. All models see the same tasks in the same order, and are asked about tasks
that none of them has seen. Prints a row for each size and kind of task, with the share of answers
that the model writes without an error after 0 to 16 examples.
"""

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path

from flaxzoo import data, models, train
from flaxzoo.train.cli.recipe_options import RecipeParser

SHOTS = (0, 1, 2, 4, 8, 16)


def main() -> None:
    """Train all sizes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=["1x32", "2x32", "2x64"])
    parser.add_argument("--questions", type=int, default=200)
    arguments, options = parser.parse_known_args()
    _, config = RecipeParser("train", ["in-context", *options]).read_recipe()
    patterns = data.Patterns.parse(config.data.source_name)
    assert patterns is not None
    print(f"| layers x width | parameters | seconds | kind | {' | '.join(map(str, SHOTS))} |")
    print("|" + " --- |" * (4 + len(SHOTS)))
    for size in arguments.sizes:
        layers, width = map(int, size.split("x"))
        model = dataclasses.replace(config.model, num_layers=layers, d_model=width, d_ff=4 * width)
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            start = time.perf_counter()
            train.train(dataclasses.replace(config, model=model), run)
            seconds = time.perf_counter() - start
            number = f"{train.count_parameters(models.load(run)[1]):,}"
            scorer = train.ContinuationScorer.of_run(run)
            for kind in patterns.kinds:
                found = train.few_shot_accuracy(
                    scorer,
                    data.PATTERNS["patterns"],
                    data.prompt_examples(f"builtin:patterns#{kind}"),
                    shots=SHOTS,
                    answers="texts",
                    limit=arguments.questions,
                    log=lambda line: None,
                )
                cells = " | ".join(f"{found[shots].accuracy:.0%}" for shots in SHOTS)
                print(f"| {size} | {number} | {seconds:.0f} | {kind} | {cells} |", flush=True)


if __name__ == "__main__":
    main()

"""Train a recipe with each optimizer and form of its state, and compare loss, memory and time.

    python tests/benchmarks/optimizers.py [--steps 600] [--only adamw muon] [more options of train]
    python tests/benchmarks/optimizers.py --steps 300 --rate muon=3e-3 adafactor=0.03

Every run has the same data, steps, seed and schedule; AdamW's forms and LAMB have the recipe's
learning rate, Adafactor and Muon the rate of `RATES`, or of `--rate`. Prints, as each run ends, a
row of a table: the validation loss after the last step, the bytes of optimizer state for each
parameter, and the median time of a step, whatever else the machine does meanwhile.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import jax
from flaxzoo import train
from flaxzoo.train.cli.recipe_options import RecipeParser
from flaxzoo.train.engine.compile import compile_trainer
from flaxzoo.train.engine.memory_summary import bytes_per_device
from flaxzoo.train.objectives.tasks import objective_of

FORMS = ("float32", "bfloat16", "bfloat16_stochastic", "int8")
VARIANTS = {
    **{f"adamw {form}": ("adamw", form, ()) for form in FORMS},
    "lamb float32": ("lamb", "float32", ()),
    "lamb int8": ("lamb", "int8", ()),
    "adafactor": ("adafactor", "float32", ()),
    "adafactor, momentum int8": ("adafactor", "int8", ("--optimizer.adafactor-momentum",)),
    **{f"muon {form}": ("muon", form, ()) for form in FORMS},
}
"""For each name the optimizer, the form of its state, and further options."""
RATES = {"lamb": 1e-2, "adafactor": 3e-2, "muon": 3e-3}
"""Peak learning rates of the optimizers that do not have the recipe's."""


class Watch(train.Callback):
    """Keeps the time of each step and the last validation loss."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.loss = float("nan")

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note the loss."""
        self.loss = metrics["loss"]


def row_of(variant: str, rate: float | None, common: list[str]) -> str:
    """Train one run, and return its row of the table."""
    name, form, more = VARIANTS[variant]
    options = ["--optimizer.name", name, "--optimizer.state-dtype", form, *more, *common]
    if rate is not None:
        options += ["--optimizer.peak-learning-rate", str(rate)]
    _, config = RecipeParser("train", ["quickstart", *options]).read_recipe()
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        made = train.train(config, Path(folder) / "run", quiet=True, callbacks=[watch])
    if not made.finished:
        raise SystemExit(f"{variant} was stopped after {made.step} steps")
    shapes = compile_trainer(made.run.config, objective_of(made.run.config)).shapes
    numbers = sum(x.size for x in jax.tree.leaves(shapes.params))
    state = bytes_per_device(shapes.opt_state)
    steps = [after - before for before, after in zip(watch.times, watch.times[1:], strict=False)]
    return (
        f"| {variant} | {config.optimizer.peak_learning_rate:g} | {watch.loss:.3f} | "
        f"{state / numbers:.2f} | {statistics.median(steps):.3f} |"
    )


def main() -> None:
    """Train all runs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), help="begins of names")
    parser.add_argument("--steps", default="600")
    parser.add_argument("--rate", nargs="+", default=[], metavar="OPTIMIZER=RATE")
    arguments, common = parser.parse_known_args()
    rates = RATES | {n: float(x) for n, x in (pair.split("=") for pair in arguments.rate)}
    common += ["--steps", arguments.steps, "--evaluate-every", arguments.steps]
    print(f"load before: {os.getloadavg()[0]:.1f}", flush=True)
    print("| optimizer | peak rate | validation loss | bytes per parameter | s per step |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    for variant, (name, *_) in VARIANTS.items():
        if variant.startswith(tuple(arguments.only)):
            print(row_of(variant, rates.get(name), common), flush=True)
    print(f"load after: {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()

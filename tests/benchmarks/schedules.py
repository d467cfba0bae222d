"""Compare warm-up-stable-decay with cosine, and averaged with last parameters, on `quickstart`.

    python tests/benchmarks/schedules.py --output runs/schedules [--steps 600] [--seeds 3]

Each seed trains with a cosine, with `wsd`, and with a constant rate whose decay is a stage of the
run. All have equal steps, data and peak rates, and decay to a tenth of the peak. Every run keeps a
moving average of its parameters. Prints a JSON line for each run and for the means: the
validation loss of the last parameters (`loss`) and of the average (`ema_loss`). Finished runs in
the output folder are not repeated. The default is nine runs of 600 steps.
"""

import argparse
import json
import statistics
from pathlib import Path

from flaxzoo import train
from flaxzoo.train.runs.metrics_log import read_metrics

SCHEDULES = ("cosine", "wsd", "constant, then linear")
DECAY_FRACTION = 0.2
EMA_DECAY = 0.99


def scores(schedule: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Returns the last validation scores of a run, which is trained unless it is finished."""
    first, _, second = schedule.partition(", then ")
    folder = options.output / f"{first}-{second or 'alone'}-{seed}"
    stable = options.steps - round(DECAY_FRACTION * options.steps)
    stages = [(first, stable if second else options.steps)]
    if second:
        stages.append((second, options.steps))
    # In the decay the folder holds another configuration than at the constant rate.
    decays = folder / "decay"
    for name, steps in stages[decays.exists() :]:
        settings = {
            "optimizer.schedule": name,
            "optimizer.decay_fraction": DECAY_FRACTION,
            "optimizer.ema_decay": EMA_DECAY,
            "sample_prompt": None,
        }
        config = train.recipe("quickstart", steps=steps, seed=seed, **settings)
        train.train(config, folder, extend=decays.exists(), quiet=True)
        if second:
            decays.touch()
    last = read_metrics(folder, "validation")[-1]
    return {name: last[name] for name in ("loss", "ema_loss")}


def main() -> None:
    """Trains the runs and prints their scores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    for schedule in SCHEDULES:
        found = [scores(schedule, seed, options) for seed in range(options.seeds)]
        for seed, row in enumerate(found):
            print(json.dumps({"schedule": schedule, "seed": seed, **row}), flush=True)
        means = {name: statistics.mean(row[name] for row in found) for name in found[0]}
        print(json.dumps({"schedule": schedule, "seeds": options.seeds, **means}), flush=True)


if __name__ == "__main__":
    main()

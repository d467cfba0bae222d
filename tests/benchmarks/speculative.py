"""Measure speculative decoding: the acceptance of a draft model's tokens, and tokens a second.

    python tests/benchmarks/speculative.py [--run RUN --draft RUN] [--temperature 0]

Without runs it trains two GPTs of different size on the built-in text (`quickstart` with other
sizes; `--steps`), in a folder that it keeps (`--folder`) and uses again. Beginnings of sentences of
the documentation are continued with and without the draft model in turns, after a round that
compiles. Prints the load of the machine and a JSON line for each number of draft tokens, with the
medians.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from flaxzoo import models

PROMPTS = (
    "The for statement is used to",
    "A function definition defines",
    "The following methods are",
    "Return a copy of the",
    "If the argument is omitted,",
    "Raises an exception when",
    "This module provides",
    "The value of the expression",
)
SIZES = {
    "large": ("--model.num-layers", "8", "--model.d-model", "384", "--model.num-heads", "6"),
    "small": ("--model.num-layers", "1", "--model.d-model", "96", "--model.num-heads", "2"),
}


def trained(folder: Path, size: str, steps: int) -> str:
    """Returns the run of a size, and trains it if there is none."""
    run = folder / size
    if not (run / "checkpoints").exists():
        options = (*SIZES[size], "--steps", str(steps), "--workdir", str(run))
        subprocess.run(
            [sys.executable, "-m", "flaxzoo", "train", "quickstart", *options], check=True
        )
    return str(run)


def measured(generator: models.TextGenerator, rows: int) -> float:
    """Returns the tokens a second of a round."""
    prompts = (PROMPTS * rows)[:rows]
    start = time.perf_counter()
    samples = generator(
        prompts, max_new_tokens=arguments.new_tokens, temperature=arguments.temperature
    )
    return sum(len(sample.tokens) for sample in samples) / (time.perf_counter() - start)


def main() -> None:
    """Time both and print the medians."""
    folder = Path(arguments.folder)
    run = arguments.run or trained(folder, "large", arguments.steps)
    draft = arguments.draft or trained(folder, "small", arguments.steps)
    alone, small = (models.TextGenerator.of_run(name) for name in (run, draft))
    print(f"load {os.getloadavg()[0]:.2f}", flush=True)
    for number in arguments.draft_tokens:
        drafted = alone.with_draft(small, number)
        speeds: dict[str, list[float]] = {"alone": [], "draft": []}
        for _ in range(arguments.rounds + 1):
            speeds["alone"].append(measured(alone, arguments.rows))
            speeds["draft"].append(measured(drafted, arguments.rows))
        one, two = (statistics.median(values[1:]) for values in speeds.values())
        seen = drafted.acceptance
        assert seen is not None
        figures = {
            "rows": arguments.rows,
            "temperature": arguments.temperature,
            "draft_tokens": number,
            "acceptance": round(seen.accepted / seen.proposed, 3),
            "tokens_per_call": round(1 + seen.accepted / seen.calls, 2),
            "tokens_per_second": {"alone": round(one, 1), "draft": round(two, 1)},
            "gain": round(two / one, 2),
        }
        print(json.dumps(figures), flush=True)
    print(f"load {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", help="the model; by default it is trained")
    parser.add_argument("--draft", help="the draft model; by default it is trained")
    parser.add_argument("--folder", default="runs/speculative")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=100)
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[2, 4, 6])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    main()

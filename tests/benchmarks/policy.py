"""Print what reinforcement learning makes of a model that is right about half of the time.

python tests/benchmarks/policy.py
    pretrains the recipe `sums` once, and runs grpo, rloo and ppo with three seeds each, and grpo
    with a constant reward. One row each: the mean reward of all hundred sums before and after, and
    the divergence from the first model, in nats per token.
"""

import argparse
import dataclasses
import json
import tempfile
import time
from pathlib import Path

from flaxzoo import train


def constant(completions):
    """Rewards every completion alike."""
    return [1.0] * len(completions)


def run(folder, name, seed, rewards=()):
    """Trains a recipe; returns its first and last evaluation, and the seconds."""
    config = dataclasses.replace(
        train.recipe(name), init_from=str(folder / "sums"), seed=seed, sample_prompt=None
    )
    if rewards:
        rollout = dataclasses.replace(config.data.rollout, reward_weights=(0.0, 1.0))
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, rollout=rollout))
    workdir = folder / f"{name}-{seed}-{len(rewards)}"
    begin = time.monotonic()
    train.train(config, workdir, quiet=True, rewards=rewards)
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    validation = [row for row in rows if row["split"] == "validation"]
    return validation[0], validation[-1], time.monotonic() - begin


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", nargs="*", default=["grpo", "rloo", "ppo"])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    arguments = parser.parse_args()
    print("| recipe | seed | steps | reward before | reward after | kl | seconds |", flush=True)
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        train.train(train.recipe("sums"), folder / "sums", quiet=True)
        for name in arguments.names:
            for seed in arguments.seeds:
                show(name, seed, *run(folder, name, seed))
        show("grpo, constant reward", 0, *run(folder, "grpo", 0, (constant,)))


def show(name, seed, first, last, seconds):
    """Prints a row."""
    right = [row["rewards/exact_match/mean"] for row in (first, last)]
    print(
        f"| {name} | {seed} | {last['step']} | {right[0]:.2f} | {right[1]:.2f} | {last['kl']:.3f} "
        f"| {seconds:.0f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()

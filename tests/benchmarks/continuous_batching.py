"""Measure many prompts with answers of very different lengths, in step and continuously.

    python tests/benchmarks/continuous_batching.py [--preset gpt2] [--rows 8]

64 prompts of 10 to 400 tokens are answered by a model with random parameters. Each text ends at a
length that is drawn for it, from a geometric distribution, as an end token would end it: in step
(batches of similar prompts, each until its longest text ends) and continuously, both by
`Generator.continuous_batch`. Both write the same tokens, which is checked.
Prints the load of the machine and a JSON line for each way: tokens a second, and the share of
positions read and of tokens written that nobody wanted. The first round compiles.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np
from flaxzoo import models
from flaxzoo.models.decoding.generator import sampling_keys

Texts = list[list[int]]


def in_step(generator: models.Generator, prompts: Texts, lengths: list[int]) -> "Result":
    """Answers batches of similar prompts, each until its longest text ends."""
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    texts: Texts = [[] for _ in prompts]
    read = written = 0
    for start in range(0, len(order), arguments.rows):
        batch = order[start : start + arguments.rows]
        given = [prompts[i] for i in batch]
        rows = generator.continuous_batch(
            given,
            REQUEST,
            keys=KEYS[np.asarray(batch)],
            limits=[arguments.longest] * len(batch),
            num_rows=len(batch),
        )
        for new in rows:
            text = batch[new.text]
            texts[text].extend(new.tokens)
            if len(texts[text]) >= lengths[text]:
                rows.stop(new.text)
        read += rows.usage.positions_read
        written += rows.usage.positions_written
    return [text[:n] for text, n in zip(texts, lengths, strict=True)], read, written


def continuously(generator: models.Generator, prompts: Texts, lengths: list[int]) -> "Result":
    """Answers the prompts in a few rows, one after the other."""
    texts: Texts = [[] for _ in prompts]
    batch = generator.continuous_batch(
        prompts,
        REQUEST,
        keys=KEYS,
        limits=[arguments.longest] * len(prompts),
        num_rows=arguments.rows,
    )
    for new in batch:
        texts[new.text].extend(new.tokens)
        if len(texts[new.text]) >= lengths[new.text]:
            batch.stop(new.text)
    texts = [text[:n] for text, n in zip(texts, lengths, strict=True)]
    return texts, batch.usage.positions_read, batch.usage.positions_written


Result = tuple[Texts, int, int]
Way = Callable[[models.Generator, Texts, list[int]], Result]


def main() -> None:
    """Answer in both ways, in turns, and print the medians."""
    model = models.create(models.preset(arguments.preset), models.Execution(layers="separate"))
    init = jax.jit(lambda: model.init(jax.random.key(0), input_ids=np.ones((1, 1), np.int32)))
    generator = models.Generator(model, init()["params"])
    draw = np.random.default_rng(0)
    prompts = [
        draw.integers(0, 1000, draw.integers(10, 401)).tolist() for _ in range(arguments.prompts)
    ]
    drawn = draw.geometric(1 / arguments.mean, arguments.prompts)
    lengths = np.minimum(drawn, arguments.longest).tolist()
    print(f"load {os.getloadavg()[0]:.2f}", flush=True)
    ways: dict[str, Way] = {"in step": in_step, "continuous": continuously}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    results: dict[str, Result] = {}
    for _ in range(arguments.rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            results[name] = way(generator, prompts, lengths)
            seconds[name].append(time.perf_counter() - start)
    same = sum(x == y for x, y in zip(*(result[0] for result in results.values()), strict=True))
    print(f"{same} of {len(prompts)} texts are the same in both ways")
    for name, (texts, read, written) in results.items():
        wanted = sum(map(len, texts))
        figures = {
            "way": name,
            "rows": arguments.rows,
            "tokens": wanted,
            "compiling_round_seconds": round(seconds[name][0], 2),
            "tokens_per_second": round(wanted / statistics.median(seconds[name][1:]), 1),
            "read_for_nothing": round(1 - sum(map(len, prompts)) / read, 3),
            "written_for_nothing": round(1 - wanted / written, 3),
        }
        print(json.dumps(figures), flush=True)
    print(f"load {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--mean", type=float, default=40.0, help="mean length of a text")
    parser.add_argument("--longest", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    REQUEST = models.GenerationRequest(do_sample=True, max_new_tokens=arguments.longest)
    KEYS = sampling_keys(0, arguments.prompts)
    main()

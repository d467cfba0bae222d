"""The command line, warm-up and clock that the benchmarks in this folder share.

Times drift on shared machines, so implementations are compared step by step in turns. With
`--lockstep` a benchmark warms up and prints `{"ready": true}`. Then it runs one step for each line
`go` on standard input and prints `{"s": seconds}`; at `end` it prints its final line of JSON. A
driver starts several such commands and has each take a step per round.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any


def main(
    description: str | None,
    tokens: dict[str, int],
    build: Callable[[argparse.Namespace], Callable[[], float]],
) -> None:
    """Run one case and print one JSON line.

    Args:
      description: The command's description.
      tokens: The number of tokens that a step of each case reads or generates.
      build: Returns the step for the arguments; the step returns a number for comparison.
    """
    arguments = _arguments(description, list(tokens))
    # XLA sizes its thread pool by the processors that it may use.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    os.environ["JAX_PLATFORMS"] = "cpu"
    run = build(arguments)
    result = 0.0
    for _ in range(arguments.warmup):
        result = run()
    times, cpu_times = [], []

    def timed() -> None:
        nonlocal result
        start, cpu_start = time.perf_counter(), time.process_time()
        result = run()
        times.append(time.perf_counter() - start)
        cpu_times.append(time.process_time() - cpu_start)

    if arguments.lockstep:
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            if line.strip() != "go":
                break
            timed()
            print(json.dumps({"s": times[-1]}), flush=True)
    else:
        for _ in range(arguments.steps):
            timed()
    median = statistics.median(times)
    report = {
        "peer": "flaxzoo",
        "case": arguments.case,
        "ms": round(median * 1e3, 2),
        "ms_min": round(min(times) * 1e3, 2),
        "tokens_s": round(tokens[arguments.case] / median, 1),
        "cpu_s": round(statistics.median(cpu_times), 4),
        "rss_mb": peak_memory_mb(),
        "result": result,
    }
    print(json.dumps(report), flush=True)


def training_step(model: Any, objective: Any, batch: dict[str, Any]) -> Callable[[], float]:
    """Return a function that takes a train step with AdamW and returns its loss."""
    import jax
    import optax
    from flaxzoo import models, train

    tx = optax.adamw(1e-4, weight_decay=0.01)
    step = jax.jit(train.make_train_step(model.apply, objective, tx), donate_argnums=0)

    def init():
        return train.init_state(models.init_params(model, jax.random.key(0)), tx)

    state, rng = jax.jit(init)(), jax.random.key(1)

    def run() -> float:
        nonlocal state
        state, metrics = step(state, batch, rng)
        return float(metrics["loss"])

    return run


def _arguments(description: str | None, cases: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--case", choices=cases, required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lockstep", action="store_true")
    return parser.parse_args()


def peak_memory_mb() -> int:
    """Return the peak resident set size of this process."""
    with open("/proc/self/status") as lines:
        return round(next(int(x.split()[1]) for x in lines if x.startswith("VmHWM")) / 1024)

"""Times GPT-2 small: a training step, or greedy generation. Prints one JSON line.

    python tests/benchmarks/gpt2.py --case gpt2-step|gpt2-gen-1|gpt2-gen-8 [--lockstep]

Weights and tokens are random and seeded. A step is forward, backward and AdamW
with dropout 0.1, as flaxzoo's train step does it. With --lockstep it warms up,
prints {"ready": true}, then runs one step per line "go" on standard input,
answering {"s": seconds}; "end" prints the final line. So a driver can have
several implementations take turns on the same machine.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable

CASES = {  # name: (rows, prompt or row length, new tokens)
    "gpt2-step": (4, 256, 0),
    "gpt2-gen-1": (1, 32, 128),
    "gpt2-gen-8": (8, 32, 128),
}


def training_step(rows: int, length: int, dropout: float) -> Callable[[], float]:
    """One update of GPT-2 small on random tokens, through flaxzoo's own step."""
    import jax
    import numpy as np
    import optax
    from flaxzoo import models, train

    config = dataclasses.replace(models.preset("gpt2"), dropout_rate=dropout)
    model = models.create(config, models.Execution(remat="dots"))
    tx = optax.adamw(1e-4, weight_decay=0.01)
    step = jax.jit(train.make_train_step(model.apply, train.CAUSAL, tx), donate_argnums=0)
    ids = np.random.RandomState(0).randint(1000, 30000, (rows, length + 1)).astype(np.int32)
    batch = {
        "input_ids": ids[:, :-1],
        "labels": ids[:, 1:],
        "segment_ids": np.ones((rows, length), np.int32),
        "position_ids": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
    }

    def init():
        params = model.init(jax.random.key(0), input_ids=ids[:1, :1])["params"]
        return train.init_state(params, tx)

    state, rng = jax.jit(init)(), jax.random.key(1)

    def run() -> float:
        nonlocal state
        state, metrics = step(state, batch, rng)
        return float(metrics["loss"])

    return run


def generation(rows: int, length: int, new_tokens: int) -> Callable[[], float]:
    """Greedy continuation of random prompts by GPT-2 small."""
    import jax
    import numpy as np
    from flaxzoo import models

    model = models.create(models.preset("gpt2"), models.Execution(layers="separate"))
    prompts = np.random.RandomState(0).randint(1000, 30000, (rows, length)).tolist()
    init = jax.jit(lambda: model.init(jax.random.key(0), input_ids=np.ones((1, 1), np.int32)))
    generator = models.Generator(model, init()["params"])

    def run() -> float:
        blocks = generator.stream(
            prompts, max_new_tokens=new_tokens, sampling=models.Sampling(temperature=0)
        )
        tokens = np.concatenate(list(blocks), axis=1)
        assert tokens.shape == (rows, new_tokens), tokens.shape
        return float(tokens[0, -1])

    return run


def peak_memory_mb() -> int:
    """Peak resident set of this process."""
    with open("/proc/self/status") as lines:
        return round(next(int(x.split()[1]) for x in lines if x.startswith("VmHWM")) / 1024)


def main() -> None:
    """Runs one case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lockstep", action="store_true")
    arguments = parser.parse_args()
    # XLA sizes its thread pool by the processors it may use.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    os.environ["JAX_PLATFORMS"] = "cpu"
    rows, length, new_tokens = CASES[arguments.case]
    if new_tokens:
        run = generation(rows, length, new_tokens)
    else:
        run = training_step(rows, length, arguments.dropout)
    result = 0.0
    for _ in range(arguments.warmup):
        result = run()
    times = []

    def timed() -> None:
        nonlocal result
        start = time.perf_counter()
        result = run()
        times.append(time.perf_counter() - start)

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
    tokens = rows * (new_tokens or length)
    print(
        json.dumps(
            {
                "peer": "flaxzoo",
                "case": arguments.case,
                "ms": round(median * 1e3, 2),
                "ms_min": round(min(times) * 1e3, 2),
                "tokens_s": round(tokens / median, 1),
                "rss_mb": peak_memory_mb(),
                "result": result,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()

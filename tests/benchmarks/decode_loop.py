"""Compare two ways to generate: a compiled call per token, and a compiled loop over tokens.

    python tests/benchmarks/decode_loop.py [--batch-size 1] [--preset gpt2]

Both generate the same tokens, in turns. Prints one JSON line with the minima, in seconds. The
result decides `TOKENS_PER_CALL` in models/decoding/sample.py.
"""

import argparse
import json
import time

import jax
import numpy as np
from flaxzoo import models

TOKENS_PER_CALL = (1, 16)


def main() -> None:
    """Time both and print the minima."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument("--batch-size", "--rows", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    model = models.create(models.preset(arguments.preset), models.Execution(layers="separate"))
    init = jax.jit(lambda: model.init(jax.random.key(0), input_ids=np.ones((1, 1), np.int32)))
    generator = models.Generator(model, init()["params"])
    prompts = np.random.RandomState(0).randint(0, 1000, (arguments.batch_size, 32)).tolist()

    request = models.GenerationRequest(
        method=models.Sampling(0.0), max_new_tokens=arguments.new_tokens
    )

    def run(tokens_per_call: int) -> float:
        start = time.perf_counter()
        list(
            generator.stream(
                prompts,
                request,
                tokens_per_call=tokens_per_call,
            )
        )
        return time.perf_counter() - start

    seconds = {n: [] for n in TOKENS_PER_CALL}
    for _ in range(arguments.rounds + 1):
        for n, times in seconds.items():
            times.append(run(n))
    best = {f"{n} per call": round(min(times[1:]), 3) for n, times in seconds.items()}
    backend = jax.default_backend()
    print(json.dumps({"backend": backend, "batch_size": arguments.batch_size, "seconds": best}))


if __name__ == "__main__":
    main()

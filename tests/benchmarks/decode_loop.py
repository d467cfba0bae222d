"""Which is faster on this backend: one compiled call per token, or a compiled loop?

    python tests/benchmarks/decode_loop.py [--rows 1] [--preset gpt2]

Both generate the same tokens, in turns; prints one JSON line with the minima.
What is measured here decides `TOKENS_PER_CALL` in models/generation.py.
"""

import argparse
import json
import time

import jax
import numpy as np
from flaxzoo import models

TOKENS_PER_CALL = (1, 16)


def main() -> None:
    """Times both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    model = models.create(models.preset(arguments.preset), models.Execution(layers="separate"))
    init = jax.jit(lambda: model.init(jax.random.key(0), input_ids=np.ones((1, 1), np.int32)))
    generator = models.Generator(model, init()["params"])
    prompts = np.random.RandomState(0).randint(0, 1000, (arguments.rows, 32)).tolist()

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
    print(json.dumps({"backend": jax.default_backend(), "rows": arguments.rows, "seconds": best}))


if __name__ == "__main__":
    main()

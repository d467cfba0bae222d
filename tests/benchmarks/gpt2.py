"""Times GPT-2 small: a training step, or greedy generation. Prints one JSON line.

    python tests/benchmarks/gpt2.py --case gpt2-step|gpt2-gen-1|gpt2-gen-8 [--lockstep]

Weights and tokens are random and seeded. A step is forward, backward and AdamW
with dropout 0.1, as flaxzoo's train step does it. `lockstep` says how several
implementations take turns.
"""

import argparse
import dataclasses
from collections.abc import Callable

import lockstep

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
        return train.init_state(models.init_params(model, jax.random.key(0)), tx)

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
    params = jax.jit(lambda: models.init_params(model, jax.random.key(0)))()
    generator = models.Generator(model, params)
    request = models.GenerationRequest(method=models.Sampling(0.0), max_new_tokens=new_tokens)

    def run() -> float:
        blocks = generator.stream(prompts, request)
        tokens = np.concatenate(list(blocks), axis=1)
        assert tokens.shape == (rows, new_tokens), tokens.shape
        return float(tokens[0, -1])

    return run


def build(arguments: argparse.Namespace) -> Callable[[], float]:
    """The step of a case."""
    rows, length, new_tokens = CASES[arguments.case]
    if new_tokens:
        return generation(rows, length, new_tokens)
    return training_step(rows, length, arguments.dropout)


if __name__ == "__main__":
    tokens = {name: rows * (new or length) for name, (rows, length, new) in CASES.items()}
    lockstep.main(__doc__, tokens, build)

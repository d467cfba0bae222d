"""Time GPT-2 small: a train step, or greedy generation.

    python tests/benchmarks/gpt2.py --case gpt2-step|gpt2-gen-1|gpt2-gen-8 [--lockstep]

The case gpt2-gen-long writes 960 tokens, during which the cache grows.
Weights and tokens are random and seeded. A step is forward, backward and AdamW with dropout 0.1,
as flaxzoo's train step does it. Prints one JSON line; `lockstep.py` explains how several
implementations take turns.
"""

import argparse
import dataclasses
from collections.abc import Callable

import lockstep

CASES = {  # name: (batch size B, length T of sequences or prompts, new tokens)
    "gpt2-step": (4, 256, 0),
    "gpt2-gen-1": (1, 32, 128),
    "gpt2-gen-8": (8, 32, 128),
    "gpt2-gen-long": (1, 32, 960),  # the cache grows
}


def training_step(batch_size: int, length: int, dropout: float) -> Callable[[], float]:
    """Return a function that takes a train step of GPT-2 small and returns its loss."""
    import numpy as np
    from flaxzoo import models, train

    config = dataclasses.replace(models.preset("gpt2"), dropout_rate=dropout)
    model = models.create(config, models.Execution(remat="dots"))
    ids = np.random.RandomState(0).randint(1000, 30000, (batch_size, length + 1)).astype(np.int32)
    batch = {
        "input_ids": ids[:, :-1],
        "labels": ids[:, 1:],
        "segment_ids": np.ones((batch_size, length), np.int32),
        "position_ids": np.tile(np.arange(length, dtype=np.int32), (batch_size, 1)),
    }
    return lockstep.training_step(model, train.CAUSAL, batch)


def generation(batch_size: int, length: int, new_tokens: int) -> Callable[[], float]:
    """Return a function that continues random prompts greedily and returns the last token."""
    import jax
    import numpy as np
    from flaxzoo import models

    model = models.create(models.preset("gpt2"), models.Execution(layers="separate"))
    prompts = np.random.RandomState(0).randint(1000, 30000, (batch_size, length)).tolist()
    params = jax.jit(lambda: models.init_params(model, jax.random.key(0)))()
    generator = models.Generator(model, params)
    request = models.GenerationRequest(max_new_tokens=new_tokens)

    def run() -> float:
        blocks = generator.stream(prompts, request)
        tokens = np.concatenate(list(blocks), axis=1)
        assert tokens.shape == (batch_size, new_tokens), tokens.shape
        return float(tokens[0, -1])

    return run


def build(arguments: argparse.Namespace) -> Callable[[], float]:
    """Return the step of a case."""
    batch_size, length, new_tokens = CASES[arguments.case]
    if new_tokens:
        return generation(batch_size, length, new_tokens)
    return training_step(batch_size, length, arguments.dropout)


if __name__ == "__main__":
    tokens = {name: size * (new or length) for name, (size, length, new) in CASES.items()}
    lockstep.main(__doc__, tokens, build)

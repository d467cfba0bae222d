"""Times BERT-base: a pretraining step, or a forward pass. Prints one JSON line.

    python tests/benchmarks/bert.py --case bert-step|bert-step-512|bert-fwd [--lockstep]

Weights and tokens are random and seeded; no row is padded. A step is forward,
backward and AdamW with dropout 0.1 on both objectives, as flaxzoo's train step
does it: of each row 15 % of the positions, rounded up to a handsome number, are
projected on the vocabulary. `lockstep` says how several implementations take
turns.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import lockstep

CASES = {  # name: (rows, row length, masked positions)
    "bert-step": (8, 128, 20),
    "bert-step-512": (2, 512, 80),
    "bert-fwd": (8, 128, 0),
}


def batch(rows: int, length: int, masked: int) -> dict[str, Any]:
    """Arrays as the data of pretraining has them."""
    import numpy as np

    draw = np.random.RandomState(0)
    ids = draw.randint(1000, 30000, (rows, length)).astype(np.int32)
    types = np.tile(np.arange(length) >= length // 2, (rows, 1))
    given = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "token_type_ids": types.astype(np.int32),
    }
    if not masked:
        return given
    places = np.stack([np.sort(draw.permutation(length)[:masked]) for _ in range(rows)])
    return {
        **given,
        "masked_positions": places.astype(np.int32),
        "masked_labels": np.take_along_axis(ids, places, axis=1),
        "masked_weights": np.ones((rows, masked), np.int32),
        "next_sentence_label": draw.randint(0, 2, rows).astype(np.int32),
    }


def training_step(given: dict[str, Any], dropout: float) -> Callable[[], float]:
    """One update of BERT-base on random tokens, through flaxzoo's own step."""
    import jax
    import optax
    from flaxzoo import models, train

    config = dataclasses.replace(models.preset("bert-base"), dropout_rate=dropout)
    model = models.create(config, models.Execution(remat="dots"))
    tx = optax.adamw(1e-4, weight_decay=0.01)
    step = jax.jit(train.make_train_step(model.apply, train.PRETRAINING, tx), donate_argnums=0)

    def init():
        return train.init_state(models.init_params(model, jax.random.key(0)), tx)

    state, rng = jax.jit(init)(), jax.random.key(1)

    def run() -> float:
        nonlocal state
        state, metrics = step(state, given, rng)
        return float(metrics["loss"])

    return run


def forward_pass(given: dict[str, Any]) -> Callable[[], float]:
    """Hidden states of BERT-base, without a head."""
    import jax
    from flaxzoo import models

    config = dataclasses.replace(models.preset("bert-base"), head="none")  # type: ignore[call-arg]
    model = models.create(config)
    params = jax.jit(lambda: models.init_params(model, jax.random.key(0)))()

    @jax.jit
    def forward(params, given):
        return model.apply({"params": params}, **given).last_hidden_state.sum()

    return lambda: float(forward(params, given))


def build(arguments: argparse.Namespace) -> Callable[[], float]:
    """The step of a case."""
    given = batch(*CASES[arguments.case])
    if arguments.case == "bert-fwd":
        return forward_pass(given)
    return training_step(given, arguments.dropout)


if __name__ == "__main__":
    tokens = {name: rows * length for name, (rows, length, _) in CASES.items()}
    lockstep.main(__doc__, tokens, build)

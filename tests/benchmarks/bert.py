"""Time BERT-base: a pretraining step, or a forward pass.

    python tests/benchmarks/bert.py --case bert-step|bert-step-512|bert-fwd [--lockstep]

Weights and tokens are random and seeded; no sequence is padded. A step is forward, backward and
AdamW with dropout 0.1 on both objectives, as flaxzoo's train step does it. About 15 % of the
positions are masked tokens, and only those are projected on the vocabulary. Prints one JSON line;
`lockstep.py` explains how several implementations take turns.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import lockstep

CASES = {  # name: (batch size B, sequence length T, masked positions P)
    "bert-step": (8, 128, 20),
    "bert-step-512": (2, 512, 80),
    "bert-fwd": (8, 128, 0),
}


def batch(batch_size: int, length: int, num_masked: int) -> dict[str, Any]:
    """Make a batch [B, T] as the pretraining data has it, with P masked positions a sequence."""
    import numpy as np

    draw = np.random.RandomState(0)
    ids = draw.randint(1000, 30000, (batch_size, length)).astype(np.int32)
    types = np.tile(np.arange(length) >= length // 2, (batch_size, 1))
    inputs = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "token_type_ids": types.astype(np.int32),
    }
    if not num_masked:
        return inputs
    positions = np.stack(
        [np.sort(draw.permutation(length)[:num_masked]) for _ in range(batch_size)]
    )
    return {
        **inputs,
        "masked_positions": positions.astype(np.int32),
        "masked_labels": np.take_along_axis(ids, positions, axis=1),
        "masked_weights": np.ones((batch_size, num_masked), np.int32),
        "next_sentence_label": draw.randint(0, 2, batch_size).astype(np.int32),
    }


def training_step(inputs: dict[str, Any], dropout: float) -> Callable[[], float]:
    """Return a function that takes a train step of BERT-base and returns its loss."""
    from flaxzoo import models, train

    config = dataclasses.replace(models.preset("bert-base"), dropout_rate=dropout)
    model = models.create(config, models.Execution(remat="dots"))
    return lockstep.training_step(model, train.PRETRAINING, inputs)


def forward_pass(inputs: dict[str, Any]) -> Callable[[], float]:
    """Return a function that runs BERT-base without a head and returns the sum of its output."""
    import jax
    from flaxzoo import models

    config = dataclasses.replace(models.preset("bert-base"), head="none")  # type: ignore[call-arg]
    model = models.create(config)
    params = jax.jit(lambda: models.init_params(model, jax.random.key(0)))()

    @jax.jit
    def forward(params, inputs):
        return model.apply({"params": params}, **inputs).last_hidden_state.sum()

    return lambda: float(forward(params, inputs))


def build(arguments: argparse.Namespace) -> Callable[[], float]:
    """Return the step of a case."""
    inputs = batch(*CASES[arguments.case])
    if arguments.case == "bert-fwd":
        return forward_pass(inputs)
    return training_step(inputs, arguments.dropout)


if __name__ == "__main__":
    tokens = {name: size * length for name, (size, length, _) in CASES.items()}
    lockstep.main(__doc__, tokens, build)

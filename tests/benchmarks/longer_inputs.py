"""The loss of each token by its position, up to five times the trained length.

    python tests/benchmarks/longer_inputs.py [--steps 1000]

Trains a small byte-level GPT on the built-in text once for each kind of position, on rows of 64
bytes, and scores held-out rows of 320. Prints one JSON line per kind: the mean loss (nats per
byte) in each block of 64 positions. A learned table cannot be read beyond its end; here it has
320 rows from the start, of which training sees the first 64. The others have no table.

`trained` and `losses_by_position` serve notebooks as well.
"""

import argparse
import dataclasses
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flaxzoo import data, models, train

TRAINED, LONGEST = 64, 320
KINDS: dict[str, dict[str, Any]] = {
    "learned": {"positions": "learned", "max_length": LONGEST},
    "sinusoidal": {"positions": "sinusoidal"},
    "rotary": {"positions": "rotary"},
    "relative": {"positions": "relative"},
    "none": {"positions": "none"},
}


def text_bytes() -> tuple[np.ndarray, np.ndarray]:
    """Returns the built-in text as bytes: nine tenths to train on, and the rest."""
    text = "\n\n".join(data.load_whole("builtin:python-docs"))
    whole = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    return whole[: len(whole) * 9 // 10], whole[len(whole) * 9 // 10 :]


def config_of(kind: str) -> models.GPTConfig:
    """Returns the small GPT of a kind of position."""
    config = models.GPTConfig(
        vocab_size=256,
        max_length=TRAINED,
        num_layers=2,
        d_model=64,
        num_heads=4,
        dropout_rate=0.0,
        tie_output=False,
    )
    return dataclasses.replace(config, **KINDS[kind])


def trained(
    config: models.GPTConfig, ids: np.ndarray, *, steps: int, batch_size: int = 16, seed: int = 0
) -> dict[str, Any]:
    """Trains a model on random rows of 64 tokens, and returns its parameters."""
    model = models.create(config)
    tx = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps))
    step = jax.jit(train.make_train_step(model.apply, train.CAUSAL, tx), donate_argnums=0)
    whole, rng = np.ones((batch_size, TRAINED), np.int32), jax.random.key(seed)  # one document each
    params = jax.jit(lambda key: models.init_params(model, key))(rng)
    # Tokens, and learned positions, of the size of a sinusoid: beside one, the usual 0.02 would
    # take long to be seen.
    for name in {"token_embedding", "position_embedding"} & params.keys():
        params[name]["embedding"] *= 50
    state, draw = train.init_state(params, tx), np.random.default_rng(seed)
    for _ in range(steps):
        starts = draw.integers(0, len(ids) - TRAINED - 1, batch_size)
        rows = ids[starts[:, None] + np.arange(TRAINED + 1)]
        batch = {"input_ids": rows[:, :-1], "labels": rows[:, 1:], "segment_ids": whole}
        state, _ = step(state, batch, rng)
    return state.params


def losses_by_position(
    config: models.GPTConfig, params: dict[str, Any], ids: np.ndarray, *, num_rows: int = 64
) -> np.ndarray:
    """Returns the mean loss in nats of the token after each of the positions, float32[320]."""
    model = models.create(config)
    starts = np.linspace(0, len(ids) - LONGEST - 1, num_rows).astype(int)
    rows = ids[starts[:, None] + np.arange(LONGEST + 1)]

    @jax.jit
    def losses(params: dict[str, Any], rows: jax.Array) -> jax.Array:
        log_probs = jax.nn.log_softmax(model.apply({"params": params}, rows[:, :-1]).logits)
        return -jnp.take_along_axis(log_probs, rows[:, 1:, None], axis=-1)[..., 0].mean(0)

    return np.asarray(losses(params, jnp.asarray(rows)))


def main() -> None:
    """Trains and scores each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    arguments = parser.parse_args()
    training, held_out = text_bytes()
    for kind in arguments.kinds:
        start, config = time.perf_counter(), config_of(kind)
        params = trained(config, training, steps=arguments.steps)
        losses = losses_by_position(config, params, held_out)
        blocks = losses.reshape(-1, TRAINED).mean(1)
        names = [f"{i * TRAINED + 1}-{(i + 1) * TRAINED}" for i in range(len(blocks))]
        print(
            json.dumps(
                {
                    "positions": kind,
                    "parameters": train.count_parameters(params),
                    "loss": {n: round(float(x), 3) for n, x in zip(names, blocks, strict=True)},
                    "seconds": round(time.perf_counter() - start),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()

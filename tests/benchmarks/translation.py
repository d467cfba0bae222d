"""Times the original Transformer: a training step, or beam search. Prints one JSON line.

    python tests/benchmarks/translation.py --case marian-step|marian-beam-1|marian-beam-8
                                           [--lockstep]

Weights and tokens are random and seeded; no row is padded. Six layers each, 512
wide, 32,000 tokens, shaped as Marian's models: biases in attention, and one for
each token. A step is forward, backward and AdamW with dropout 0.1, of attention
weights and inside the feed-forward layers too. A search has four beams, and
none of them ends. `lockstep` says how several implementations take turns.
"""

import argparse
from collections.abc import Callable

import lockstep

CASES = {  # name: (rows, source tokens, target tokens, beams)
    "marian-step": (16, 64, 64, 0),
    "marian-beam-1": (1, 64, 64, 4),
    "marian-beam-8": (8, 64, 64, 4),
}
START, NEVER = 31999, 0


def config(dropout: float):
    """The original Transformer's base size in Marian's shape."""
    from flaxzoo import models

    return models.EncoderDecoderConfig(
        vocab_size=32000,
        max_length=512,
        num_layers=6,
        d_model=512,
        num_heads=8,
        d_ff=2048,
        norm_eps=1e-5,
        dropout_rate=dropout,
        attention_dropout_rate=dropout,
        activation_dropout_rate=dropout,
        attention_bias=True,
        position_layout="halves",
        output_bias=True,
    )


def training_step(rows: int, source: int, target: int, dropout: float) -> Callable[[], float]:
    """One update on random tokens, through flaxzoo's own step."""
    import jax
    import numpy as np
    import optax
    from flaxzoo import models, train

    model = models.create(config(dropout), models.Execution(remat="dots"))
    tx = optax.adamw(1e-4, weight_decay=0.01)
    objective = train.translation(label_smoothing=0.0)
    step = jax.jit(train.make_train_step(model.apply, objective, tx), donate_argnums=0)
    draw = np.random.RandomState(0)
    labels = draw.randint(1000, 30000, (rows, target)).astype(np.int32)
    batch = {
        "input_ids": draw.randint(1000, 30000, (rows, source)).astype(np.int32),
        "segment_ids": np.ones((rows, source), np.int32),
        "position_ids": np.tile(np.arange(source, dtype=np.int32), (rows, 1)),
        "decoder_input_ids": np.pad(labels[:, :-1], ((0, 0), (1, 0)), constant_values=START),
        "decoder_segment_ids": np.ones((rows, target), np.int32),
        "decoder_position_ids": np.tile(np.arange(target, dtype=np.int32), (rows, 1)),
        "labels": labels,
    }

    def init():
        return train.init_state(models.init_params(model, jax.random.key(0)), tx)

    state, rng = jax.jit(init)(), jax.random.key(1)

    def run() -> float:
        nonlocal state
        state, metrics = step(state, batch, rng)
        return float(metrics["loss"])

    return run


def search(rows: int, source: int, target: int, beams: int) -> Callable[[], float]:
    """Beam search for targets of random sources, the encoder included."""
    import jax
    import numpy as np
    from flaxzoo import models

    model = models.create(config(0.0), models.Execution(layers="separate"))
    params = jax.jit(lambda: models.init_params(model, jax.random.key(0)))()
    translator = models.Generator(model, params)
    sources = np.random.RandomState(0).randint(1000, 30000, (rows, source)).tolist()
    request = models.GenerationRequest(
        method=models.BeamSearch(num_beams=beams),
        max_new_tokens=target,
        max_extra_tokens=50,
        banned=((NEVER,),),
        start_id=START,
        eos_ids=(NEVER,),
    )

    def run() -> float:
        found = translator.search(sources, request)
        assert all(len(best.tokens) == target for [best] in found)
        return found[0][0].score

    return run


def build(arguments: argparse.Namespace) -> Callable[[], float]:
    """The step of a case."""
    rows, source, target, beams = CASES[arguments.case]
    if beams:
        return search(rows, source, target, beams)
    return training_step(rows, source, target, arguments.dropout)


if __name__ == "__main__":
    tokens = {name: rows * target for name, (rows, _, target, _) in CASES.items()}
    lockstep.main(__doc__, tokens, build)

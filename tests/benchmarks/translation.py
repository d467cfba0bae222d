"""Time the original Transformer: a train step, or beam search.

    python tests/benchmarks/translation.py --case marian-step|marian-beam-1|marian-beam-8
                                           [--lockstep]

Weights and tokens are random and seeded; no sequence is padded. Encoder and decoder have six
layers of width 512 and a vocabulary of 32,000, with Marian's biases in attention and at the
output. A step is forward, backward and AdamW with dropout 0.1, also of attention weights and
inside the feed-forward layers. A search has four beams, none of which ends before the maximum
length. Prints one JSON line; `lockstep.py` explains how several implementations take turns.
"""

import argparse
from collections.abc import Callable

import lockstep

CASES = {  # name: (batch size B, source length, target length, beams)
    "marian-step": (16, 64, 64, 0),
    "marian-beam-1": (1, 64, 64, 4),
    "marian-beam-8": (8, 64, 64, 4),
}
START, END = 31999, 0


def config(dropout: float):
    """Return the base size of the original Transformer as Marian models have it."""
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


def training_step(batch_size: int, source: int, target: int, dropout: float) -> Callable[[], float]:
    """Return a function that takes a train step and returns its loss."""
    import numpy as np
    from flaxzoo import models, train

    model = models.create(config(dropout), models.Execution(remat="dots"))
    draw = np.random.RandomState(0)
    labels = draw.randint(1000, 30000, (batch_size, target)).astype(np.int32)
    batch = {
        "input_ids": draw.randint(1000, 30000, (batch_size, source)).astype(np.int32),
        "segment_ids": np.ones((batch_size, source), np.int32),
        "position_ids": np.tile(np.arange(source, dtype=np.int32), (batch_size, 1)),
        "decoder_input_ids": np.pad(labels[:, :-1], ((0, 0), (1, 0)), constant_values=START),
        "decoder_segment_ids": np.ones((batch_size, target), np.int32),
        "decoder_position_ids": np.tile(np.arange(target, dtype=np.int32), (batch_size, 1)),
        "labels": labels,
    }
    return lockstep.training_step(model, train.seq2seq(), batch)


def search(batch_size: int, source: int, target: int, beams: int) -> Callable[[], float]:
    """Return a function that translates random sources, encoder included, and returns a score."""
    import jax
    import numpy as np
    from flaxzoo import models

    model = models.create(config(0.0), models.Execution(layers="separate"))
    params = jax.jit(lambda: models.init_params(model, jax.random.key(0)))()
    translator = models.Generator(model, params)
    sources = np.random.RandomState(0).randint(1000, 30000, (batch_size, source)).tolist()
    request = models.GenerationRequest(
        num_beams=beams,
        length_penalty=0.6,
        penalty_form="gnmt",
        early_stopping="never",
        max_new_tokens=target,
        max_extra_tokens=50,
        bad_words_ids=((END,),),
        decoder_start_token_id=START,
        eos_token_id=(END,),
    )

    def run() -> float:
        found = translator.search(sources, request)
        assert all(len(best.tokens) == target for [best] in found)
        return found[0][0].score

    return run


def build(arguments: argparse.Namespace) -> Callable[[], float]:
    """Return the step of a case."""
    batch_size, source, target, beams = CASES[arguments.case]
    if beams:
        return search(batch_size, source, target, beams)
    return training_step(batch_size, source, target, arguments.dropout)


if __name__ == "__main__":
    tokens = {name: size * target for name, (size, _, target, _) in CASES.items()}
    lockstep.main(__doc__, tokens, build)

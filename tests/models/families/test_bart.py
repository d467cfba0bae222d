"""Properties of every BART: its heads and published sizes.

`test_encoder_laws.py` has the laws of all models with an encoder.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.models.encoder_decoders.bart import PRESETS, BartConfig
from flaxzoo.models.init import parameter_shapes

CONFIG = BartConfig(
    vocab_size=32,
    max_length=16,
    num_layers=2,
    num_decoder_layers=3,
    d_model=16,
    num_heads=4,
    decoder_num_heads=2,
    d_ff=24,
    norm_position="pre",
    scale_embedding=True,
    output_bias=True,
    init_std=0.3,
)
MODEL = models.create(CONFIG)


def test_labels_come_from_the_state_at_the_last_end(assert_close):
    config = dataclasses.replace(CONFIG, norm_position="post", tie_output=False)
    model = models.create(config.with_head("sequence_classification", ("a", "b")))
    params = models.init_params(model, jax.random.key(0))
    assert params["head"]["classifier"]["kernel"].shape == (16, 2)
    assert not params.keys() & {"output_bias", "output_embedding"}
    ids = np.array([[5, 2, 6, 7, 2, 9]])
    shifted = np.array([[2, 5, 2, 6, 7, 2]])
    output = model.apply({"params": params}, ids)
    pooled = output.last_hidden_state[:, 4] @ params["pooler"]["kernel"] + params["pooler"]["bias"]
    assert_close(output.pooler_output, jnp.tanh(pooled))
    assert_close(
        output.logits, model.apply({"params": params}, ids, decoder_input_ids=shifted).logits
    )


def test_a_target_is_required_to_predict_next_tokens():
    params = jax.eval_shape(lambda: models.init_params(MODEL, jax.random.key(0)))
    with pytest.raises(ValueError, match=r"target .*decoder_input_ids"):
        MODEL.apply({"params": params}, np.array([[5, 6]]))


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_count(name):
    """Two tables, positions behind two unused rows, and no bias of logits, as published."""
    preset = PRESETS[name]
    c = preset.config
    V, L, D, F = c.vocab_size, c.num_layers, c.d_model, c.feed_forward_dim
    attention, feed_forward = 4 * D * (D + 1), 2 * D * F + D + F
    layers = L * (3 * attention + 2 * feed_forward + 5 * 2 * D)
    norms = 2 * 2 * D * (2 if c.norm_position == "pre" else 1)
    total = V * D + 2 * 1026 * D + layers + norms
    shapes = jax.tree.leaves(parameter_shapes(models.create(c)))
    assert sum(x.size for x in shapes) == total
    assert total / 1e6 == pytest.approx(float(preset.published[:-1]), rel=0.02)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"positions": "sinusoidal"}, "positions 'sinusoidal'"),
        ({"head": "causal_lm"}, "head 'causal_lm' .*seq2seq_lm"),
        ({"head": "sequence_classification"}, "no labels"),
        ({"head": "question_answering"}, "output_bias .*tie_output"),
        (
            {"head": "question_answering", "output_bias": False, "end_id": 32},
            "end_id 32 .*vocabulary",
        ),
        ({"classifier_dropout": 1.0}, "classifier_dropout must .*1.0"),
    ],
)
def test_bad_configurations(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **fields)

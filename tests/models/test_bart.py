"""Properties of every BART: its heads, packed rows, the cache, and how it is run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models, train
from flaxzoo.models.encoder_decoders.bart import PRESETS, BartConfig
from flaxzoo.models.init import parameter_shapes
from flaxzoo.train.distributed import sharding

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
DRAW = np.random.default_rng(0)
INPUTS = {
    "input_ids": DRAW.integers(0, 32, (8, 14)),
    "decoder_input_ids": DRAW.integers(0, 32, (8, 11)),
}
MODEL = models.create(CONFIG)


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda: models.init_params(MODEL, jax.random.key(0)))()


def logits_of(params, execution=models.Execution(), **inputs):
    model = models.create(CONFIG, execution)
    return np.asarray(jax.jit(lambda p, i: model.apply({"params": p}, **i).logits)(params, inputs))


@pytest.fixture(scope="module")
def logits(params):
    return logits_of(params, **INPUTS)


@pytest.mark.slow
def test_separate_layers_and_eight_devices_compute_the_same(params, logits, assert_close):
    _, separate = models.unstack_layers(MODEL, params)
    assert_close(logits_of(separate, models.Execution(layers="separate"), **INPUTS), logits)
    mesh = sharding.make_mesh(train.MeshConfig(data=2, fsdp=2, tensor=2))
    apply = sharding.constrain_activations(MODEL.apply, mesh)
    placed = jax.device_put(params, sharding.parameter_shardings(params, mesh))
    inputs = {
        name: jax.device_put(x, sharding.batch_sharding(mesh, x.shape))
        for name, x in INPUTS.items()
    }
    assert_close(jax.jit(lambda p, i: apply({"params": p}, **i).logits)(placed, inputs), logits)


@pytest.mark.slow
def test_cached_calls_equal_a_full_call(params, logits, assert_close):
    """The target is read in two calls; the first projects the source for both."""
    cache = models.init_cache(CONFIG, models.Execution(), 8, 11)
    apply = jax.jit(
        lambda target, cache: MODEL.apply(
            {"params": params}, INPUTS["input_ids"], decoder_input_ids=target, cache=cache
        )
    )
    found = []
    for start, end in ((0, 10), (10, 11)):
        output = apply(INPUTS["decoder_input_ids"][:, start:end], cache)
        cache, found = output.cache, [*found, output.logits]
    assert_close(np.concatenate(found, axis=1), logits)


@pytest.mark.slow
def test_packed_pairs_equal_pairs_alone(params, assert_close):
    source, target = (x[:1] for x in INPUTS.values())
    packed = logits_of(
        params,
        input_ids=source,
        decoder_input_ids=target,
        segment_ids=np.array([[1] * 5 + [2] * 7 + [0] * 2]),
        decoder_segment_ids=np.array([[1] * 6 + [2] * 4 + [0]]),
    )
    here, there = slice(5, 12), slice(6, 10)
    alone = logits_of(params, input_ids=source[:, here], decoder_input_ids=target[:, there])
    assert_close(packed[:, there], alone)


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


def test_a_target_is_required_to_predict_next_tokens(params):
    with pytest.raises(ValueError, match="there is no target: give decoder_input_ids"):
        MODEL.apply({"params": params}, INPUTS["input_ids"])


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
        ({"positions": "sinusoidal"}, "none of a BART's, which are learned"),
        ({"head": "causal_lm"}, "head 'causal_lm' is unknown: choose seq2seq_lm"),
        ({"head": "sequence_classification"}, "has no labels: give at least one name"),
        ({"head": "question_answering"}, "writes no tokens: leave output_bias and tie_output out"),
        (
            {"head": "question_answering", "output_bias": False, "end_id": 32},
            "end_id 32 is not within the vocabulary",
        ),
        ({"classifier_dropout": 1.0}, r"classifier_dropout 1.0 is not in \[0, 1\)"),
    ],
)
def test_bad_configurations(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **fields)

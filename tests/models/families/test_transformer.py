"""Options of the Transformer; `test_encoder_laws.py` has its laws."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.models.init import parameter_shapes

SIZES = {"vocab_size": 29, "max_length": 16, "num_layers": 2, "d_model": 16, "num_heads": 4}
OTHERS = {
    "published": {},
    "pre-norm": {"norm_position": "pre"},
    "learned": {"positions": "learned"},
    "asymmetric": {
        "num_decoder_layers": 3,
        "decoder_num_heads": 2,
        "decoder_d_ff": 20,
        "d_k": 3,
        "attention_bias": True,
    },
    "primer": {
        "head_convolution": 3,
        "activation": "relu_squared",
        "d_v": 5,
        "scale_scores": False,
        "norm_affine": False,
        "residual_scalar": True,
    },
    "three tables": {
        "share_embeddings": False,
        "source_vocab_size": 34,
        "tie_output": False,
        "output_bias": True,
        "activation": "silu",
    },
}


def config_of(**fields):
    return models.LectureTransformerConfig(**{**SIZES, "dropout_rate": 0.0, **fields})


@functools.cache
def make(layers="scan", remat="none", **fields):
    """A model with no parameter at its initial value, and `apply(**inputs)`."""
    config = config_of(**fields)
    stacked = models.create(config, models.Execution(remat=remat))
    noise = np.random.RandomState(0)

    def value(path, shape):
        x = 0.3 * noise.standard_normal(shape.shape).astype(np.float32)
        return jnp.asarray(x + (path[-1].key == "scale"))

    model = stacked
    params = jax.tree_util.tree_map_with_path(value, parameter_shapes(stacked))
    if layers == "separate":
        model, params = models.unstack_layers(stacked, params)
    apply = jax.jit(model.apply, static_argnames="output_attentions")
    return model, params, lambda **inputs: apply({"params": params}, **inputs)


def draw(rows, length, seed=0):
    return np.random.RandomState(seed).randint(1, 29, (rows, length)).astype(np.int32)


def pair(rows=2, source=7, target=6):
    return {"input_ids": draw(rows, source), "decoder_input_ids": draw(rows, target, 1)}


@pytest.mark.parametrize("name", OTHERS)
def test_targets_see_no_later_token_and_all_of_the_source(name):
    _, _, apply = make(**OTHERS[name])
    given = pair()
    before = np.asarray(apply(**given).logits)
    given["decoder_input_ids"][:, 4] += 1
    after = np.asarray(
        apply(**{**given, "decoder_input_ids": given["decoder_input_ids"] % 29}).logits
    )
    np.testing.assert_array_equal(after[:, :4], before[:, :4])
    assert (np.abs(after[:, 4:] - before[:, 4:]).max(axis=(0, 2)) > 1e-3).all()
    given = pair()
    given["input_ids"][:, -1] = 0
    assert (np.abs(apply(**given).logits - before).max(axis=(0, 2)) > 1e-3).all()


def test_encoder_outputs_may_be_passed():
    _, _, apply = make()
    given = pair()
    full = apply(**given)
    again = apply(
        encoder_outputs=full.encoder_last_hidden_state,
        decoder_input_ids=given["decoder_input_ids"],
    )
    np.testing.assert_allclose(again.logits, full.logits, atol=1e-6)


def test_a_mask_for_each_token_equals_the_causal_mask():
    _, _, apply = make()
    given = pair()
    causal = np.tril(np.ones((6, 6), bool))[None].repeat(2, 0)
    explicit = apply(
        **given, decoder_attention_mask=causal, decoder_position_ids=np.arange(6)[None]
    )
    np.testing.assert_allclose(explicit.logits, apply(**given).logits, atol=1e-6)


def test_attention_weights():
    model, _, apply = make(**OTHERS["asymmetric"])
    given = {**pair(), "attention_mask": (np.arange(7) < [[7], [5]]).astype(np.int32)}
    output = apply(**given, output_attentions=True)
    assert output.encoder_attentions.shape == (2, 2, 4, 7, 7)
    assert output.decoder_attentions.shape == (3, 2, 2, 6, 6)
    assert output.cross_attentions.shape == (3, 2, 2, 6, 7)
    np.testing.assert_allclose(output.cross_attentions.sum(-1), 1, atol=1e-5)
    assert (output.cross_attentions[:, 1, :, :, 5:] == 0).all()
    assert apply(**given).cross_attentions is None
    assert model.config.decoder.head_dim == 8


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "dots"])
def test_dropout_belongs_to_a_row_and_survives_remat(remat):
    fields = {"attention_dropout_rate": 0.2, "activation_dropout_rate": 0.2}
    model, params, _ = make(remat=remat, dropout_rate=0.3, **fields)
    keys = models.row_keys(jax.random.key(1), 2)
    given = pair()

    def loss(params, given, keys):
        return jnp.sum(model.apply({"params": params}, **given, rng=keys).logits ** 2)

    run = jax.jit(jax.value_and_grad(loss))
    both, gradient = run(params, given, keys)
    rows = [
        run(params, {k: x[i : i + 1] for k, x in given.items()}, keys[i : i + 1]) for i in (0, 1)
    ]
    np.testing.assert_allclose(both, sum(float(x) for x, _ in rows), rtol=1e-5)
    summed = jax.tree.map(jnp.add, rows[0][1], rows[1][1])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-2), gradient, summed
    )
    other, _ = run(params, given, models.row_keys(jax.random.key(2), 2))
    assert abs(float(other) - float(both)) > 1e-2


def test_positions_in_two_layouts():
    # Three positions of width 4: wavelengths 2π and 2π · 100.
    expected = [
        [0, 1, 0, 1],
        [math.sin(1), math.cos(1), math.sin(0.01), math.cos(0.01)],
        [math.sin(2), math.cos(2), math.sin(0.02), math.cos(0.02)],
    ]
    table = models.sinusoidal_positions(3, 4)
    np.testing.assert_allclose(table, expected, atol=1e-7)
    halves = models.sinusoidal_positions(3, 4, layout="halves")
    np.testing.assert_array_equal(halves, table[:, [0, 2, 1, 3]])
    odd = models.sinusoidal_positions(3, 5, layout="halves")
    np.testing.assert_array_equal(odd, models.sinusoidal_positions(3, 5)[:, [0, 2, 4, 1, 3]])


def test_the_base_and_the_scale_of_embeddings_matter():
    given = pair()
    logits = [
        np.asarray(make(**fields)[2](**given).logits)
        for fields in ({}, {"position_base": 100.0}, {"scale_embedding": False})
    ]
    assert np.abs(logits[0] - logits[1]).max() > 1e-3
    assert np.abs(logits[0] - logits[2]).max() > 1e-3


@pytest.mark.slow
def test_initial_values():
    config = config_of(vocab_size=500, d_model=64, d_ff=256, output_bias=True)
    params = jax.jit(lambda: models.init_params(models.create(config), jax.random.key(0)))()
    assert np.std(params["token_embedding"]["embedding"]) == pytest.approx(1 / 8, rel=0.02)
    layer = params["decoder"]["layers"]
    square, up = math.sqrt(6 / 128), math.sqrt(6 / 320)
    for kernel, limit in (
        (layer["cross_attention"]["query"]["kernel"], square),
        (layer["attention"]["output"]["kernel"], square),
        (layer["feed_forward"]["up"]["kernel"], up),
        (layer["feed_forward"]["down"]["kernel"], up),
    ):
        assert limit * 0.99 < np.abs(kernel).max() <= limit
        assert np.std(kernel) == pytest.approx(limit / math.sqrt(3), rel=0.03)
    assert not np.any(params["output_bias"])
    # Logits begin with about unit variance: √D · 1/√D · a normalised vector.
    logits = models.create(config).apply({"params": params}, **pair()).logits
    assert 0.5 < np.std(logits) < 2
    normal = dataclasses.replace(config, init_std=0.05)
    params = jax.jit(lambda: models.init_params(models.create(normal), jax.random.key(0)))()
    kernel = params["encoder"]["layers"]["attention"]["query"]["kernel"]
    assert np.std(kernel) == pytest.approx(0.05, rel=0.03)


def paths(config):
    leaves = jax.tree_util.tree_leaves_with_path(parameter_shapes(models.create(config)))
    return {"/".join(entry.key for entry in path) for path, _ in leaves}


def test_where_parameters_lie():
    assert {name.split("/")[0] for name in paths(config_of())} == {
        *("token_embedding", "encoder", "decoder")
    }
    assert paths(config_of(**OTHERS["three tables"])) - paths(config_of()) == {
        *("source_embedding/embedding", "output_embedding/embedding", "output_bias")
    }
    assert paths(config_of(positions="learned", norm_position="pre")) - paths(config_of()) == {
        f"{side}/{name}"
        for side in ("encoder", "decoder")
        for name in ("position_embedding/embedding", "final_norm/scale", "final_norm/bias")
    }


def test_configuration_round_trip():
    config = config_of(**OTHERS["three tables"])
    fields = models.config_to_dict(config)
    assert fields["architecture"] == "lecture_transformer"
    assert models.config_from_dict(fields) == config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decoder_num_heads": 3}, "d_model 16 .*decoder_num_heads 3"),
        ({"d_k": 0}, "d_k must .*0"),
        ({"num_decoder_layers": 0}, "num_decoder_layers must .*0"),
        ({"attention_dropout_rate": 1.0}, "attention_dropout_rate must .*1.0"),
        ({"position_base": 0.0}, "position_base must .*0.0"),
        ({"source_vocab_size": 9}, "source_vocab_size 9 .*separate"),
    ],
)
def test_refused_configurations(fields, message):
    with pytest.raises(ValueError, match=message):
        config_of(**fields)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": None}, "source .*input_ids"),
        ({"input_ids": draw(2, 17)}, "17 tokens .*max_length 16"),
        ({"decoder_input_ids": draw(2, 17)}, "17 tokens .*max_length 16"),
        ({"segment_ids": np.ones((2, 7), np.int32)}, "one side"),
        ({"attention_mask": np.ones((2, 6), np.int32)}, "attention_mask .*6 columns .*7"),
        (
            {
                "input_ids": None,
                "encoder_outputs": np.ones((2, 3, 16), np.float32),
                "attention_mask": np.ones((2, 5), np.int32),
            },
            "attention_mask .*5 columns .*3 encoded",
        ),
        ({"decoder_attention_mask": np.ones((2, 6, 6), bool)}, "decoder_attention_mask"),
    ],
)
def test_refused_inputs(changes, message):
    model = models.create(config_of(positions="learned"))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: model.init(jax.random.key(0), **{**pair(), **changes}))

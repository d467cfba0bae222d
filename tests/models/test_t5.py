"""Properties of every T5: distances on both sides, packed rows, the cache, and how it is run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models, train
from flaxzoo.models.encoder_decoders.t5 import PRESETS, SIZES, T5Config
from flaxzoo.models.init import parameter_shapes
from flaxzoo.train.distributed import sharding

CONFIG = T5Config(
    vocab_size=32,
    max_length=16,
    num_layers=2,
    num_decoder_layers=3,
    d_model=16,
    num_heads=4,
    d_head=6,
    d_ff=24,
    gated=True,
    position_buckets=8,
    position_distance=12,
    init_std=0.5,
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


def loss(apply, params, inputs):
    """With dropout, so that every key of it is the same in every execution."""
    rng = models.row_keys(jax.random.key(1), 8)
    return jnp.mean(jnp.square(apply({"params": params}, **inputs, rng=rng).logits))


@pytest.fixture(scope="module")
def gradients(params):
    return jax.jit(jax.grad(lambda p: loss(MODEL.apply, p, INPUTS)))(params)


@pytest.mark.slow
def test_every_execution_computes_the_same(params, gradients, assert_close):
    """Separate layers, and activations that the backward pass computes again."""
    _, separate = models.unstack_layers(MODEL, params)
    found = logits_of(separate, models.Execution(layers="separate"), **INPUTS)
    assert_close(found, logits_of(params, **INPUTS))
    model = models.create(CONFIG, models.Execution(remat="full"))
    again = jax.jit(jax.grad(lambda p: loss(model.apply, p, INPUTS)))(params)
    jax.tree.map(assert_close, again, gradients)


@pytest.mark.slow
def test_eight_devices_compute_the_same(params, gradients, assert_close):
    mesh = sharding.make_mesh(train.MeshConfig(data=2, fsdp=2, tensor=2))
    apply = sharding.constrain_activations(MODEL.apply, mesh)
    placed = jax.device_put(params, sharding.parameter_shardings(params, mesh))
    inputs = {
        name: jax.device_put(x, sharding.batch_sharding(mesh, x.shape))
        for name, x in INPUTS.items()
    }
    found = jax.jit(jax.grad(lambda p, i: loss(apply, p, i)))(placed, inputs)
    jax.tree.map(assert_close, found, gradients)


@pytest.mark.slow
def test_cached_calls_equal_a_full_call(params, assert_close):
    """The target is read in three calls; the first projects the source for all of them."""
    mask = np.ones((8, 14), np.int32)
    mask[0, 9:] = 0
    full = logits_of(params, **INPUTS, attention_mask=mask)
    cache = models.init_cache(CONFIG, models.Execution(), 8, 11)
    assert cache.layers.key.shape == (3, 8, 4, 6, 11)
    apply = jax.jit(
        lambda target, cache: MODEL.apply(
            {"params": params}, INPUTS["input_ids"], mask, decoder_input_ids=target, cache=cache
        )
    )
    found = []
    for start, end in ((0, 5), (5, 6), (6, 11)):
        output = apply(INPUTS["decoder_input_ids"][:, start:end], cache)
        cache, found = output.cache, [*found, output.logits]
    assert_close(np.concatenate(found, axis=1), full)


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
    for here, there in ((slice(5), slice(6)), (slice(5, 12), slice(6, 10))):
        alone = logits_of(params, input_ids=source[:, here], decoder_input_ids=target[:, there])
        assert_close(packed[:, there], alone)


def test_only_distances_matter_and_no_later_token(params, assert_close):
    moved = {
        "position_ids": np.arange(14)[None] + 9,
        "decoder_position_ids": np.arange(11)[None] + 90,
    }
    expected = logits_of(params, **INPUTS)
    assert_close(logits_of(params, **INPUTS, **moved), expected)
    other = INPUTS["decoder_input_ids"].copy()
    other[:, 7:] = 31 - other[:, 7:]
    found = logits_of(params, **{**INPUTS, "decoder_input_ids": other})
    assert_close(found[:, :7], expected[:, :7])
    assert np.abs(found[:, 7:] - expected[:, 7:]).max() > 0.1


def test_initial_kernels_are_those_of_the_authors():
    """Queries are smaller by √H, as scores are not divided by it."""
    config = T5Config(vocab_size=99, num_layers=8, d_model=64, num_heads=4, d_head=25)
    params = jax.jit(lambda: models.init_params(models.create(config), jax.random.key(0)))()
    layer, table = params["decoder"]["layers"], params["token_embedding"]["embedding"]
    found = [np.std(layer["attention"][name]["kernel"]) for name in ("query", "key", "output")]
    found += [np.std(layer["feed_forward"][name]["kernel"]) for name in ("up", "down")]
    np.testing.assert_allclose(found, [1 / 40, 1 / 8, 1 / 10, 1 / 8, 1 / 16], rtol=0.03)
    assert abs(np.std(table) - 1) < 0.03


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_count(name):
    preset = PRESETS[name]
    kind, size = name.rsplit("-", 1)
    _, L, D, N, H, F = SIZES[kind][size]
    first = kind == "t5"
    V = 250_112 if kind == "mt5" else 32_128
    attention, feed_forward = 4 * D * N * H, (2 if first else 3) * D * F
    layers = L * (3 * attention + 2 * feed_forward + 5 * D)
    total = (1 if first else 2) * V * D + layers + 2 * 32 * N + 2 * D
    shapes = jax.tree.leaves(parameter_shapes(models.create(preset.config)))
    assert sum(x.size for x in shapes) == total
    number, unit = float(preset.published[:-1]), {"M": 1e6, "B": 1e9}[preset.published[-1]]
    assert total / unit == pytest.approx(number, rel=0.051)  # as they are rounded in the papers


NOT_BUCKETS = {"position_buckets": 32, "position_distance": 128}  # the defaults


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_head": 0}, "d_head 0 is not positive"),
        ({"num_decoder_layers": 0}, "num_decoder_layers 0 is not positive"),
        ({**NOT_BUCKETS, "positions": "rotary"}, "none of a T5's, which are buckets"),
        ({"position_distance": 4}, "position_distance 4 must be at least 5"),
    ],
)
def test_bad_configurations(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **fields)

"""Properties of every T5: distances, initial values and published sizes.

`test_encoder_laws.py` has the laws of all models with an encoder.
"""

import dataclasses

import jax
import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.models.encoder_decoders.t5 import PRESETS, SIZES, T5Config
from flaxzoo.models.init import parameter_shapes

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


def logits_of(params, **inputs):
    return np.asarray(jax.jit(lambda p, i: MODEL.apply({"params": p}, **i).logits)(params, inputs))


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
        ({"d_head": 0}, "d_head must .*0"),
        ({"num_decoder_layers": 0}, "num_decoder_layers must .*0"),
        ({**NOT_BUCKETS, "positions": "rotary"}, "positions 'rotary'"),
        ({"position_distance": 4}, "position_distance must .*4"),
    ],
)
def test_bad_configurations(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **fields)

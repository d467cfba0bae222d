import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.models.nn.attention import attention_weights
from flaxzoo.models.nn.feed_forward import ACTIVATIONS
from flaxzoo.models.nn.masks import causal_mask, padding_mask
from flaxzoo.models.nn.norms import LayerNorm
from flaxzoo.models.nn.positions import default_positions


@pytest.mark.parametrize("base", [10_000.0, 100_000.0])
@pytest.mark.parametrize("width", [8, 7])
def test_sinusoidal_positions(base, width):
    table = models.sinusoidal_positions(50, width, base)
    assert (table.shape, table.dtype) == ((50, width), np.float32)
    for p in (0, 1, 49):
        for d in range(width):
            angle = p / base ** (2 * (d // 2) / width)
            assert table[p, d] == pytest.approx([math.sin, math.cos][d % 2](angle), abs=1e-6)


def test_position_base_reaches_the_model(tiny):
    ids = np.arange(12)[None]
    usual, wide = (
        tiny(positions="sinusoidal", position_base=base).logits(input_ids=ids)
        for base in (10_000.0, 100_000.0)
    )
    assert np.abs(usual - wide).max() > 1e-3


def test_layer_norm_by_hand():
    x = jnp.array([[1.0, 2.0, 3.0, 6.0]])  # mean 3, variance 3.5
    norm = LayerNorm(0.5, models.Execution())
    params = {"scale": jnp.full(4, 2.0), "bias": jnp.full(4, 0.25)}
    expected = [[-1.75, -0.75, 0.25, 3.25]]  # (x - 3) / √4 · 2 + 0.25
    np.testing.assert_allclose(norm.apply({"params": params}, x), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "at_one"),
    [
        ("gelu", 0.5 * (1 + math.erf(1 / math.sqrt(2)))),
        ("gelu_tanh", 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * 1.044715))),
        ("relu", 1.0),
    ],
)
def test_activations(name, at_one):
    assert float(ACTIVATIONS[name](jnp.float32(1))) == pytest.approx(at_one, abs=1e-6)
    assert float(ACTIVATIONS[name](jnp.float32(0))) == 0


@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-6), ("bfloat16", 2**-8)])
def test_exact_gelu_everywhere(dtype, rtol):
    x = jnp.linspace(-12, 12, 2001).astype(dtype)
    y = ACTIVATIONS["gelu"](x)
    expected = [0.5 * v * math.erfc(-v / math.sqrt(2)) for v in np.asarray(x, float)]
    assert y.dtype == x.dtype
    np.testing.assert_allclose(np.asarray(y, float), expected, rtol=rtol, atol=1e-6)
    slope = jax.vmap(jax.grad(ACTIVATIONS["gelu"]))(x.astype(jnp.float32))
    assert np.isfinite(slope).all()


def test_attention_by_hand():
    # H = 4, so scores are halved: ln 3 and 0 give 3/4 and 1/4.
    query = jnp.array([2 * math.log(3), 0, 0, 0]).reshape(1, 1, 1, 4)
    key = jnp.eye(4)[:, :3].reshape(1, 1, 4, 3)
    weights = attention_weights(query, key, jnp.array([True, True, False]).reshape(1, 1, 1, 3))
    np.testing.assert_allclose(weights.ravel(), [0.75, 0.25, 0], atol=1e-6)
    unscaled = attention_weights(query / 2, key, jnp.ones((1, 1, 1, 3), bool), 1.0)
    np.testing.assert_allclose(unscaled.ravel(), [0.6, 0.2, 0.2], atol=1e-6)
    nothing = attention_weights(query, key, jnp.zeros((1, 1, 1, 3), bool))
    np.testing.assert_allclose(nothing.ravel(), [1 / 3] * 3, atol=1e-6)


def test_causal_mask():
    dense = causal_mask(jnp.arange(2, 4), jnp.arange(5))[0, 0]
    np.testing.assert_array_equal(dense, [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    band = causal_mask(jnp.arange(2, 4), jnp.arange(5), 2)[0, 0]
    np.testing.assert_array_equal(band, [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0]])


def test_padding_mask():
    assert padding_mask(None, None).all()
    attention, segments = jnp.array([[1, 1, 0]]), jnp.array([[1, 2, 2]])
    np.testing.assert_array_equal(padding_mask(attention, None)[0, 0], [[1, 1, 0]])
    np.testing.assert_array_equal(
        padding_mask(attention, segments)[0, 0], [[1, 0, 0], [0, 1, 0], [0, 1, 0]]
    )
    assert not padding_mask(None, jnp.zeros((1, 3), int)).any()


def test_default_positions():
    def positions(start, length, mask=None, segments=None):
        start = jnp.asarray(start)
        mask, segments = (None if x is None else jnp.array([x]) for x in (mask, segments))
        return default_positions(start, length, mask, segments)[0].tolist()

    assert positions(0, 4) == [0, 1, 2, 3]
    assert positions(3, 2) == [3, 4]
    assert positions(0, 5, mask=[0, 0, 1, 1, 1]) == [0, 0, 0, 1, 2]
    assert positions(3, 2, mask=[0, 0, 1, 1, 1]) == [1, 2]
    assert positions(0, 5, mask=[1, 1, 0, 0, 0])[:2] == [0, 1]
    assert positions(0, 7, segments=[1, 1, 1, 2, 3, 3, 0]) == [0, 1, 2, 0, 0, 1, 0]


def test_logits_are_hidden_states_times_the_tied_embedding(tiny):
    model = tiny()
    out = model(input_ids=np.arange(5)[None])
    table = model.params["token_embedding"]["embedding"]
    expected = np.einsum("BTD,VD->BTV", out.last_hidden_state, table)
    np.testing.assert_allclose(out.logits, expected, rtol=0, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, out.projection.kernel, table)

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flaxzoo import models
from flaxzoo.models.llama import LlamaConfig
from flaxzoo.models.nn.attention import MultiHeadAttention, attention_weights
from flaxzoo.models.nn.feed_forward import ACTIVATIONS, GatedFeedForward
from flaxzoo.models.nn.masks import AttentionMask, causal_mask, padding_mask
from flaxzoo.models.nn.norms import LayerNorm, RMSNorm
from flaxzoo.models.nn.positions import (
    RelativePositionBias,
    default_positions,
    relative_buckets,
)
from transformers.models.llama import modeling_llama
from transformers.models.t5.modeling_t5 import T5Attention

LLAMA = LlamaConfig(
    vocab_size=8, max_length=8, num_layers=1, d_model=16, num_heads=4, num_kv_heads=2, d_ff=24
)


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rms_norm_is_that_of_transformers(dtype):
    rng = np.random.default_rng(0)
    x, scale = rng.normal(size=(2, 3, 16)).astype(np.float32), rng.normal(size=16)
    theirs = modeling_llama.LlamaRMSNorm(16, eps=0.1)
    theirs.weight.data = torch.tensor(scale, dtype=torch.float32)
    found = RMSNorm(0.1, models.Execution(dtype=dtype)).apply(
        {"params": {"scale": scale}}, jnp.asarray(x)
    )
    assert found.dtype == dtype
    tolerance = 1e-6 if dtype == "float32" else 2**-8
    expected = theirs(torch.tensor(x)).detach().numpy()
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, tolerance, 1e-6)


@pytest.mark.parametrize(("ours", "theirs"), [("silu", "silu"), ("gelu_tanh", "gelu_new")])
def test_gated_feed_forward_is_that_of_transformers(ours, theirs):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 16)).astype(np.float32)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_attention_heads=4, hidden_act=theirs
    )
    block = modeling_llama.LlamaMLP(config)
    kernels = {
        name: {"kernel": getattr(block, f"{name}_proj").weight.detach().numpy().T}
        for name in ("gate", "up", "down")
    }
    gated = GatedFeedForward(dataclasses.replace(LLAMA, activation=ours), models.Execution(), None)
    np.testing.assert_allclose(
        gated.apply({"params": kernels}, jnp.asarray(x)),
        block(torch.tensor(x)).detach(),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (64, 300)])
def test_relative_buckets_are_those_of_transformers(bidirectional, num_buckets, max_distance):
    distance = np.arange(-400, 401)
    expected = T5Attention._relative_position_bucket(
        torch.tensor(distance), bidirectional, num_buckets, max_distance
    )
    found = jax.jit(relative_buckets, static_argnums=(1, 2, 3))(
        distance, num_buckets, max_distance, bidirectional
    )
    np.testing.assert_array_equal(found, expected)
    unused = {num_buckets // 2} if bidirectional else set()  # "later, by 0 tokens"
    assert set(np.unique(found)) == set(range(num_buckets)) - unused


def test_relative_biases_reach_the_scores():
    """Attention with biases, two key/value heads for four query heads, one head at a time."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 6, 16)), jnp.float32)
    positions = jnp.arange(6)[None]
    relative = RelativePositionBias(
        num_heads=4,
        num_buckets=8,
        max_distance=20,
        bidirectional=False,
        init_std=1.0,
        execution=models.Execution(),
    )
    table = relative.init(jax.random.key(0), positions, positions)["params"]["embedding"]
    bias = relative.apply({"params": {"embedding": table}}, positions, positions)
    for query, key in ((5, 2), (3, 3), (1, 4)):
        bucket = relative_buckets(jnp.array(key - query), 8, 20, False)
        np.testing.assert_array_equal(bias[0, :, query, key], table[bucket])

    attention = MultiHeadAttention(LLAMA, models.Execution(), None)
    mask = AttentionMask(6, 6, None, None, causal=True).materialized()
    variables = attention.init(jax.random.key(1), x, mask)
    kernels = {name: p["kernel"] for name, p in variables["params"].items()}
    found, _, weights = attention.apply(variables, x, mask, output_attentions=True, bias=bias)
    expected = np.zeros(x.shape)
    for head in range(4):
        group = head // 2
        query = x @ kernels["query"][:, head]
        key, value = (x @ kernels[name][:, group] for name in ("key", "value"))
        scores = np.einsum("BTH,BSH->BTS", query, key) / 2 + bias[:, head]
        scores = np.where(np.tri(6, dtype=bool), scores, -np.inf)
        expected_weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        np.testing.assert_allclose(weights[:, head], expected_weights, rtol=1e-4, atol=1e-6)
        expected += expected_weights @ value @ kernels["output"][head]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


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
    unscaled = attention_weights(query / 2, key, jnp.ones((1, 1, 1, 3), bool), scale=1.0)
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

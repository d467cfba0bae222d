"""Attention weights, and the sum of values, against formulas written out."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.models.decoders.llama import LlamaConfig
from flaxzoo.models.nn.attention import AttentionContext, MultiHeadAttention, attention_weights
from flaxzoo.models.nn.masks import AttentionMask
from flaxzoo.models.nn.positions import Positions
from flaxzoo.models.nn.relative_positions import RelativePositionBias, relative_buckets

LLAMA = LlamaConfig(
    vocab_size=8, max_length=8, num_layers=1, d_model=16, num_heads=4, num_kv_heads=2, d_ff=24
)


@pytest.mark.slow
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


@pytest.mark.parametrize("length", [1, 16])
def test_grouped_queries_in_bfloat16_have_the_weights_of_float32(length):
    keys = jax.random.split(jax.random.key(0))
    query, key = (
        jax.random.normal(k, shape, jnp.bfloat16)
        for k, shape in zip(keys, [(2, length, 4, 8), (2, 2, 8, 16)], strict=True)
    )
    mask = jnp.ones((1, 1, 1, 16), bool)
    weigh = jax.jit(lambda q, k: attention_weights(q, k, mask, scale=0.5))
    exact = weigh(query.astype(jnp.float32), key.astype(jnp.float32))
    np.testing.assert_allclose(weigh(query, key), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
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
    context = AttentionContext(mask, Positions(bias=bias), output_attentions=True)
    variables = attention.init(jax.random.key(1), x, context)
    kernels = {name: p["kernel"] for name, p in variables["params"].items()}
    found, _, weights = attention.apply(variables, x, context)
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

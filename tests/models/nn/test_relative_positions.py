"""Attention by distance: learned vectors of clipped distances (Shaw), biases of buckets (T5)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flaxzoo import models
from flaxzoo.models.lectures.attention import LectureAttention
from flaxzoo.models.lectures.positions import LecturePositions, clipped_distances
from flaxzoo.models.nn.attention import AttentionContext
from flaxzoo.models.nn.masks import AttentionMask
from flaxzoo.models.nn.relative_positions import relative_buckets
from transformers.models.t5.modeling_t5 import T5Attention


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


@pytest.mark.parametrize("causal", [True, False])
def test_clipped_distances_are_vectors_of_shaw(causal):
    """Attention of two heads with learned vectors, by hand (equations 3 and 4)."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1, 6, 8)), jnp.float32)
    places = jnp.array([[3, 4, 5, 7, 8, 12]])
    distances = clipped_distances(places, places, 2, causal=causal)
    assert distances.shape == (1, 6, 6, 3 if causal else 5)
    config = models.LectureGPTConfig(
        vocab_size=2, max_length=8, num_layers=1, d_model=8, num_heads=2, use_bias=False
    )
    attention = LectureAttention(config, models.Execution(), 0.3)
    mask = AttentionMask(6, 6, causal=causal).materialized()
    inputs = AttentionContext(mask, LecturePositions(distances=distances))
    variables = attention.init(jax.random.key(0), x, inputs)
    params = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), variables)
    found, _, _ = attention.apply(params, x, inputs)

    params = params["params"]
    keys, values = (params[f"relative_{name}"]["embedding"] for name in ("keys", "values"))
    expected = np.zeros((6, 8))
    for head in range(2):
        q, k, v = (x[0] @ params[n]["kernel"][:, head] for n in ("query", "key", "value"))
        for i in range(6):
            seen = range(i + 1 if causal else 6)
            rows = [int(np.clip(places[0, j] - places[0, i], -2, 2)) + 2 for j in seen]
            scores = np.array([q[i] @ (k[j] + keys[r]) for j, r in zip(seen, rows, strict=True)])
            weights = np.exp(scores / 2) / np.exp(scores / 2).sum()
            context = sum(
                w * (v[j] + values[r]) for w, j, r in zip(weights, seen, rows, strict=True)
            )
            expected[i] += context @ params["output"]["kernel"][head]
    np.testing.assert_allclose(found[0], expected, rtol=1e-4, atol=1e-4)

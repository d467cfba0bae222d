"""Attention masks as arrays."""

import jax.numpy as jnp
import numpy as np
from flaxzoo.models.nn.masks import band_mask, padding_mask


def test_band_mask():
    dense = band_mask(jnp.arange(2, 4), jnp.arange(5))[0, 0]
    np.testing.assert_array_equal(dense, [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    band = band_mask(jnp.arange(2, 4), jnp.arange(5), 2)[0, 0]
    np.testing.assert_array_equal(band, [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0]])
    both = band_mask(jnp.arange(2, 4), jnp.arange(5), 2, causal=False)[0, 0]
    np.testing.assert_array_equal(both, [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]])


def test_padding_mask():
    assert padding_mask(None, None).all()
    attention, segments = jnp.array([[1, 1, 0]]), jnp.array([[1, 2, 2]])
    np.testing.assert_array_equal(padding_mask(attention, None)[0, 0], [[1, 1, 0]])
    np.testing.assert_array_equal(
        padding_mask(attention, segments)[0, 0], [[1, 0, 0], [0, 1, 0], [0, 1, 0]]
    )
    assert not padding_mask(None, jnp.zeros((1, 3), int)).any()

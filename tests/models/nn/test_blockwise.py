"""Which blocks are computed, and that what queries take from parts of the keys merges."""

import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo.models.nn.kernels import blockwise
from flaxzoo.models.nn.kernels.blockwise import HIDDEN, Attended, Band


@pytest.mark.parametrize(
    "band",
    [
        *(Band(), Band(offset=5), Band(3, window=4), Band(window=1)),
        *(Band(window=3, causal=False), Band(5, window=1, causal=False)),
    ],
)
def test_blocks_that_see_each_other(band, monkeypatch):
    monkeypatch.setattr(blockwise, "LARGEST_BLOCK", 4)
    monkeypatch.setattr(blockwise, "SMALLEST_BLOCK", 1)
    num_queries, num_keys = 12, 20
    distance = np.arange(num_queries)[:, None] - np.arange(num_keys)
    visible = np.asarray(band.contains(distance)).reshape(3, 4, 5, 4).any(axis=(1, 3))
    found = np.zeros_like(visible)
    found[blockwise.visible_blocks(num_queries, num_keys, band)] = True
    np.testing.assert_array_equal(found, visible)


@pytest.mark.parametrize(
    ("length", "size"), [(48, 48), (512, 512), (1024, 512), (625, 125), (1088, 272), (1021, None)]
)
def test_sizes_of_blocks(length, size):
    assert blockwise.block_size(length) == size


@pytest.mark.parametrize(("length", "size"), [(20, 20), (1024, 512), (1728, 288), (1000, None)])
def test_blocks_of_keys_whose_weights_are_dropped(length, size):
    assert blockwise.block_size(length, dropping=True) == size


def test_merged_parts_are_the_whole():
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(1, n, 2, 4))) for n in (3, 8, 8))
    segments = jnp.asarray([[1, 2, 3]]), jnp.asarray([[1, 1, 1, 1, 1, 2, 2, 1]])

    def attend(first, last):
        part = segments[0], segments[1][:, first:last]
        keys, values = (x[:, first:last] for x in (key, value))
        return blockwise.forward(query, keys, values, part, band=None, cap=None)

    whole, merged = attend(0, 8), blockwise.merge(attend(0, 4), attend(4, 8))
    for ours, expected in zip(merged, whole, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
    # The third query has no keys in either part.
    assert isinstance(merged, Attended)
    assert not merged.output[0, 2].any()
    assert (merged.log_sum[0, 2] == HIDDEN).all()

"""Which attention weights are dropped: by the published generator, element by element."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.data.common.errors import UserError
from flaxzoo.models.nn import layers
from flaxzoo.models.nn.layers import (
    draws,
    drop_weights,
    head_keys,
    kept_weights,
    threefry,
)
from jax.extend.random import threefry_2x32

KEY = jax.random.key(7)
PI = (0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3)


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        ((0, 0), (0, 0), (0x9D1C5EC6, 0x8BD50731)),
        ((2**32 - 1,) * 2, (2**32 - 1,) * 2, (0xFD36D048, 0x2D17272C)),
        (*PI, (0xBA3E4725, 0xF27D669E)),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_the_generator_is_that_of_the_paper(key, counter, words):
    """The known answers of its authors' library, Random123, for 13 rounds."""
    key, counter = ((jnp.uint32(a), jnp.uint32(b)) for a, b in (key, counter))
    assert tuple(map(int, threefry(key, counter))) == words


def test_with_more_rounds_it_is_that_of_jax():
    key, counters = jnp.array([3, 2**31], jnp.uint32), jnp.arange(10, dtype=jnp.uint32)
    words = threefry((key[0], key[1]), (counters[:5], counters[5:]), rounds=20)
    np.testing.assert_array_equal(jnp.concatenate(words), threefry_2x32(key, counters))


def test_every_weight_draws_bits_of_its_own():
    keys = head_keys(models.row_keys(KEY, 2), 3)
    assert keys.shape == (2, 3, 2)
    for rate in (0.1, 0.5):
        kept = np.asarray(kept_weights(keys, 96, 160, rate))
        assert kept.shape == (2, 3, 96, 160)
        # Each mean within four standard deviations of its expectation.
        deviation = np.sqrt(rate * (1 - rate) / kept[0, 0].size)
        means = kept.reshape(6, -1).mean(axis=1)
        assert np.abs(means - (1 - rate)).max() < 4 * deviation
        # Neither sequences nor heads nor queries nor the keys of one block are correlated.
        centered = kept - (1 - rate)
        for other in (
            centered[::-1],
            np.roll(centered, 1, axis=1),
            np.roll(centered, 1, axis=2),
            *(np.roll(centered, shift, axis=3) for shift in (1, 8, 16, 24, 32)),
        ):
            correlation = (centered * other).mean() / (rate * (1 - rate))
            assert abs(correlation) < 4 / np.sqrt(kept.size / 2)


def test_a_part_draws_what_the_whole_draws():
    """Other lengths, other sequences, and other heads change no draw."""
    rng = models.row_keys(KEY, 4)
    whole = kept_weights(head_keys(rng, 6), 20, 70, 0.3)
    for num_queries, num_keys in ((20, 70), (20, 64), (1, 33), (7, 5)):
        part = kept_weights(head_keys(rng[2:], 6)[:, 3:], num_queries, num_keys, 0.3)
        np.testing.assert_array_equal(part, whole[2:, 3:, :num_queries, :num_keys])


def test_every_platform_keeps_the_same_weights():
    words = np.random.default_rng(0).integers(0, 2**32, (2, 2, 3, 4, 5, 8), np.uint32)
    first, second = jnp.asarray(words)
    stacked, elementwise = (
        way(first, second, 30_000) for way in (layers._kept_stacked, layers._kept_elementwise)
    )
    assert stacked.shape == (2, 3, 4, 5 * 32)
    np.testing.assert_array_equal(stacked, elementwise)


def test_keys_that_lie_apart_by_8_share_a_block():
    keys = head_keys(models.row_keys(KEY, 1), 1)
    query, key = 5, 32 + 3
    block = threefry((keys[0, 0, 0], keys[0, 0, 1]), (jnp.uint32(query), jnp.uint32(8 + 3)))
    for rate in (0.2, 0.5, 0.8):
        kept = kept_weights(keys, 6, 64, rate)[0, 0, query, key : key + 32 : 8]
        np.testing.assert_array_equal(kept, [int(x) >= round(rate * 2**16) for x in draws(block)])


def test_weights_are_dropped_or_scaled_and_so_are_their_gradients():
    weights = jax.random.uniform(KEY, (2, 3, 16, 40)) + 0.5
    rng = models.row_keys(KEY, 2)
    dropped = drop_weights(weights, 0.25, rng)
    kept = kept_weights(head_keys(rng, 3), 16, 40, 0.25)
    np.testing.assert_allclose(dropped, np.where(kept, weights / 0.75, 0), rtol=1e-6)
    gradient = jax.grad(lambda x: drop_weights(x, 0.25, rng).sum())(weights)
    np.testing.assert_allclose(gradient, np.where(kept, 1 / 0.75, 0), rtol=1e-6)
    assert drop_weights(weights, 0.25, None) is weights
    assert drop_weights(weights, 0.0, rng) is weights


@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg"])
def test_keys_of_another_generator_are_refused(implementation):
    keys = models.row_keys(jax.random.key(7, impl=implementation), 2)
    message = f"keys of {implementation} cannot .*threefry2x32"
    with pytest.raises(UserError, match=message):
        head_keys(keys, 3)
    model = models.create(
        models.GPTConfig(
            vocab_size=9, max_length=4, num_layers=1, d_model=4, num_heads=1, dropout_rate=0.1
        )
    )
    params = models.init_params(model, KEY)
    with pytest.raises(UserError, match=message):
        model.apply({"params": params}, np.ones((2, 4), np.int32), rng=keys)

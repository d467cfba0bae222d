"""Dropout of activations and of attention weights: which elements, by the published generator."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.data.common.errors import UserError
from flaxzoo.models.decoders.gpt.falcon import FalconConfig, OneNormLayer
from flaxzoo.models.decoders.gpt.gptj import GPTJLayer
from flaxzoo.models.nn import dropout
from flaxzoo.models.nn.dropout import (
    draws,
    drop_weights,
    fold_in,
    head_keys,
    kept_elements,
    threefry,
)
from jax.extend.random import threefry_2x32
from jax.sharding import Mesh, NamedSharding, PartitionSpec

KEY = jax.random.key(7)
jitted = jax.jit(dropout.dropout, static_argnums=(1, 3))
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
        kept = np.asarray(kept_elements(keys, 96, 160, rate))
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
    whole = kept_elements(head_keys(rng, 6), 20, 70, 0.3)
    for num_queries, num_keys in ((20, 70), (20, 64), (1, 33), (7, 5)):
        part = kept_elements(head_keys(rng[2:], 6)[:, 3:], num_queries, num_keys, 0.3)
        np.testing.assert_array_equal(part, whole[2:, 3:, :num_queries, :num_keys])


def test_every_platform_keeps_the_same_weights():
    words = np.random.default_rng(0).integers(0, 2**32, (2, 2, 3, 4, 5, 8), np.uint32)
    first, second = jnp.asarray(words)
    stacked, elementwise = (
        way(first, second, 30_000) for way in (dropout._kept_stacked, dropout._kept_elementwise)
    )
    assert stacked.shape == (2, 3, 4, 5 * 32)
    np.testing.assert_array_equal(stacked, elementwise)


def test_keys_that_lie_apart_by_8_share_a_block():
    keys = head_keys(models.row_keys(KEY, 1), 1)
    query, key = 5, 32 + 3
    block = threefry((keys[0, 0, 0], keys[0, 0, 1]), (jnp.uint32(query), jnp.uint32(8 + 3)))
    for rate in (0.2, 0.5, 0.8):
        kept = kept_elements(keys, 6, 64, rate)[0, 0, query, key : key + 32 : 8]
        np.testing.assert_array_equal(kept, [int(x) >= round(rate * 2**16) for x in draws(block)])


def test_weights_are_dropped_or_scaled_and_so_are_their_gradients():
    weights = jax.random.uniform(KEY, (2, 3, 16, 40)) + 0.5
    rng = models.row_keys(KEY, 2)
    dropped = drop_weights(weights, 0.25, rng)
    kept = kept_elements(head_keys(rng, 3), 16, 40, 0.25)
    np.testing.assert_allclose(dropped, np.where(kept, weights / 0.75, 0), rtol=1e-6)
    gradient = jax.grad(lambda x: drop_weights(x, 0.25, rng).sum())(weights)
    np.testing.assert_allclose(gradient, np.where(kept, 1 / 0.75, 0), rtol=1e-6)
    assert drop_weights(weights, 0.25, None) is weights
    assert drop_weights(weights, 0.0, rng) is weights


@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg"])
def test_keys_of_another_generator_are_refused(implementation):
    keys = models.row_keys(jax.random.key(7, impl=implementation), 2)
    message = f"keys of {implementation}: .*threefry2x32"
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


# Activations.


def mask(rows=8, shape=(5, 4), rate=0.3, name="here", first_row=0, key=KEY):
    keys = models.row_keys(key, rows, first_row)
    return np.asarray(jitted(jnp.ones((rows, *shape)), rate, keys, name)) != 0


@pytest.mark.parametrize("shape", [(3,), (5, 7), (3, 5, 7)])
def test_a_row_has_the_same_mask_in_any_part_of_the_batch(shape):
    whole = mask(8, shape)
    for start, rows in ((0, 4), (4, 4), (7, 1)):
        np.testing.assert_array_equal(mask(rows, shape, first_row=start), whole[start:][:rows])


def test_rows_places_layers_and_steps_differ():
    same = mask(2, (1000,))
    keys = models.row_keys(KEY, 2)
    others = {
        "row": same[::-1],
        "name": mask(2, (1000,), name="there"),
        "step": mask(2, (1000,), key=jax.random.fold_in(KEY, 1)),
        "layer": np.asarray(jitted(jnp.ones((2, 1000)), 0.3, fold_in(keys, 0), "here")) != 0,
    }
    for what, other in others.items():
        agreement = np.mean(other == same)  # 0.7² + 0.3² when independent
        assert abs(agreement - 0.58) < 4 * np.sqrt(0.58 * 0.42 / 2000), what


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("size", [50_000, 50_001])
def test_rate(rate, size):
    kept = mask(4, (size,), rate)
    sigma = np.sqrt(rate * (1 - rate) / kept.size)
    assert abs(kept.mean() - (1 - rate)) < 4 * sigma
    # Columns 8 apart share a block of the generator, and must be independent, too.
    for distance in (1, 8, 24, size // 2):
        together = np.mean(kept[:, distance:] & kept[:, :-distance])
        expected = (1 - rate) ** 2
        pairs = kept[:, distance:].size
        # Pairs overlap: a bound on their dependence, not exact independence.
        assert abs(together - expected) < 6 * np.sqrt(expected / pairs)


def test_expectation_is_preserved():
    x = jnp.linspace(-2, 3, 60_000).reshape(6, 10_000)
    y = np.asarray(jitted(x, 0.25, models.row_keys(KEY, 6), "here"))
    kept = y != 0
    np.testing.assert_allclose(y[kept], np.asarray(x)[kept] / 0.75, rtol=1e-6)
    assert abs(y.mean() - float(x.mean())) < 4 * float(jnp.std(x)) / np.sqrt(x.size)


def test_without_a_key_or_a_rate_nothing_happens():
    x = jnp.arange(6.0).reshape(2, 3)
    assert dropout.dropout(x, 0.5, None, "here") is x
    assert dropout.dropout(x, 0.0, models.row_keys(KEY, 2), "here") is x
    assert fold_in(None, 3) is None


def test_dtype_stays_and_gradient_is_masked_alike():
    x = jnp.ones((3, 8), jnp.bfloat16)
    keys = models.row_keys(KEY, 3)
    y = dropout.dropout(x, 0.5, keys, "here")
    assert y.dtype == jnp.bfloat16
    gradient = jax.grad(lambda x: dropout.dropout(x, 0.5, keys, "here").sum())(x)
    np.testing.assert_array_equal(np.asarray(gradient), np.asarray(y))


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["scan", "unroll"])
def test_a_models_rows_do_not_depend_on_the_batch(tiny, layers):
    model = tiny(dropout_rate=0.3, layers=layers)
    ids = np.random.default_rng(0).integers(0, 29, (8, 10))
    whole = model.logits(input_ids=ids, rng=models.row_keys(KEY, 8))
    part = model.logits(input_ids=ids[4:], rng=models.row_keys(KEY, 4, 4))
    np.testing.assert_allclose(part, whole[4:], rtol=0, atol=1e-5)
    without = model.logits(input_ids=ids)
    assert np.abs(whole - without).max() > 0.1


@pytest.mark.slow
def test_all_ways_to_run_the_layers_drop_the_same(tiny):
    ids = np.random.default_rng(0).integers(0, 29, (2, 10))
    rng = models.row_keys(KEY, 2)
    scan, unroll, separate = (
        tiny(dropout_rate=0.3, layers=layers).logits(input_ids=ids, rng=rng)
        for layers in ("scan", "unroll", "separate")
    )
    np.testing.assert_allclose(unroll, scan, rtol=0, atol=1e-5)
    np.testing.assert_allclose(separate, scan, rtol=0, atol=1e-5)


def test_a_prefix_draws_what_the_whole_sequence_draws():
    """The counter is (token, feature): padding and the length of a batch change no draw."""
    whole = mask(2, (12, 40))
    np.testing.assert_array_equal(mask(2, (7, 40)), whole[:, :7])


def test_sharded_tokens_draw_without_communication():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "context"))
    tokens = NamedSharding(mesh, PartitionSpec("data", "context"))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    x, keys = jnp.ones((4, 64, 96)), models.row_keys(KEY, 4)
    sharded = jax.jit(
        lambda x, keys: dropout.dropout(x, 0.3, keys, "here"),
        in_shardings=(tokens, rows),
        out_shardings=tokens,
    )
    program = sharded.lower(x, keys).compile().as_text()
    assert program is not None
    assert not re.findall("all-gather|all-reduce|all-to-all|collective|reduce-scatter", program)
    np.testing.assert_array_equal(sharded(x, keys), jitted(x, 0.3, keys, "here"))


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5])
def test_a_rate_is_at_least_0_and_below_1(rate):
    with pytest.raises(ValueError, match=f"rate must .*{rate}"):
        dropout.dropout(jnp.ones((2, 3)), rate, models.row_keys(jax.random.key(0), 2), "embedding")


@pytest.mark.parametrize(("layer", "sums"), [(OneNormLayer, {0, 6}), (GPTJLayer, {0, 2, 4, 6})])
def test_parallel_layers_drop_the_sum_or_each_output(layer, sums):
    """Of the outputs 1 and 2, at a rate of 1/2."""
    config = FalconConfig(
        vocab_size=3, max_length=4, num_layers=1, d_model=64, num_heads=1, dropout_rate=0.5
    )
    x, rng = jnp.zeros((2, 4, 64)), models.row_keys(KEY, 2)
    out = layer(config, models.Execution()).add_parallel(x, x + 1, x + 2, rng)
    assert set(np.unique(out)) == sums

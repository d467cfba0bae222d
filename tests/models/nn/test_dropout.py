"""Dropout whose mask is a function of the row's key alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo import models
from flaxzoo.models.nn.dropout import dropout, fold_in

KEY = jax.random.key(7)


jitted = jax.jit(dropout, static_argnums=(1, 3))


def mask(rows=8, shape=(5, 4), rate=0.3, place="here", first_row=0, key=KEY):
    keys = models.row_keys(key, rows, first_row)
    return np.asarray(jitted(jnp.ones((rows, *shape)), rate, keys, place)) != 0


@pytest.mark.parametrize("shape", [(), (1,), (3, 5, 7), (2, 3, 4)])
def test_a_row_has_the_same_mask_in_any_part_of_the_batch(shape):
    whole = mask(8, shape)
    for start, rows in ((0, 4), (4, 4), (7, 1)):
        np.testing.assert_array_equal(mask(rows, shape, first_row=start), whole[start:][:rows])


def test_rows_places_layers_and_steps_differ():
    same = mask(2, (1000,))
    keys = models.row_keys(KEY, 2)
    others = {
        "row": same[::-1],
        "place": mask(2, (1000,), place="there"),
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
    # Neighbours share a word of the generator, and must not know of each other.
    for distance in (1, 2, size // 2):
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
    assert dropout(x, 0.5, None, "here") is x
    assert dropout(x, 0.0, models.row_keys(KEY, 2), "here") is x
    assert fold_in(None, 3) is None


def test_dtype_stays_and_gradient_is_masked_alike():
    x = jnp.ones((3, 8), jnp.bfloat16)
    keys = models.row_keys(KEY, 3)
    y = dropout(x, 0.5, keys, "here")
    assert y.dtype == jnp.bfloat16
    gradient = jax.grad(lambda x: dropout(x, 0.5, keys, "here").sum())(x)
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

"""The chunked cross-entropy against worked constants, optax, and the memory it promises."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flaxzoo.models.heads import Projection
from flaxzoo.train import losses
from flaxzoo.train.losses import cross_entropy


def problem(B=2, T=300, D=6, V=50, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (B, T, D), dtype)
    kernel = jax.random.normal(keys[1], (V, D), dtype)
    labels = jax.random.randint(keys[2], (B, T), 0, V)
    weights = jax.random.uniform(keys[3], (B, T)) * (jnp.arange(T) % 5 != 2)
    return hidden, kernel, labels, weights


def ours(hidden, kernel, labels, weights):
    return cross_entropy(Projection(hidden, kernel), labels, weights).loss


def plain(hidden, kernel, labels, weights):
    logits = jnp.einsum("BTD,VD->BTV", hidden, kernel, preferred_element_type=jnp.float32)
    return jnp.sum(weights * optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def with_gradient(loss, factor=1.0):
    return jax.jit(jax.value_and_grad(lambda *args: factor * loss(*args), argnums=(0, 1)))


def test_by_hand():
    # D = 1, V = 2, h = 1, W = (0, ln 3): the softmax is (1/4, 3/4).
    kernel = jnp.array([[0.0], [math.log(3)]])
    hidden, weights = jnp.ones((1, 3, 1)), jnp.array([[1.0, 2.0, 0.0]])
    loss, (d_hidden, d_kernel) = with_gradient(ours)(
        hidden, kernel, jnp.array([[0, 1, 0]]), weights
    )
    assert loss == pytest.approx(math.log(4) + 2 * math.log(4 / 3), rel=1e-6)
    # (softmax - label) · W per position; (softmax - label) · h summed over positions.
    np.testing.assert_allclose(
        d_hidden.ravel(), [0.75 * math.log(3), -0.5 * math.log(3), 0], rtol=1e-6
    )
    np.testing.assert_allclose(d_kernel.ravel(), [-0.75 + 0.5, 0.75 - 0.5], rtol=1e-6)


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary():
    hidden, kernel, labels, weights = problem(T=7)
    loss = ours(hidden, 0 * kernel, labels, weights)
    assert loss == pytest.approx(float(weights.sum()) * math.log(50), rel=1e-6)


@pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
def test_value_and_gradient_are_those_of_optax(length):
    arrays = problem(T=length)
    loss, gradients = with_gradient(ours, 0.37)(*arrays)
    expected, expected_gradients = with_gradient(plain, 0.37)(*arrays)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert ours(*arrays) == pytest.approx(float(expected) / 0.37, rel=1e-6)  # not differentiated
    for a, b in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_the_chunk_changes_nothing(monkeypatch):
    arrays = problem(T=20)
    whole = with_gradient(ours)(*arrays)
    monkeypatch.setattr(losses, "CHUNK_LENGTH", 3)
    cut = with_gradient(ours)(*arrays)
    for a, b in zip(jax.tree.leaves(cut), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_what_has_no_weight_does_not_matter():
    hidden, kernel, labels, weights = problem(T=40)
    other = jnp.where(weights == 0, (labels + 7) % 50, labels)
    a, b = (with_gradient(ours)(hidden, kernel, x, weights) for x in (labels, other))
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert (a[1][0][np.asarray(weights) == 0] == 0).all()
    nothing = with_gradient(ours)(hidden, kernel, labels, 0 * weights)
    assert all((x == 0).all() for x in jax.tree.leaves(nothing))


def test_large_logits_do_not_overflow():
    hidden, kernel, labels, weights = problem(T=5)
    loss, gradients = with_gradient(ours)(1e4 * hidden, 1e2 * kernel, labels, weights)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((loss, gradients)))


def test_bfloat16_keeps_a_float32_loss_and_the_inputs_types():
    arrays = problem(dtype=jnp.bfloat16)
    loss, gradients = with_gradient(ours)(*arrays)
    assert loss.dtype == jnp.float32
    assert [x.dtype for x in gradients] == [jnp.bfloat16] * 2
    exact = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in arrays]
    expected, expected_gradients = with_gradient(plain)(*exact)
    # The inputs are exact, the logits in float32: only gradients are rounded to 8 bits.
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for a, b in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2 * np.abs(b).max())


def largest_array(loss):
    """Numbers in the largest array of the compiled program."""
    text = with_gradient(loss).lower(*problem()).compile().as_text()
    assert text is not None
    shapes = re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", text)
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


def test_logits_are_never_whole():
    assert largest_array(plain) >= 2 * 300 * 50
    assert largest_array(ours) <= 2 * 128 * 50

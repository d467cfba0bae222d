"""Log-probabilities, entropy and top-1 of tokens against the whole `jax.nn.log_softmax`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo.models import token_log_probs as module
from flaxzoo.models.heads.outputs import Projection
from flaxzoo.train import MeshConfig, token_log_probs
from flaxzoo.train.distributed.sharding import make_mesh


def problem(B=2, T=20, D=6, V=50, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 6)
    hidden = jax.random.normal(keys[0], (B, T, D), dtype)
    kernel = 0.5 * jax.random.normal(keys[1], (V, D), dtype)
    bias = jax.random.normal(keys[2], (V,))
    labels = jax.random.randint(keys[3], (B, T), 0, V)
    # What a loss multiplies log-probabilities and entropies with; 0 at some positions.
    factors = jax.random.normal(keys[4], (2, B, T)) * (jnp.arange(T) % 5 != 2)
    return hidden, kernel, bias, labels, factors


def whole(hidden, kernel, bias, labels, temperature):
    logits = Projection(hidden, kernel, bias).logits() / temperature
    log_probs = jax.nn.log_softmax(logits)
    log_prob = jnp.take_along_axis(log_probs, labels[..., None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
    return log_prob, entropy, jnp.argmax(logits, axis=-1) == labels


def chunked(hidden, kernel, bias, labels, temperature):
    return token_log_probs(Projection(hidden, kernel, bias), labels, temperature=temperature)


def gradients(function, temperature=1.0):
    def loss(hidden, kernel, bias, labels, factors):
        log_prob, entropy, _ = function(hidden, kernel, bias, labels, temperature)
        return jnp.sum(factors[0] * log_prob) + jnp.sum(factors[1] * entropy)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))


def assert_close(actual, expected, atol=1e-6):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=atol * max(1, np.abs(b).max()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "temperature", "with_bias"),  # chunks of 4 positions, some padded
    [(1, 1.0, False), (1, 0.7, True), (19, 0.7, True), (20, 1.0, False)],
)
def test_values_and_gradients_are_those_of_log_softmax(monkeypatch, temperature, length, with_bias):
    monkeypatch.setattr(module, "MOST_POSITIONS", 8)
    hidden, kernel, bias, labels, factors = problem(T=length)
    arrays = (hidden, kernel, bias if with_bias else None, labels)
    actual, expected = chunked(*arrays, temperature), whole(*arrays, temperature)
    assert_close(actual[:2], expected[:2])
    np.testing.assert_array_equal(actual.is_top1, expected[2])
    assert actual.is_top1.dtype == bool
    assert_close(
        gradients(chunked, temperature)(*arrays, factors),
        gradients(whole, temperature)(*arrays, factors),
    )


def test_by_hand():
    # Logits (0, ln 3): probabilities (1/4, 3/4); at temperature 1/2 (1/10, 9/10).
    projection = Projection(jnp.ones((1, 2, 1)), jnp.array([[0.0], [np.log(3)]]))
    labels = jnp.array([[0, 1]])
    for temperature, p in ((1.0, 0.25), (0.5, 0.1)):
        result = token_log_probs(projection, labels, temperature=temperature)
        np.testing.assert_allclose(result.log_prob, [[np.log(p), np.log(1 - p)]], rtol=1e-6)
        entropy = -(p * np.log(p) + (1 - p) * np.log(1 - p))
        np.testing.assert_allclose(result.entropy, [[entropy, entropy]], rtol=1e-6)
        assert result.is_top1.tolist() == [[False, True]]


@pytest.mark.slow
def test_a_label_that_does_not_exist_is_nan_there_and_harms_no_gradient():
    hidden, kernel, bias, labels, _ = problem()
    labels = labels.at[0, 3].set(-100).at[1, 4].set(50)
    valid = (labels >= 0) & (labels < 50)
    log_prob = chunked(hidden, kernel, bias, labels, 1.0).log_prob
    np.testing.assert_array_equal(np.isnan(log_prob), ~valid)

    def loss(kernel):
        return jnp.sum(jnp.where(valid, chunked(hidden, kernel, bias, labels, 1.0).log_prob, 0))

    assert np.isfinite(jax.grad(loss)(kernel)).all()


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_is_positive(temperature):
    projection = Projection(jnp.ones((1, 2, 1)), jnp.ones((3, 1)))
    with pytest.raises(ValueError, match=r"temperature .*positive"):
        token_log_probs(projection, jnp.ones((1, 2), int), temperature=temperature)


def test_bfloat16_states_give_float32():
    hidden, kernel, bias, labels, factors = problem(dtype=jnp.bfloat16)
    actual = chunked(hidden, kernel, bias, labels, 1.0)
    wide = (hidden.astype(jnp.float32), kernel.astype(jnp.float32), bias, labels)
    expected = whole(*wide, 1.0)
    assert actual.log_prob.dtype == actual.entropy.dtype == jnp.float32
    assert_close(actual[:2], expected[:2], atol=1e-5)
    found = gradients(chunked)(hidden, kernel, bias, labels, factors)
    assert [x.dtype for x in found] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    assert_close(found, gradients(whole)(*wide, factors), atol=2e-2)


@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"data": 1, "fsdp": 2, "context": 2, "tensor": 2},
    ],
    ids=str,
)
def test_eight_devices_are_one(monkeypatch, sizes):
    hidden, kernel, bias, labels, factors = problem(B=8, D=8)
    arrays = (hidden, kernel, bias, labels)
    expected = whole(*arrays, 0.7), gradients(whole, 0.7)(*arrays, factors)
    monkeypatch.setattr(module, "MOST_POSITIONS", 4)
    with jax.sharding.set_mesh(make_mesh(MeshConfig(**sizes))):
        values = jax.jit(chunked, static_argnums=4)(*arrays, 0.7)
        found = gradients(chunked, 0.7)(*arrays, factors)
    np.testing.assert_array_equal(values.is_top1, expected[0][2])
    assert_close((values[:2], found), (expected[0][:2], expected[1]))


def test_memory_does_not_grow_with_positions_times_vocabulary():
    def temporaries(length, vocabulary):
        shapes = jax.eval_shape(lambda: problem(B=1, T=length, D=16, V=vocabulary))
        memory = gradients(chunked).lower(*shapes).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    vocabulary = 4096
    short, long = temporaries(2048, vocabulary), temporaries(8192, vocabulary)
    # All logits would be 4 · 6,144 · 4,096 bytes more; states and their gradients are 64 a token.
    assert long - short < 0.05 * 4 * (8192 - 2048) * vocabulary

"""Losses against worked constants, optax, torch, and the memory they promise."""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flaxzoo.models import token_log_probs
from flaxzoo.models.heads.outputs import Projection
from flaxzoo.train import MeshConfig
from flaxzoo.train.distributed.sharding import make_mesh
from flaxzoo.train.losses import cross_entropy as losses
from flaxzoo.train.losses.cross_entropy import cross_entropy


def problem(B=2, T=300, D=6, V=50, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (B, T, D), dtype)
    kernel = jax.random.normal(keys[1], (V, D), dtype)
    labels = jax.random.randint(keys[2], (B, T), 0, V)
    weights = jax.random.uniform(keys[3], (B, T)) * (jnp.arange(T) % 5 != 2)
    return hidden, kernel, labels, weights


def ours(hidden, kernel, labels, weights, bias=None, smoothing=0.0):
    return cross_entropy(Projection(hidden, kernel, bias), labels, weights, smoothing).loss


def plain(hidden, kernel, labels, weights, bias=None, smoothing=0.0):
    """The divergence from the smoothed labels, which is the cross-entropy without smoothing."""
    logits = jnp.einsum("BTD,VD->BTV", hidden, kernel, preferred_element_type=jnp.float32)
    logits = logits if bias is None else logits + bias
    if not smoothing:
        return jnp.sum(weights * optax.softmax_cross_entropy_with_integer_labels(logits, labels))
    q = jnp.where(jax.nn.one_hot(labels, 50) == 1, 1 - smoothing, smoothing / 49)
    return jnp.sum(weights * optax.kl_divergence(jax.nn.log_softmax(logits), q))


def with_gradient(loss, factor=1.0):
    return jax.jit(jax.value_and_grad(lambda *args: factor * loss(*args), argnums=(0, 1)))


@pytest.fixture
def few_positions(monkeypatch):
    """At most 128 of each of two rows at a time."""
    monkeypatch.setattr(token_log_probs, "MOST_POSITIONS", 256)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "with_bias", "smoothing"),
    # Of 131, a prime, a chunk is padded.
    [(1, False, 0.0), (128, True, 0.2), (131, False, 0.2), (131, True, 0.0), (300, True, 0.0)],
)
@pytest.mark.usefixtures("few_positions")
def test_value_and_gradient_are_those_of_optax(length, with_bias, smoothing):
    hidden, kernel, labels, weights = problem(T=length)
    bias = jax.random.normal(jax.random.key(1), (50,)) if with_bias else None

    def both(loss):
        def scaled(hidden, kernel, bias):
            return 0.37 * loss(hidden, kernel, labels, weights, bias, smoothing)

        return jax.jit(jax.value_and_grad(scaled, (0, 1, 2)))(hidden, kernel, bias)

    found, expected = both(ours), both(plain)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    alone = ours(hidden, kernel, labels, weights, bias, smoothing)  # not differentiated
    assert alone == pytest.approx(float(expected[0]) / 0.37, rel=1e-5)


def test_the_chunk_changes_nothing(monkeypatch):
    arrays = problem(T=20)
    whole = with_gradient(ours)(*arrays)
    for positions in (6, 10):  # ten chunks of 2, four of 5
        monkeypatch.setattr(token_log_probs, "MOST_POSITIONS", positions)
        cut = with_gradient(ours)(*arrays)
        for a, b in zip(jax.tree.leaves(cut), jax.tree.leaves(whole), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "length", "chunk"),
    [
        (2, 20, 20),
        (8, 1024, 128),
        (16, 1024, 64),
        (12, 1024, 64),  # 86 would do, if it were a divisor
        (8, 1031, 115),  # a prime
        (4096, 20, 1),
    ],
)
def test_a_chunk_has_few_positions_and_little_padding(rows, length, chunk):
    assert token_log_probs.chunk_length(rows, length) == chunk


def test_a_chunk_never_has_more():
    for rows, length in itertools.product(range(1, 1100, 7), (1, 2, 43, 76, 80, 128, 511, 1024)):
        chunk = token_log_probs.chunk_length(rows, length)
        assert 1 <= chunk <= length
        assert rows * chunk <= token_log_probs.MOST_POSITIONS or chunk == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "length", "with_bias"),
    [
        ({"data": 1, "fsdp": 8}, 11, True),  # a chunk is padded
        ({"data": 2, "fsdp": 2, "tensor": 2}, 20, False),
        ({"data": 1, "fsdp": 2, "context": 2, "tensor": 2}, 20, True),
        ({"data": 2, "context": 4}, 44, False),  # of four rows and 11 positions each
        ({"data": 1, "context": 8}, 20, True),  # they cannot be cut
        ({"data": 1, "context": 4, "tensor": 2}, 18, True),
    ],
    ids=str,
)
def test_on_a_mesh_it_is_the_same(monkeypatch, sizes, length, with_bias):
    hidden, kernel, labels, weights = problem(B=8, T=length, D=8, V=50)
    bias = jax.random.normal(jax.random.key(1), (50,)) if with_bias else None

    def loss(hidden, kernel, bias):
        return cross_entropy(Projection(hidden, kernel, bias), labels, weights, 0.1).loss

    expected = jax.value_and_grad(loss, (0, 1, 2))(hidden, kernel, bias)
    monkeypatch.setattr(token_log_probs, "MOST_POSITIONS", 4)
    mesh = make_mesh(MeshConfig(**sizes))
    with jax.sharding.set_mesh(mesh):
        ours = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(hidden, kernel, bias)
        alone = jax.jit(loss)(hidden, kernel, bias)
    assert alone == pytest.approx(float(expected[0]), rel=1e-6)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "sizes", [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 1, "context": 4, "tensor": 2}], ids=str
)
def test_in_bfloat16_devices_sum_in_float32(sizes):
    arrays = problem(B=8, T=20, D=8, dtype=jnp.bfloat16)
    alone = with_gradient(ours)(*arrays)
    with jax.sharding.set_mesh(make_mesh(MeshConfig(**sizes))):
        spread = with_gradient(ours)(*arrays)
    for a, b in zip(jax.tree.leaves(spread), jax.tree.leaves(alone), strict=True):
        assert a.dtype == b.dtype
        # But for the last of their bits numbers are the same.
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=2**-7, atol=1e-6)


@pytest.mark.slow
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


def test_correct_labels_are_counted_without_a_gradient():
    length = 20
    hidden, kernel, labels, weights = problem(T=length)
    best = jnp.argmax(jnp.einsum("BTD,VD->BTV", hidden, kernel), axis=-1)
    labels = jnp.where(jnp.arange(length) % 3 == 0, best, labels)
    expected = jnp.sum(weights * (labels == best))
    assert 0 < expected < weights.sum()
    count = jax.jit(lambda h: cross_entropy(Projection(h, kernel), labels, weights).correct)
    np.testing.assert_allclose(count(hidden), expected, rtol=1e-6)
    assert (jax.grad(count)(hidden) == 0).all()


@pytest.mark.parametrize("bad", [50, -1])
def test_a_label_outside_the_vocabulary_gives_nan(bad):
    hidden, kernel, labels, weights = problem(T=5)
    assert np.isnan(ours(hidden, kernel, labels.at[1, 0].set(bad), weights))
    assert np.isfinite(ours(hidden, kernel, labels.at[1, 2].set(bad), weights))  # has no weight


def test_label_smoothing_by_hand():
    # Five words, ε 0.1: 0.9 at the label, 0.025 at each other.
    q = np.array([0.025, 0.025, 0.9, 0.025, 0.025])
    logits = np.log([0.1, 0.2, 0.4, 0.25, 0.05])
    hidden, labels, weights = jnp.ones((1, 1, 1)), jnp.array([[2]]), jnp.ones((1, 1))

    def smoothed(logits):
        kernel = jnp.asarray(logits, jnp.float32)[:, None]
        return cross_entropy(Projection(hidden, kernel), labels, weights, label_smoothing=0.1)

    assert smoothed(logits).loss == pytest.approx((q * (np.log(q) - logits)).sum(), rel=1e-6)
    assert smoothed(logits).nll == pytest.approx(-math.log(0.4), rel=1e-6)
    assert smoothed(np.log(q)).loss == pytest.approx(0, abs=1e-6)
    gradient = jax.grad(lambda x: smoothed(x).loss)(jnp.asarray(logits, jnp.float32))
    np.testing.assert_allclose(gradient, np.exp(logits) - q, atol=1e-6)
    assert (jax.grad(lambda x: smoothed(x).nll)(jnp.asarray(logits, jnp.float32)) == 0).all()


@pytest.mark.parametrize("shape", [(7, 3), (4, 6, 5)])
def test_softmax_cross_entropy_is_torchs(shape):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    logits = rng.normal(size=shape).astype(np.float32)
    labels = rng.integers(0, shape[-1], shape[:-1])
    weights = rng.integers(0, 2, shape[:-1]).astype(np.float32)
    labels[weights == 0] = -100
    expected, gradient = of_torch(
        lambda x: torch.nn.functional.cross_entropy(
            x.flatten(0, -2), torch.from_numpy(labels).flatten(), reduction="sum"
        ),
        logits,
    )

    def loss(logits):
        sums = losses.softmax_cross_entropy(logits, jnp.asarray(labels), jnp.asarray(weights))
        return sums.loss, sums.correct

    (value, correct), ours = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(logits))
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(ours, gradient, rtol=1e-5, atol=1e-6)
    assert correct == (weights * (logits.argmax(-1) == labels)).sum() > 0


def of_torch(loss, x):
    """The value and the gradient of a loss in torch."""
    import torch

    given = torch.from_numpy(x).requires_grad_()
    value = loss(given)
    value.backward()
    assert given.grad is not None
    return value.item(), given.grad.numpy()


@pytest.mark.parametrize("name", ["sigmoid_cross_entropy", "squared_error"])
def test_losses_of_rows_are_torchs(name):
    torch = pytest.importorskip("torch")
    rng, weights = np.random.default_rng(0), np.array([1, 0, 1, 1, 0, 1], np.float32)
    if name == "squared_error":
        x, labels = rng.normal(size=(2, 6)).astype(np.float32)
        each = torch.nn.functional.mse_loss
    else:
        x = np.concatenate([rng.normal(size=(5, 4)), [[200.0, -200.0, 0.0, 3.0]]])
        x, labels = x.astype(np.float32), rng.integers(0, 2, x.shape).astype(np.float32)
        each = torch.nn.functional.binary_cross_entropy_with_logits

    def theirs(x):
        found = each(x, torch.from_numpy(labels), reduction="none")
        return (found.reshape(6, -1).mean(1) * torch.from_numpy(weights)).sum()

    loss, arrays = getattr(losses, name), [jnp.asarray(y) for y in (x, labels, weights)]
    found = jax.value_and_grad(loss)(*arrays)
    for a, b in zip(found, of_torch(theirs, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    arrays[1] = arrays[1].at[weights == 0].set(jnp.nan)  # rows to ignore need no label
    assert loss(*arrays) == found[0]


@pytest.mark.parametrize("loss", [losses.softmax_cross_entropy, losses.sigmoid_cross_entropy])
def test_losses_of_bfloat16_are_float32(loss):
    logits = jnp.ones((2, 3), jnp.bfloat16)
    labels = jnp.ones(2, int) if loss is losses.softmax_cross_entropy else jnp.ones((2, 3))
    assert {x.dtype for x in jax.tree.leaves(loss(logits, labels, jnp.ones(2)))} == {
        jnp.dtype("float32")
    }


def largest_array(loss):
    """Numbers in the largest array of the compiled program."""
    text = with_gradient(loss).lower(*problem()).compile().as_text()
    assert text is not None
    shapes = re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", text)
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


@pytest.mark.usefixtures("few_positions")
def test_logits_are_never_whole():
    assert largest_array(plain) >= 2 * 300 * 50
    assert largest_array(ours) <= 2 * 128 * 50


def temporaries(loss, length):
    """Bytes beside what goes in and comes out, as the compiler plans them."""
    compiled = with_gradient(loss).lower(*problem(T=length, D=8, V=2000)).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def test_memory_does_not_grow_with_length_times_vocabulary():
    longer = 3 * 1024  # positions more, of two rows
    assert temporaries(plain, 4096) - temporaries(plain, 1024) >= 4 * 2 * longer * 2000
    assert temporaries(ours, 4096) - temporaries(ours, 1024) <= 4 * 2 * longer * 4 * 8

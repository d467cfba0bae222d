"""Moments in fewer bytes: rounding that is right on average, blocks of 8 bits, and their sizes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flaxzoo import models
from flaxzoo.train.optim.moments import (
    Blocks,
    dequantize,
    is_quantized,
    num_blocks,
    quantize,
    round_stochastically,
)
from flaxzoo.train.optim.optimizer import make_optimizer
from flaxzoo.train.optimizer_config import OptimizerConfig

CONFIG = OptimizerConfig(peak_learning_rate=0.02, schedule="constant", max_gradient_norm=None)
DRAWS = 4096


def all_bits():
    """Each sixteenth of the values of 16 random bits, `[4096, 1]`."""
    return jnp.arange(0, 2**16, 2**16 // DRAWS, dtype=jnp.uint32)[:, None]


def numbers():
    """Numbers of both signs and of sixteen powers of ten."""
    rng = np.random.default_rng(0)
    return rng.normal(size=200) * 10.0 ** rng.integers(-12, 4, 200)


def test_rounding_to_bfloat16_is_right_on_average():
    x = jnp.asarray(numbers(), jnp.float32)
    drawn = round_stochastically(jnp.broadcast_to(x, (DRAWS, x.size)), all_bits())
    assert drawn.dtype == jnp.bfloat16
    exact, drawn = np.asarray(x, np.float64), np.asarray(drawn, np.float64)
    # The spacing of bfloat16 is at most 2^-7 of a number, and 16 random bits divide it.
    np.testing.assert_allclose(drawn.mean(0), exact, rtol=2**-7 * 2 / DRAWS)
    assert (np.abs(drawn - exact) < 2**-7 * np.abs(exact)).all()
    assert all(len(set(column)) == 2 for column in drawn.T)


def test_nan_and_infinity_are_not_rounded():
    x = jnp.array([jnp.inf, -jnp.inf, jnp.nan, 0.0])
    for bits in (0, 0xFFFF):
        rounded = round_stochastically(x, jnp.full(4, bits, jnp.uint32))
        np.testing.assert_array_equal(np.asarray(rounded, np.float32), x)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_right_on_average_and_near(signed):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(3, 256)) * np.array([[1e-9], [1.0], [1e5]])
    x = jnp.asarray(x if signed else x**2, jnp.float32)
    bits = jnp.broadcast_to(all_bits()[:, :, None], (DRAWS, *x.shape))
    blocks = jax.jit(quantize, static_argnames="signed")(
        jnp.broadcast_to(x, bits.shape), bits, signed=signed
    )
    assert blocks.codes.dtype == (jnp.int8 if signed else jnp.uint8)
    assert blocks.scales.shape == (DRAWS, 3, 4)
    drawn = np.asarray(dequantize(blocks), np.float64)
    exact, scale = np.asarray(x, np.float64), np.repeat(np.asarray(blocks.scales[0]), 64, -1)
    np.testing.assert_allclose(drawn.mean(0) / scale, exact / scale, rtol=0, atol=2e-5)
    # The largest of a block is exact; the spacing of codes is 4 / codes · root³ of the scale.
    largest = np.abs(exact) == scale
    assert largest.sum() == 12
    np.testing.assert_allclose(drawn[:, largest], np.tile(exact[largest], (DRAWS, 1)), rtol=1e-6)
    root = (np.abs(exact) / scale) ** 0.25
    spacing = 4 / (127 if signed else 256) * (root + 1 / 127) ** 3 * scale
    assert (np.abs(drawn - exact) <= spacing).all()


def test_a_second_moment_of_8_bits_is_never_rounded_to_0():
    x = jnp.full((1, 64), 1e-20).at[0, 0].set(1.0)
    blocks = quantize(x, jnp.zeros((1, 64), jnp.uint32), signed=False)
    np.testing.assert_allclose(dequantize(blocks)[0, 1:], 256.0**-4)
    zero = quantize(jnp.zeros((1, 64)), jnp.zeros((1, 64), jnp.uint32), signed=False)
    assert not dequantize(zero).any()


@pytest.mark.parametrize(
    ("size", "blocks"),
    [(768, 8), (1024, 16), (4096, 64), (1600, 16), (64, 1), (128, 2), (48, 1), (50257, 1)],
)
def test_blocks_divide_an_axis_as_devices_do(size, blocks):
    assert num_blocks(size) == blocks
    kernel = jax.ShapeDtypeStruct((4096, size), jnp.float32)
    assert is_quantized("head/classifier/kernel", kernel) == (size != 50257)


def test_vectors_and_small_arrays_keep_float32():
    for name, shape in {"a/bias": (8192,), "a/kernel": (63, 64), "a/router": (4096, 8)}.items():
        assert not is_quantized(name, jax.ShapeDtypeStruct(shape, jnp.float32))


def trained(config, steps=200):
    """A quadratic with curvatures from 0.01 to 1 and noisy gradients: how far it came down."""
    rng = np.random.default_rng(2)
    curvature = jnp.asarray(10.0 ** rng.uniform(-2, 0, (64, 64)), jnp.float32)
    params = {"kernel": jnp.asarray(rng.normal(size=(64, 64)), jnp.float32)}
    tx = make_optimizer(dataclasses.replace(config, weight_decay=0.0), steps)

    def step(carry, rng):
        params, state = carry
        noise = 0.1 * jax.random.normal(rng, (64, 64))
        gradients = {"kernel": curvature * params["kernel"] + noise}
        updates, state = tx.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), None

    keys = jax.random.split(jax.random.key(0), steps)
    params: Any
    (params, state), _ = jax.jit(lambda carry: jax.lax.scan(step, carry, keys))(
        (params, tx.init(params))
    )
    return params["kernel"], state, float(jnp.sum(curvature * params["kernel"] ** 2) / 2)


@pytest.fixture(scope="module")
def exact():
    return {beta2: trained(dataclasses.replace(CONFIG, beta2=beta2)) for beta2 in (0.95, 0.999)}


@pytest.mark.slow
@pytest.mark.parametrize("beta2", [0.95, 0.999])
@pytest.mark.parametrize(("dtype", "near"), [("bfloat16_stochastic", 0.01), ("int8", 0.03)])
def test_a_quadratic_is_minimized_as_by_float32(dtype, near, beta2, exact):
    config = dataclasses.replace(CONFIG, beta2=beta2, state_dtype=dtype)
    kernel, state, loss = trained(config)
    expected, full, full_loss = exact[beta2]
    assert loss == pytest.approx(full_loss, rel=near)
    # The parameters have moved by up to 4, 200 steps of at most about 0.02.
    assert float(jnp.sqrt(jnp.mean((kernel - expected) ** 2))) < 2 * near
    nu = state[1][0].nu["kernel"]
    nu = dequantize(nu) if isinstance(nu, Blocks) else nu.astype(jnp.float32)
    ratio = nu / full[1][0].nu["kernel"]
    assert float(jnp.mean(ratio)) == pytest.approx(1, abs=0.05)


def test_a_second_moment_moves_where_rounding_to_the_nearest_would_stop_it():
    """It decays by a thousandth a step, which bfloat16 cannot tell from nothing."""
    config = dataclasses.replace(CONFIG, beta2=0.999)
    params, steps = {"kernel": jnp.ones((64, 64))}, 500
    expected = 0.999**steps
    assert jnp.bfloat16(0.999) * jnp.bfloat16(1) == 1  # rounded to the nearest
    for dtype in ("bfloat16_stochastic", "int8"):
        tx = make_optimizer(dataclasses.replace(config, state_dtype=dtype), steps)
        state = jax.jit(tx.init)(params)
        ones = jnp.ones((64, 64))
        start = (
            quantize(ones, jnp.zeros((64, 64), jnp.uint32), signed=False)
            if dtype == "int8"
            else ones.astype(jnp.bfloat16)
        )
        adam = state[1][0]._replace(nu={"kernel": start})
        state = (state[0], (adam, *state[1][1:]), *state[2:])
        zeros = jax.tree.map(jnp.zeros_like, params)
        state = jax.jit(
            lambda state, tx=tx, zeros=zeros: jax.lax.fori_loop(
                0, steps, lambda _, s: tx.update(zeros, s, params)[1], state
            )
        )(state)
        nu = state[1][0].nu["kernel"]
        nu = dequantize(nu) if isinstance(nu, Blocks) else nu.astype(jnp.float32)
        assert float(jnp.mean(nu)) == pytest.approx(expected, rel=0.02), dtype


def bytes_per_parameter(preset, **fields):
    model = models.create(models.preset(preset))
    shapes = jax.eval_shape(lambda: models.init_params(model, jax.random.key(0)))
    tx = make_optimizer(dataclasses.replace(CONFIG, **fields), 10)
    state = jax.eval_shape(tx.init, shapes)
    after = jax.eval_shape(tx.update, shapes, state, shapes)[1]
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state
    )
    held, number = (
        sum(f(x) for x in jax.tree.leaves(tree))
        for f, tree in ((lambda x: x.size * x.dtype.itemsize, state), (lambda x: x.size, shapes))
    )
    return held / number


BYTES = {
    ("adamw", "float32"): 8.0,
    ("adamw", "bfloat16"): 6.0,
    ("adamw", "bfloat16_stochastic"): 4.0,
    ("adamw", "int8"): 2.10,
    ("lamb", "int8"): 2.10,
    ("adafactor", "float32"): 0.01,
    # 68 % of GPT-2's parameters are matrices inside layers, and have one moment.
    ("muon", "float32"): 5.27,
    ("muon", "bfloat16_stochastic"): 2.63,
    ("muon", "int8"): 1.38,
}


@pytest.mark.parametrize(("name", "dtype"), BYTES)
def test_bytes_of_state_for_each_parameter_of_gpt2(name, dtype):
    held = bytes_per_parameter("gpt2", name=name, state_dtype=dtype)
    assert held == pytest.approx(BYTES[name, dtype], abs=0.005)


def test_bytes_of_adafactor_with_a_first_moment():
    fields = {"name": "adafactor", "adafactor_momentum": True}
    assert bytes_per_parameter("gpt2", **fields) == pytest.approx(4.01, abs=0.005)
    held = bytes_per_parameter("gpt2", **fields, state_dtype="int8")
    assert held == pytest.approx(1.06, abs=0.005)

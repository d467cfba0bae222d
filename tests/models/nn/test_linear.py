"""Products with a few rows are the same as any, and so are their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flaxzoo.models.nn.linear import FEW_ROWS, affine


def operands(*batch):
    draw = np.random.default_rng(0).standard_normal
    return draw((*batch, 16), np.float32), draw((24, 16), np.float32)


@pytest.mark.parametrize("batch", [(1,), (2, 1), (2, 4), (9,)], ids=str)
def test_rows_are_multiplied_with_the_transposed_matrix(assert_close, batch):
    x, matrix = operands(*batch)
    bias = np.arange(24, dtype=np.float32)
    assert_close(jax.jit(affine)(x, matrix), x @ matrix.T)
    assert_close(jax.jit(affine)(x, matrix, bias), x @ matrix.T + bias)


def test_gradients_of_a_few_rows(assert_close):
    (x, matrix), bias = operands(2, 3), np.arange(24, dtype=np.float32)
    assert 6 in FEW_ROWS
    gradients = jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(affine(*a))), (0, 1, 2)))
    slope = np.cos(x @ matrix.T + bias)
    of_x, of_matrix, of_bias = gradients(x, matrix, bias)
    assert_close(of_x, slope @ matrix)
    assert_close(of_bias, slope.sum((0, 1)))
    assert_close(of_matrix, np.einsum("bto,bti->oi", slope, x))


def test_few_rows_keep_the_matrix_on_the_left():
    """XLA would turn the operands around again, and with them the packing of the matrix."""
    (x, matrix), bias = operands(4), np.zeros(24, np.float32)
    for inputs in ((x, matrix), (x, matrix, bias)):
        program = jax.jit(affine).lower(*inputs).compile().as_text()
        assert program is not None
        assert "f32[24,4]" in program


def test_sums_have_the_type_that_is_asked_for():
    x, matrix = (jnp.asarray(a, jnp.bfloat16) for a in operands(4))
    assert affine(x, matrix).dtype == jnp.bfloat16
    assert affine(x, matrix, dtype=jnp.float32).dtype == jnp.float32

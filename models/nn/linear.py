"""Affine maps and embeddings."""

import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..config import Execution
from .typing import Array, Float, Int

FEW_ROWS = range(2, 9)
"""Numbers of rows for which the order of the operands on CPU was measured to matter (`affine`)."""


class Linear(nn.Module):
    """x W + b over the last `num_input_axes` axes of x.

    The kernel W has the shape `[*inputs, *features]`; with separate layers it is the matrix
    `[outputs, inputs]`, which is faster for few rows of x on a CPU (`affine`).

    Attributes:
      features: shape of the output axes, e.g. `(N, H)` for attention heads.
      init_std: standard deviation of the initial W; None: it follows from the sizes of W
        (`initial_kernel`). The initial b is 0.
      num_input_axes: how many axes of the input are contracted.
      use_bias: whether to add b.
      execution: precision.
    """

    features: tuple[int, ...]
    init_std: float | None
    num_input_axes: int = 1
    use_bias: bool = True
    execution: Execution = Execution()

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Maps `[..., *inputs]` to `[..., *features]`."""
        e = self.execution
        batch, inputs = x.shape[: -self.num_input_axes], x.shape[-self.num_input_axes :]
        kernel_init = initial_kernel(self.init_std, math.prod(inputs), math.prod(self.features))
        separate = e.layers == "separate"
        matrix = math.prod(self.features), math.prod(inputs)
        shape = matrix if separate else (*inputs, *self.features)
        kernel = self.param("kernel", kernel_init, shape, e.param_dtype).astype(e.dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, self.features, e.param_dtype)
            bias = bias.astype(e.dtype)
        x = x.astype(e.dtype)
        if separate:
            flat = None if bias is None else bias.reshape(-1)
            y = affine(x.reshape(*batch, -1), kernel, flat)
            return y.reshape(*batch, *self.features)
        y = jnp.tensordot(x, kernel, axes=self.num_input_axes)
        return y if bias is None else y + bias


def affine(
    x: Float[Array, "*rest I"],
    matrix: Float[Array, "O I"],
    bias: Float[Array, " O"] | None = None,
    dtype: DTypeLike | None = None,
) -> Float[Array, "*rest O"]:
    """Returns x · matrixᵀ + bias, accumulated in `dtype` (None: that of x).

    XLA's matrix products on CPU copy their right operand to another layout in every call. If x has
    few rows, the matrix is therefore the left operand: GPT-2 generates eight rows in 0.82 of the
    time, and searches with four beams in 0.78 of the time (a single product with many inputs takes
    half of the time; with 32 rows there is no difference).
    """

    def rows_first(x: Array, matrix: Array) -> Array:
        y = jnp.einsum("...i,oi->...o", x, matrix, preferred_element_type=dtype)
        return y if bias is None else y + bias.astype(y.dtype)

    def matrix_first(x: Array, matrix: Array) -> Array:
        rows = x.reshape(-1, x.shape[-1])
        y = jnp.einsum("oi,mi->om", matrix, rows, preferred_element_type=dtype)
        # Without an operation in between, XLA would rewrite (W xᵀ)ᵀ to x Wᵀ.
        barrier = jax.lax.optimization_barrier
        y = barrier(y) if bias is None else y + bias.astype(y.dtype)[:, None]
        return y.T.reshape(*x.shape[:-1], -1)

    if math.prod(x.shape[:-1]) not in FEW_ROWS:
        return rows_first(x, matrix)
    return jax.lax.platform_dependent(x, matrix, cpu=matrix_first, default=rows_first)


def initial_kernel(
    std: float | None, inputs: int, outputs: int
) -> Callable[[Array, tuple[int, ...], DTypeLike], Array]:
    """Returns the initializer of a kernel: normal, or uniform (Glorot and Bengio 2010).

    Args:
      std: standard deviation of the normal distribution; None: uniform in
        ±√(6 / (inputs + outputs)), which keeps the variance the same in the forward and in the
        backward pass.
      inputs: number of inputs of the kernel as a matrix.
      outputs: number of outputs; those of all heads together.
    """
    if std is not None:
        return nn.initializers.normal(std)
    limit = math.sqrt(6 / (inputs + outputs))

    return lambda rng, shape, dtype: jax.random.uniform(rng, shape, dtype, -limit, limit)


class Embedding(nn.Module):
    """A table of `num_embeddings` vectors of size `features`, called `embedding`."""

    num_embeddings: int
    features: int
    init_std: float = 0.02
    execution: Execution = Execution()

    def setup(self) -> None:
        """Declares the table."""
        init = nn.initializers.normal(self.init_std)
        shape = (self.num_embeddings, self.features)
        self.embedding = self.param("embedding", init, shape, self.execution.param_dtype)

    def __call__(self, ids: Int[Array | np.ndarray, "*rest"]) -> Float[Array, "*rest D"]:
        """Returns the vector of each id; NaN for an id outside the table."""
        return embedding_lookup(self.embedding, ids).astype(self.execution.dtype)


def embedding_lookup(
    table: Float[Array, "V D"], ids: Int[Array | np.ndarray, "*rest"]
) -> Float[Array, "*rest D"]:
    """Returns the row of each id; NaN for an id outside the table, negative ones included."""
    return table.at[ids].get(mode="fill", wrap_negative_indices=False)

"""Affine maps and embeddings: the only parameters of a transformer besides its norms."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from ..config import Execution
from .typing import Array, Float, Int

FEW_ROWS = range(2, 9)
"""Numbers of rows that the order of a product on CPU was seen to matter for (`affine`)."""


class Linear(nn.Module):
    """x W + b over the last `num_input_axes` axes of x.

    The kernel W has the shape `[*inputs, *features]`; with separate layers it is
    the matrix `[outputs, inputs]`, which suits few rows of x on a CPU (`affine`).

    Attributes:
      features: shape of the output axes, e.g. `(N, H)` for attention heads.
      init_std: standard deviation of the initial W, or None for the one that its
        sizes ask for (`initial_kernel`); b starts at zero.
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
    dtype: Any = None,
) -> Float[Array, "*rest O"]:
    """Rows of x · matrixᵀ + bias, accumulated and answered in `dtype` (None: that of x).

    XLA's CPU products pack their right operand anew each time, so beside a few rows of x the
    matrix goes to the left: eight rows of GPT-2 are generated in 0.82 of the time, a search with
    four beams takes 0.78 (where inputs are many, the product alone half; with 32 rows nothing
    is won).
    """

    def rows_first(x: Array, matrix: Array) -> Array:
        y = jnp.einsum("...i,oi->...o", x, matrix, preferred_element_type=dtype)
        return y if bias is None else y + bias.astype(y.dtype)

    def matrix_first(x: Array, matrix: Array) -> Array:
        rows = x.reshape(-1, x.shape[-1])
        y = jnp.einsum("oi,mi->om", matrix, rows, preferred_element_type=dtype)
        # Without something between, XLA sees that (W xᵀ)ᵀ is x Wᵀ, and computes that.
        barrier = jax.lax.optimization_barrier
        y = barrier(y) if bias is None else y + bias.astype(y.dtype)[:, None]
        return y.T.reshape(*x.shape[:-1], -1)

    if math.prod(x.shape[:-1]) not in FEW_ROWS:
        return rows_first(x, matrix)
    return jax.lax.platform_dependent(x, matrix, cpu=matrix_first, default=rows_first)


def initial_kernel(std: float | None, inputs: int, outputs: int) -> Any:
    """Normal with `std`, or uniform in ±√(6 / (inputs + outputs)) (Glorot and Bengio 2010).

    The second keeps variances the same forwards and backwards, for W as a matrix: heads are
    outputs like any other.
    """
    if std is not None:
        return nn.initializers.normal(std)
    limit = math.sqrt(6 / (inputs + outputs))

    def uniform(rng: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        return jax.random.uniform(rng, shape, dtype, -limit, limit)

    return uniform


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
        """Looks `ids` up; an id outside the table gives NaN, never a neighbour's vector."""
        return embedding_lookup(self.embedding, ids).astype(self.execution.dtype)


def embedding_lookup(
    table: Float[Array, "V D"], ids: Int[Array | np.ndarray, "*rest"]
) -> Float[Array, "*rest D"]:
    """Rows of `table`; NaN for an id outside it, negative ones included."""
    return table.at[ids].get(mode="fill", wrap_negative_indices=False)

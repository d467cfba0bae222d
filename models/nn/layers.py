"""The modules of a layer: linear maps, embeddings, norms and feed-forward blocks."""

import functools
import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..config import Execution, NormKind, TransformerConfig
from .dropout import RowKeys, dropout
from .typing import Array, Float, Int

FEW_ROWS = range(2, 9)
"""If x has one of these numbers of rows, `affine` swaps the operands of the matmul on CPU."""


class Linear(nn.Module):
    """Computes x W + b over the last `num_input_axes` axes of x.

    The kernel W has the shape `[*inputs, *features]`; with separate layers, W is a matrix
    `[outputs, inputs]`, which is faster on CPU for few rows of x (`affine`).

    Attributes:
      features: shape of the output axes, e.g. `(N, H)` for attention heads.
      init_std: standard deviation of the initial values of W. If None, the distribution depends on
        the sizes of W (`initial_kernel`). The initial value of b is 0.
      num_input_axes: number of contracted input axes.
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
        # Separate layers store the matrix transposed, for decoding (`unstack_layers`).
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
        # With stacked layers, the kernel keeps its axes: [*batch, *inputs] times [*inputs,
        # *features].
        y = jnp.tensordot(x, kernel, axes=self.num_input_axes)
        return y if bias is None else y + bias


def affine(
    x: Float[Array, "*rest I"],
    matrix: Float[Array, "O I"],
    bias: Float[Array, " O"] | None = None,
    dtype: DTypeLike | None = None,
) -> Float[Array, "*rest O"]:
    """Returns x · matrixᵀ + bias, accumulated in `dtype` (by default the dtype of x).

    On CPU, XLA copies the right operand of every matrix product to another layout. If x has few
    rows, the matrix is therefore the left operand. With this order, GPT-2 takes 0.82 of the time
    for eight rows, and 0.78 of the time for four beams. (The time of a single product with many
    inputs is halved. For 32 rows, both orders take the same time.)
    """

    def rows_first(x: Array, matrix: Array) -> Array:
        y = jnp.einsum("...i,oi->...o", x, matrix, preferred_element_type=dtype)
        return y if bias is None else y + bias.astype(y.dtype)

    def matrix_first(x: Array, matrix: Array) -> Array:
        rows = x.reshape(-1, x.shape[-1])
        y = jnp.einsum("oi,mi->om", matrix, rows, preferred_element_type=dtype)
        # Separate the product and the transpose by another operation: otherwise XLA rewrites (W
        # xᵀ)ᵀ as x Wᵀ.
        barrier = jax.lax.optimization_barrier
        y = barrier(y) if bias is None else y + bias.astype(y.dtype)[:, None]
        return y.T.reshape(*x.shape[:-1], -1)

    if math.prod(x.shape[:-1]) not in FEW_ROWS:
        return rows_first(x, matrix)
    return jax.lax.platform_dependent(x, matrix, cpu=matrix_first, default=rows_first)


def initial_kernel(
    std: float | None, inputs: int, outputs: int
) -> Callable[[Array, tuple[int, ...], DTypeLike], Array]:
    """Returns a kernel initializer: normal, or uniform as in Glorot and Bengio 2010.

    Args:
      std: standard deviation of the normal distribution. If None, the distribution is uniform in
        ±√(6 / (inputs + outputs)), which preserves the variance in both passes.
      inputs: number of inputs, if the kernel is viewed as a matrix.
      outputs: number of outputs of all heads together.
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
        """Returns the vector of each id, or NaN for an id outside the table."""
        return embedding_lookup(self.embedding, ids).astype(self.execution.dtype)


def embedding_lookup(
    table: Float[Array, "V D"], ids: Int[Array | np.ndarray, "*rest"]
) -> Float[Array, "*rest D"]:
    """Returns the table's row for each id, or NaN for an id that has no row in the table."""
    return table.at[ids].get(mode="fill", wrap_negative_indices=False)


def standardized(x: Float[Array, "... D"], eps: float) -> Float[Array, "... D"]:
    """Returns (x - mean) / √(variance + eps) over the last axis, in float32."""
    x32 = x.astype(jnp.float32)
    # Center first, because E[x²] - E[x]² would lose precision.
    centered = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centered), axis=-1, keepdims=True)
    return centered * jax.lax.rsqrt(variance + eps)


class LayerNorm(nn.Module):
    """Layer normalization over the last axis, in float32 (Ba et al. 2016).

    Attributes:
      config: `norm_eps` is added to the variance; `norm_affine` adds a learned scale, and with
        `norm_bias` also a learned bias.
      execution: precision.
      use_bias: whether an affine norm has a bias.
      num_scaled_axes: the number of trailing axes that the scale and the bias have.
    """

    config: TransformerConfig
    execution: Execution
    use_bias: bool = True
    num_scaled_axes: int = 1

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Returns (x - mean) / √(variance + eps) · scale + bias."""
        y = standardized(x, self.config.norm_eps)
        if self.config.norm_affine:
            shape, dtype = x.shape[-self.num_scaled_axes :], self.execution.param_dtype
            y = y * self.param("scale", nn.initializers.ones, shape, dtype)
            if self.use_bias and self.config.norm_bias:
                y += self.param("bias", nn.initializers.zeros, shape, dtype)
        return y.astype(self.execution.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square normalization, in float32 (Zhang and Sennrich 2019).

    Attributes:
      config: `norm_eps` is added to the mean square; `norm_offset` is added to the parameter
        `scale`, whose initial value is 1 - offset.
      execution: precision.
      num_axes: number of trailing axes that are normalized together.
    """

    config: TransformerConfig
    execution: Execution
    num_axes: int = 1

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Returns x / √(mean(x²) + eps) · (offset + scale)."""
        x32 = x.astype(jnp.float32)
        axes, shape = tuple(range(-self.num_axes, 0)), x.shape[-self.num_axes :]
        mean_square = jnp.mean(jnp.square(x32), axis=axes, keepdims=True)
        y = x32 * jax.lax.rsqrt(mean_square + self.config.norm_eps)
        offset, dtype = self.config.norm_offset, self.execution.param_dtype
        scale = self.param("scale", nn.initializers.constant(1 - offset), shape, dtype)
        y = y * (scale if offset == 0 else offset + scale.astype(jnp.float32))
        return y.astype(self.execution.dtype)


NORMS: dict[NormKind, type[RMSNorm] | type[LayerNorm]] = {"rms": RMSNorm, "layer": LayerNorm}
"""The module that normalizes the residual stream, for each value of `norm_kind`."""


def exact_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the exact GELU, x · Φ(x), computed in float32 (Hendrycks and Gimpel 2016).

    Uses `erf`. `jax.nn.gelu` uses `erfc`, which is more accurate for tiny values and slower on CPU.
    """
    x32 = x.astype(jnp.float32)
    return (0.5 * x32 * (1 + jax.lax.erf(x32 * math.sqrt(0.5)))).astype(x.dtype)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": exact_gelu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),  # So et al. 2021, "Primer"
    "silu": jax.nn.silu,
}


class FeedForward(nn.Module):
    """Computes activation(x W₁ + b₁) W₂ + b₂ (Vaswani et al. 2017, section 3.3).

    Attributes:
      config: the sizes, the activation, and `use_bias`.
      execution: precision.
      output_init_std: standard deviation of the initial W₂.
    """

    config: TransformerConfig
    execution: Execution
    output_init_std: float | None

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], rng: RowKeys | None = None
    ) -> Float[Array, "B T D"]:
        """Applies the same map to every token; `rng` enables dropout after the activation."""
        c = self.config
        linear = functools.partial(Linear, use_bias=c.use_bias, execution=self.execution)
        x = linear((c.feed_forward_dim,), c.init_std, name="up")(x)  # [B, T, F]
        x = dropout(ACTIVATIONS[c.activation](x), c.activation_dropout_rate, rng, "activation")
        return linear((c.d_model,), self.output_init_std, name="down")(x)


class GatedFeedForward(nn.Module):
    """Computes (activation(x W_gate) · x W_up) W_down, a gated linear unit (Shazeer 2020).

    Attributes:
      config: the sizes, the activation, `use_bias`, and `feed_forward_output_bias` for W_down.
      execution: precision.
      output_init_std: standard deviation of the initial W_down.
    """

    config: TransformerConfig
    execution: Execution
    output_init_std: float | None

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], rng: RowKeys | None = None
    ) -> Float[Array, "B T D"]:
        """Applies the same map to every token; `rng` enables dropout after the product."""
        c = self.config
        linear = functools.partial(Linear, execution=self.execution)
        biased = functools.partial(linear, use_bias=c.use_bias)
        gate = biased((c.feed_forward_dim,), c.init_std, name="gate")(x)  # [B, T, F]
        up = biased((c.feed_forward_dim,), c.init_std, name="up")(x)  # [B, T, F]
        x = ACTIVATIONS[c.activation](gate) * up
        x = dropout(x, c.activation_dropout_rate, rng, "activation")
        bias = c.feed_forward_output_bias
        return linear((c.d_model,), self.output_init_std, use_bias=bias, name="down")(x)

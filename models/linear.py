"""Affine maps and embeddings: the only parameters of a transformer besides its norms."""

import flax.linen as nn
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from .config import Execution

DEFAULT_INIT = nn.initializers.normal(0.02)


class Linear(nn.Module):
    """x W + b over the last `num_input_axes` axes of x.

    Attributes:
      features: shape of the output axes, e.g. `(N, H)` for attention heads.
      num_input_axes: how many axes of the input are contracted.
      use_bias: whether to add b.
      kernel_init: initialiser of W; b starts at zero.
      execution: precision.
    """

    features: tuple[int, ...]
    num_input_axes: int = 1
    use_bias: bool = True
    kernel_init: nn.initializers.Initializer = DEFAULT_INIT
    execution: Execution = Execution()

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Maps `[..., *inputs]` to `[..., *features]`."""
        e, axes = self.execution, self.num_input_axes
        shape = (*x.shape[-axes:], *self.features)
        kernel = self.param("kernel", self.kernel_init, shape, e.param_dtype)
        contract = tuple(range(x.ndim - axes, x.ndim)), tuple(range(axes))
        y = lax.dot_general(x.astype(e.dtype), kernel.astype(e.dtype), (contract, ((), ())))
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, self.features, e.param_dtype)
            y = y + bias.astype(e.dtype)
        return y


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
        return look_up(self.embedding, ids).astype(self.execution.dtype)


def look_up(
    table: Float[Array, "V D"], ids: Int[Array | np.ndarray, "*rest"]
) -> Float[Array, "*rest D"]:
    """Rows of `table`; NaN for an id outside it, negative ones included."""
    return table.at[ids].get(mode="fill", wrap_negative_indices=False)

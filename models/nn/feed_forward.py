"""Feed-forward blocks, which map each position by itself, and their activations."""

import functools
import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from ..config import Execution, TransformerConfig
from .dropout import RowKeys, dropout
from .linear import Linear
from .typing import Array, Float


def exact_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the exact GELU, x · Φ(x), computed in float32 (Hendrycks and Gimpel 2016).

    Uses `erf`; `jax.nn.gelu` uses `erfc`, which keeps the last digits of tiny values and is slower
    on CPU.
    """
    x32 = x.astype(jnp.float32)
    return (0.5 * x32 * (1 + jax.lax.erf(x32 * math.sqrt(0.5)))).astype(x.dtype)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": exact_gelu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


class FeedForward(nn.Module):
    """activation(x W₁ + b₁) W₂ + b₂ (Vaswani et al. 2017, section 3.3).

    Attributes:
      config: sizes, activation, and `use_bias`.
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
        """Maps every position in the same way; `rng` switches on dropout after the activation."""
        c = self.config
        linear = functools.partial(Linear, use_bias=c.use_bias, execution=self.execution)
        x = linear((c.feed_forward_dim,), c.init_std, name="up")(x)  # [B, T, F]
        x = dropout(ACTIVATIONS[c.activation](x), c.activation_dropout_rate, rng, "activation")
        return linear((c.d_model,), self.output_init_std, name="down")(x)


class GatedFeedForward(nn.Module):
    """(activation(x W_gate) · x W_up) W_down, a gated linear unit (Shazeer 2020).

    Attributes:
      config: sizes, activation, and `use_bias`.
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
        """Maps every position in the same way; `rng` switches on dropout after the product."""
        c = self.config
        linear = functools.partial(Linear, use_bias=c.use_bias, execution=self.execution)
        gate = linear((c.feed_forward_dim,), c.init_std, name="gate")(x)  # [B, T, F]
        up = linear((c.feed_forward_dim,), c.init_std, name="up")(x)  # [B, T, F]
        x = ACTIVATIONS[c.activation](gate) * up
        x = dropout(x, c.activation_dropout_rate, rng, "activation")
        return linear((c.d_model,), self.output_init_std, name="down")(x)

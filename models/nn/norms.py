"""Normalization of each vector of the residual stream."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from ..config import Execution
from .typing import Array, Float


class LayerNorm(nn.Module):
    """Layer normalization over the last axis, in float32 (Ba et al. 2016).

    Attributes:
      eps: added to the variance.
      execution: precision.
    """

    eps: float
    execution: Execution

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Returns (x - mean) / √(variance + eps) · scale + bias."""
        shape, dtype = x.shape[-1:], self.execution.param_dtype
        scale = self.param("scale", nn.initializers.ones, shape, dtype)
        bias = self.param("bias", nn.initializers.zeros, shape, dtype)
        x32 = x.astype(jnp.float32)
        centered = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centered), axis=-1, keepdims=True)
        y = centered * jax.lax.rsqrt(variance + self.eps) * scale + bias
        return y.astype(self.execution.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square normalization over the last axis, in float32 (Zhang and Sennrich 2019).

    Attributes:
      eps: added to the mean square.
      execution: precision.
    """

    eps: float
    execution: Execution

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Returns x / √(mean(x²) + eps) · scale."""
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:], self.execution.param_dtype)
        x32 = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        y = x32 * jax.lax.rsqrt(mean_square + self.eps) * scale
        return y.astype(self.execution.dtype)

"""A convolution over tokens, whose result is added to the output of the first layer.

This convolution is part of the authors' code for DeBERTa version 2 (He et al. 2021). If x are the
embeddings and y is the output of the first layer, the second layer reads LayerNorm(y + activation(x
∗ W + b)). The convolution reads zeros in place of padding and of the tokens of other documents.
"""

import flax.linen as nn
import jax.numpy as jnp
from flax import struct

from ...config import Execution
from ...nn.dropout import RowKeys, dropout
from ...nn.layers import Linear, standardized
from ...nn.masks import AttentionMask
from ...nn.typing import Array, Float
from ..encoder import POOLERS, EncoderConfig


@struct.dataclass
class FirstLayerTerm:
    """The term added to the first layer's output, and the parameters of the norm of the sum."""

    added: Float[Array, "B T D"]
    scale: Float[Array, " D"]
    bias: Float[Array, " D"]

    def to(self, x: Float[Array, "B T D"], eps: float) -> Float[Array, "B T D"]:
        """Returns the normalized sum of x and the term; `eps` is added to the variance."""
        return (standardized(x + self.added, eps) * self.scale + self.bias).astype(x.dtype)


class Convolution(nn.Module):
    """A convolution over the tokens around each token.

    Attributes:
      config: the width, the initial standard deviation, and the dropout rate.
      execution: precision.
      size: number of tokens that the convolution reads for each token: the token itself, and the
        same number of tokens on each side.
      activation: the name of the non-linearity in `POOLERS`.
    """

    config: EncoderConfig
    execution: Execution
    size: int
    activation: str

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], mask: AttentionMask, rng: RowKeys | None
    ) -> FirstLayerTerm:
        """Computes the term that is added to the first layer's output from the embeddings x."""
        c, e = self.config, self.execution
        half, (batch, length, _) = self.size // 2, x.shape
        # Each diagonal of the mask belongs to one offset, and shows which tokens may attend to the
        # token at this offset.
        visible = jnp.broadcast_to(mask.materialize()[:, 0], (batch, length, length))
        padded = jnp.pad(x, ((0, 0), (half, half), (0, 0)))
        # Shift the tokens by each offset, and set masked tokens to 0.
        taps: list[Array] = []
        for offset in range(-half, half + 1):
            seen = jnp.diagonal(visible, offset, axis1=1, axis2=2)  # [B, T - |offset|]
            missing = length - seen.shape[1]
            seen = jnp.pad(seen, ((0, 0), (missing, 0) if offset < 0 else (0, missing)))
            taps.append(padded[:, half + offset :][:, :length] * seen[..., None])
        stacked = jnp.stack(taps, axis=2).astype(e.dtype)  # [B, T, taps, D]
        y = Linear((c.d_model,), c.init_std, 2, execution=e, name="taps")(stacked)
        y = dropout(y, c.dropout_rate, rng, "convolution")
        scale = self.param("scale", nn.initializers.ones, (c.d_model,), e.param_dtype)
        bias = self.param("bias", nn.initializers.zeros, (c.d_model,), e.param_dtype)
        return FirstLayerTerm(POOLERS[self.activation](y), scale, bias)

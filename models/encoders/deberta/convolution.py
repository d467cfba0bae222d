"""A convolution over tokens, whose result is added to the output of the first layer.

This convolution is part of the authors' code for DeBERTa version 2 (He et al. 2021). If x are the
embeddings and y is the output of the first layer, the second layer reads LayerNorm(y + activation(x
∗ W + b)). The convolution reads zeros in place of padding and of the tokens of other documents.
"""

import dataclasses
from typing import Literal

import flax.linen as nn
import jax.numpy as jnp
from flax import struct

from ....data.common.fields import require
from ...config import Execution, Size, divisors_of
from ...nn.dropout import RowKeys, dropout
from ...nn.layers import initial_kernel, standardized
from ...nn.masks import AttentionMask
from ...nn.typing import Array, Float
from ..encoder import POOLERS
from .disentangled import DisentangledConfig

Pooler = Literal["gelu", "gelu_tanh", "relu", "relu_squared", "silu", "tanh"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvolutionConfig(DisentangledConfig):
    """An encoder that may have a convolution, and its head.

    Raises:
      UserError: a size is out of range, options contradict each other, or the head needs labels and
        has none.
    """

    convolution_size: Size | None = None
    """Number of tokens that the convolution of the embeddings reads. If None, the model has no
    convolution."""
    convolution_activation: Pooler = "tanh"
    """Non-linearity of the convolution."""
    convolution_groups: Size = 1
    """Number of groups of channels. The convolution computes each group from the same group."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.convolution_size is not None:
            require(
                self.d_model % self.convolution_groups == 0,
                f"convolution_groups {self.convolution_groups} must divide d_model "
                f"{self.d_model}: choose {divisors_of(self.d_model)}",
            )
            problem = f"convolution_size must be odd, got {self.convolution_size}"
            require(self.convolution_size % 2 == 1, problem)
            require(
                self.num_layers > 0,
                "convolution_size changes the output of the first layer, and num_layers is 0: "
                "leave it out",
            )


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
      config: the sizes, the non-linearity, the initial standard deviation, and the dropout rate.
        The convolution reads, for each token, the token itself, and the same number of tokens on
        each side.
      execution: precision.
    """

    config: ConvolutionConfig
    execution: Execution

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], mask: AttentionMask, rng: RowKeys | None
    ) -> FirstLayerTerm:
        """Computes the term that is added to the first layer's output from the embeddings x."""
        c, e = self.config, self.execution
        assert c.convolution_size is not None
        half, (batch, length, _) = c.convolution_size // 2, x.shape
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
        y = _Taps(c, e, name="taps")(stacked)
        y = dropout(y, c.dropout_rate, rng, "convolution")
        scale = self.param("scale", nn.initializers.ones, (c.d_model,), e.param_dtype)
        bias = self.param("bias", nn.initializers.zeros, (c.d_model,), e.param_dtype)
        return FirstLayerTerm(POOLERS[c.convolution_activation](y), scale, bias)


class _Taps(nn.Module):
    """Maps the tokens that the convolution reads to one vector, separately for each group.

    The kernel has the shape `[taps, D / groups, D]`; with separate layers, it is a matrix
    `[D, taps · D / groups]`, as in `Linear`.
    """

    config: ConvolutionConfig
    execution: Execution

    @nn.compact
    def __call__(self, x: Float[Array, "B T taps D"]) -> Float[Array, "B T D"]:
        """Returns the weighted sum of the taps, plus a bias."""
        c, e, (batch, length, size, width) = self.config, self.execution, x.shape
        inputs = width // c.convolution_groups
        init = initial_kernel(c.init_std, size * inputs, width)
        separate = e.layers == "separate"
        shape = (width, size * inputs) if separate else (size, inputs, width)
        kernel = self.param("kernel", init, shape, e.param_dtype).astype(e.dtype)
        kernel = kernel.T if separate else kernel
        bias = self.param("bias", nn.initializers.zeros, (width,), e.param_dtype)
        # Split the channels into groups: G groups of I inputs and of O outputs.
        kernel = kernel.reshape(size, inputs, c.convolution_groups, -1)
        x = x.reshape(batch, length, size, c.convolution_groups, inputs)
        y = jnp.einsum("BTKGI,KIGO->BTGO", x, kernel)
        return y.reshape(batch, length, width) + bias.astype(e.dtype)

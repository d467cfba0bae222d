"""What transformers are built of: positions, norms, feed-forward, the stack of layers."""

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from .attention import Cache, LayerCache, MultiHeadAttention
from .config import Execution
from .dropout import DROPOUT_MASK, RowKeys, dropout, fold_in
from .linear import Linear


def exact_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Times its own normal distribution function, x Φ(x), in float32 (Hendrycks and Gimpel 2016).

    By erf, where jax.nn.gelu takes erfc for the last digits of tiny values: on a CPU that is
    the dearer function.
    """
    x32 = x.astype(jnp.float32)
    return (0.5 * x32 * (1 + jax.lax.erf(x32 * math.sqrt(0.5)))).astype(x.dtype)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": exact_gelu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}

REMAT_POLICIES: dict[str, Callable[..., Any] | None] = {
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(DROPOUT_MASK),
    ),
    "full": None,
}


def sinusoidal_positions(length: int, d_model: int, base: float = 10_000.0) -> np.ndarray:
    """Sine and cosine of every position, as a table float32[length, d_model].

    Vaswani et al. 2017, section 3.5: dimension 2i holds sin(p / base^(2i/D)),
    2i + 1 its cosine.  The paper's base is 10,000; 100,000 is also in use.
    """
    frequency = base ** (-np.arange(0, d_model, 2) / d_model)
    angle = np.arange(length)[:, None] * frequency[None, :]
    table = np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(length, -1)
    return table[:, :d_model].astype(np.float32)


class LayerNorm(nn.Module):
    """Layer normalisation over the last axis, in float32 (Ba et al. 2016)."""

    eps: float
    execution: Execution

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """(x - mean) / √(variance + eps) · scale + bias."""
        shape, dtype = x.shape[-1:], self.execution.param_dtype
        scale = self.param("scale", nn.initializers.ones, shape, dtype)
        bias = self.param("bias", nn.initializers.zeros, shape, dtype)
        x32 = x.astype(jnp.float32)
        centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        y = centred * jax.lax.rsqrt(variance + self.eps) * scale + bias
        return y.astype(self.execution.dtype)


class FeedForward(nn.Module):
    """activation(x W₁ + b₁) W₂ + b₂ (Vaswani et al. 2017, section 3.3)."""

    config: Any
    execution: Execution
    output_init_std: float

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Applied to every position alike."""
        c = self.config
        linear = functools.partial(Linear, use_bias=c.use_bias, execution=self.execution)
        x = linear((c.feed_forward_dim,), c.init_std, name="up")(x)
        x = ACTIVATIONS[c.activation](x)
        return linear((c.d_model,), self.output_init_std, name="down")(x)


@struct.dataclass
class LayerInputs:
    """What differs from layer to layer."""

    index: int | Array
    cache: LayerCache | None


@struct.dataclass
class SharedInputs:
    """What all layers see alike."""

    mask: Bool[Array, "#B 1 #T #S"]
    banded_mask: Bool[Array, "#B 1 T S"] | None
    """What every second layer sees instead."""
    cache_index: Int[Array, ""] | int
    rng: RowKeys | None
    output_attentions: bool = struct.field(pytree_node=False)


class TransformerLayer(nn.Module):
    """Self-attention and feed-forward, each a residual (Vaswani et al. 2017, section 3.1).

    Attributes:
      config: sizes, and where architectures differ: `norm_position` ("pre" or
        "post" the residual sum), `use_bias`, `scale_residual_init`.
      execution: precision.
    """

    config: Any
    execution: Execution

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], own: LayerInputs, shared: SharedInputs
    ) -> tuple[Float[Array, "B T D"], tuple[LayerCache | None, Array | None]]:
        """The residual stream, and (cache, attention weights)."""
        c, e = self.config, self.execution
        rng = fold_in(shared.rng, own.index)
        mask = shared.mask
        if shared.banded_mask is not None:
            mask = jnp.where(own.index % 2 == 1, shared.banded_mask, mask)
        residual_scale = 1 / math.sqrt(2 * c.num_layers) if c.scale_residual_init else 1.0
        output_std = c.init_std * residual_scale
        attention = MultiHeadAttention(c, e, output_std, name="attention")
        feed_forward = FeedForward(c, e, output_std, name="feed_forward")
        pre = c.norm_position == "pre"

        norm = LayerNorm(c.norm_eps, e, name="attention_norm")
        y, cache, weights = attention(
            norm(x) if pre else x,
            mask,
            own.cache,
            shared.cache_index,
            rng,
            shared.output_attentions,
        )
        x = x + dropout(y, c.dropout_rate, rng, "attention")
        x = x if pre else norm(x)

        norm = LayerNorm(c.norm_eps, e, name="feed_forward_norm")
        y = feed_forward(norm(x) if pre else x)
        x = x + dropout(y, c.dropout_rate, rng, "feed_forward")
        return x if pre else norm(x), (cache, weights)


def run_transformer_layers(
    config: Any, execution: Execution, x: Array, cache: Cache | None, shared: SharedInputs
) -> tuple[Array, tuple[Any, Any]]:
    """Runs the L `TransformerLayer`s of a model, in its compact method.

    Returns:
      The residual stream; the caches and the attention weights of the layers,
      with a leading L, or as tuples of L with separate layers.
    """
    caches = None if cache is None else cache.layers
    if execution.layers != "separate":
        per_layer = LayerInputs(jnp.arange(config.num_layers), caches)
        return run_layers(TransformerLayer, config, execution, x, per_layer, shared)
    caches = caches or (None,) * config.num_layers
    per_layer = [LayerInputs(i, cache) for i, cache in enumerate(caches)]
    x, outs = run_layers(TransformerLayer, config, execution, x, per_layer, shared)
    layers, attentions = zip(*outs, strict=True)
    return x, (layers, None if attentions[0] is None else attentions)


def run_layers(
    layer: type[nn.Module],
    config: Any,
    execution: Execution,
    x: Array,
    per_layer: Any,
    shared: Any,
) -> tuple[Array, Any]:
    """Runs `x, out = layer(config, execution)(x, per_layer[i], shared)` over L equal layers.

    To be called in a module's compact method. The parameters stand below its
    `layers`, each array with a leading L, or below `layers_0`, `layers_1` …
    when `execution.layers` is "separate".

    Args:
      layer: the class of one layer.
      config: sizes; `num_layers` is L.
      execution: scanned, unrolled or separate; what is rematerialised.
      x: the residual stream.
      per_layer: a tree of arrays with a leading L; with separate layers a
        sequence of L trees.
      shared: what every layer sees alike.

    Returns:
      The residual stream, and each layer's `out`, held as `per_layer` is.
    """
    if execution.remat != "none":
        policy = REMAT_POLICIES[execution.remat]
        # Inside a loop nothing can be merged away; side by side it could.
        layer = nn.remat(layer, policy=policy, prevent_cse=execution.layers != "scan")
    if execution.layers == "separate":
        outs = []
        for i, own in enumerate(per_layer):
            x, out = layer(config, execution, name=f"layers_{i}")(x, own, shared)
            outs.append(out)
        return x, outs
    scanned = nn.scan(
        layer,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=(0, nn.broadcast),  # pyright: ignore[reportArgumentType]  (its hint is too narrow)
        length=config.num_layers,
        unroll=config.num_layers if execution.layers == "unroll" else 1,
    )
    return scanned(config, execution, name="layers")(x, per_layer, shared)

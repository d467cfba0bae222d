"""What transformers are built of: positions, norms, feed-forward, the stack of layers."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ..config import Execution
from .attention import Cache, LayerCache, MultiHeadAttention
from .dropout import DROPOUT_MASK, RowKeys, dropout, fold_in
from .fused_attention import mask_for
from .linear import Linear
from .masks import Mask, Visible, alternate
from .typing import Array, Float, Int


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
    "silu": jax.nn.silu,
}

REMAT_POLICIES: dict[str, Callable[..., Any] | None] = {
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(DROPOUT_MASK),
    ),
    "full": None,
}


CROSS = 1
"""Tells the keys of a layer's second attention from those of its first."""


def sinusoidal_positions(
    length: int,
    d_model: int,
    base: float = 10_000.0,
    layout: Literal["interleaved", "halves"] = "interleaved",
) -> np.ndarray:
    """Sine and cosine of every position, as a table float32[length, d_model].

    Vaswani et al. 2017, section 3.5: dimension 2i holds sin(p / base^(2i/D)),
    2i + 1 its cosine.  The paper's base is 10,000; 100,000 is also in use.  In
    "halves" (Marian) all the sines stand before all the cosines.
    """
    frequency = base ** (-np.arange(0, d_model, 2) / d_model)
    angle = np.arange(length)[:, None] * frequency[None, :]
    waves = np.sin(angle), np.cos(angle)
    if layout == "halves":
        table = np.concatenate(waves, axis=-1)
    else:
        table = np.stack(waves, axis=-1).reshape(length, -1)
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
    output_init_std: float | None

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], rng: RowKeys | None = None
    ) -> Float[Array, "B T D"]:
        """Applied to every position alike."""
        c = self.config
        linear = functools.partial(Linear, use_bias=c.use_bias, execution=self.execution)
        x = linear((c.feed_forward_dim,), c.init_std, name="up")(x)
        x = dropout(ACTIVATIONS[c.activation](x), c.activation_dropout_rate, rng, "activation")
        return linear((c.d_model,), self.output_init_std, name="down")(x)


@struct.dataclass
class LayerInputs:
    """What differs from layer to layer."""

    index: int | Array
    cache: LayerCache | None
    cross: LayerCache | None = None
    """Keys and values of the encoder's output, where they are known already."""


@struct.dataclass
class SharedInputs:
    """What all layers see alike."""

    mask: Mask
    banded_mask: Mask | None
    """What every second layer sees instead."""
    cache_index: Int[Array, ""] | int
    rng: RowKeys | None
    output_attentions: bool = struct.field(pytree_node=False)
    encoded: Float[Array, "B S D"] | None = None
    """What the encoder answered, for the layers of a decoder."""
    cross_mask: Mask | None = None
    """What these see of it."""


def share(
    config: Any,
    execution: Execution,
    visible: Visible,
    cache: Cache | None,
    rng: RowKeys | None,
    output_attentions: bool,
    *,
    window: int | None = None,
    encoded: Float[Array, "B S D"] | None = None,
    cross: Visible | None = None,
) -> SharedInputs:
    """What a stack's layers see alike, each mask as whoever computes attention takes it.

    Args:
      config: sizes.
      execution: names the kernel.
      visible: what each token may see.
      cache: keys and values of earlier calls.
      rng: keys of dropout.
      output_attentions: whether to answer the attention weights as well.
      window: if given, every second layer sees only the last so many tokens.
      encoded: what the encoder answered, for the layers of a decoder.
      cross: what these may see of it.
    """

    def taken(visible: Visible | None) -> Mask | None:
        if visible is None:
            return None
        return mask_for(
            visible,
            config,
            execution,
            dropped=rng is not None,
            cached=cache is not None,
            weights=output_attentions,
        )

    mask = taken(visible)
    assert mask is not None
    banded = None if window is None else dataclasses.replace(visible, window=window)
    return SharedInputs(
        mask, taken(banded), visible.start, rng, output_attentions, encoded, taken(cross)
    )


@struct.dataclass
class LayerOutputs:
    """What a layer answers beside the residual stream; a stack, with a leading L or in tuples."""

    cache: Any
    """A `LayerCache`, or None."""
    attentions: Any
    """Weights `[B, N, T, S]`, if asked for."""
    cross: Any = None
    """Keys and values of the encoder's output, where this call made them for a cache."""
    cross_attentions: Any = None


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
    ) -> tuple[Float[Array, "B T D"], LayerOutputs]:
        """The residual stream, and what else is to be kept."""
        rng = fold_in(shared.rng, own.index)
        x, outputs = self._attend(x, own, shared, rng)
        return self._feed_forward(x, rng), outputs

    def _attend(
        self, x: Array, own: LayerInputs, shared: SharedInputs, rng: RowKeys | None
    ) -> tuple[Array, LayerOutputs]:
        mask = shared.mask
        if shared.banded_mask is not None:
            mask = alternate(own.index % 2 == 1, shared.banded_mask, mask)
        attention = MultiHeadAttention(
            self.config, self.execution, self._output_std(), name="attention"
        )

        def sublayer(x: Array) -> tuple[Array, LayerOutputs]:
            y, cache, weights = attention(
                *(x, mask, own.cache, shared.cache_index, rng, shared.output_attentions),
                scale=self.config.score_scale(own.index),
            )
            return y, LayerOutputs(cache, weights)

        return self._residual("attention", sublayer, x, rng)

    def _feed_forward(self, x: Array, rng: RowKeys | None) -> Array:
        feed_forward = FeedForward(
            self.config, self.execution, self._output_std(), name="feed_forward"
        )
        return self._residual("feed_forward", lambda x: (feed_forward(x, rng), None), x, rng)[0]

    def _output_std(self) -> float | None:
        """Of the initial projections back to the residual stream."""
        c = self.config
        if c.init_std is None or not c.scale_residual_init:
            return c.init_std
        return c.init_std / math.sqrt(2 * c.num_layers)

    def _residual(
        self,
        name: str,
        sublayer: Callable[[Array], tuple[Array, Any]],
        x: Array,
        rng: RowKeys | None,
    ) -> tuple[Array, Any]:
        """The sum of x and its sublayer, normalised before or after; what else that answers."""
        c = self.config
        norm = LayerNorm(c.norm_eps, self.execution, name=f"{name}_norm")
        pre = c.norm_position == "pre"
        y, rest = sublayer(norm(x) if pre else x)
        x = x + dropout(y, c.dropout_rate, rng, name)
        return x if pre else norm(x), rest


class DecoderLayer(TransformerLayer):
    """A layer that also looks at an encoder, between the two (section 3.2.3)."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], own: LayerInputs, shared: SharedInputs
    ) -> tuple[Float[Array, "B T D"], LayerOutputs]:
        """The residual stream, and what else is to be kept."""
        rng = fold_in(shared.rng, own.index)
        x, outputs = self._attend(x, own, shared, rng)
        x, (cross, weights) = self._look_up(x, own, shared, rng)
        # Read only, once made.
        made = cross if own.cache is not None and own.cross is None else None
        outputs = dataclasses.replace(outputs, cross=made, cross_attentions=weights)
        return self._feed_forward(x, rng), outputs

    def _look_up(
        self, x: Array, own: LayerInputs, shared: SharedInputs, rng: RowKeys | None
    ) -> tuple[Array, tuple[LayerCache | None, Array | None]]:
        attention = MultiHeadAttention(
            self.config, self.execution, self._output_std(), name="cross_attention"
        )
        mask, encoded = shared.cross_mask, shared.encoded if own.cross is None else own.cross
        assert mask is not None
        own_rng = None if rng is None else fold_in(rng, CROSS)

        def sublayer(x: Array) -> tuple[Array, Any]:
            y, *rest = attention(
                x,
                mask,
                rng=own_rng,
                output_attentions=shared.output_attentions,
                encoded=encoded,
            )
            return y, tuple(rest)

        return self._residual("cross_attention", sublayer, x, rng)


def run_transformer_layers(
    config: Any, execution: Execution, x: Array, cache: Cache | None, shared: SharedInputs
) -> tuple[Array, tuple[Any, Any]]:
    """Runs the L `TransformerLayer`s of a model, in its compact method.

    Returns:
      The residual stream; the caches and the attention weights of the layers,
      with a leading L, or as tuples of L with separate layers.
    """
    x, outputs = run_cached_layers(TransformerLayer, config, execution, x, cache, shared)
    return x, (outputs.cache, outputs.attentions)


def run_cached_layers(
    layer: type[TransformerLayer],
    config: Any,
    execution: Execution,
    x: Array,
    cache: Cache | None,
    shared: SharedInputs,
) -> tuple[Array, LayerOutputs]:
    """Runs the L layers of a stack, each with its part of the cache.

    Returns:
      The residual stream; a `LayerOutputs` whose parts have a leading L, or are
      tuples of L with separate layers.
    """
    caches, cross = (None, None) if cache is None else (cache.layers, cache.cross)
    if execution.layers != "separate":
        per_layer = LayerInputs(jnp.arange(config.num_layers), caches, cross)
        return run_layers(layer, config, execution, x, per_layer, shared)
    nothing = (None,) * config.num_layers
    parts = zip(range(config.num_layers), caches or nothing, cross or nothing, strict=True)
    x, outs = run_layers(
        layer, config, execution, x, [LayerInputs(*part) for part in parts], shared
    )

    def together(name: str) -> tuple[Any, ...] | None:
        values = tuple(getattr(out, name) for out in outs)
        return None if values[0] is None else values

    return x, LayerOutputs(*map(together, ("cache", "attentions", "cross", "cross_attentions")))


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
        check_constancy_invariants=False,  # nothing of a layer is one; it would be traced twice
    )
    return scanned(config, execution, name="layers")(x, per_layer, shared)

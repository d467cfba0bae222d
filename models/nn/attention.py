"""Scaled dot-product attention with N query heads and K key/value heads.

Vaswani et al. 2017, "Attention is all you need", section 3.2. With K < N, each key/value head
serves N / K query heads (Ainslie et al. 2023, "GQA"; K = 1: Shazeer 2019, "Fast transformer
decoding").
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from ..config import Execution, QueryKeyNorm, TransformerConfig
from .cache import Keys, LayerCache, write_tokens
from .dropout import RowKeys, drop_weights, head_keys
from .fused_attention import FusedAttention
from .layers import LayerNorm, Linear, RMSNorm
from .masks import AttentionMask
from .positions import Positions
from .typing import Array, Bool, Float, Int

# The score of a masked key. The score is finite, so that a query without visible keys (padding)
# gives a uniform average instead of NaN.
HIDDEN = -1e30

FEW_QUERIES = 8
"""Up to this number of queries, the query heads that share a key head are folded into the rows of
one matmul. Without this reshape, XLA's CPU backend would copy all keys to another layout for every
token.
"""

QUERY_KEY_NORMS: dict[QueryKeyNorm, Callable[..., nn.Module]] = {
    "head": RMSNorm,
    "projection": functools.partial(RMSNorm, num_axes=2),
    "layer": functools.partial(LayerNorm, use_bias=False, num_scaled_axes=2),
}
"""The module that normalizes queries and keys `[B, T, N, H]`, for each value of `query_key_norm`.
"""

Scale = Float[Array, ""] | float | None
"""The attention scale. If None, the scale is 1 / √H."""


def attention_weights(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B K H S"],
    mask: Bool[Array, "#B 1 #T #S"],
    *,
    scale: Scale = None,
    bias: Float[Array, "#B #N #T S"] | None = None,
    cap: float | None = None,
) -> Float[Array, "B N T S"]:
    """Returns softmax(Q Kᵀ / √H + bias), in float32 (Vaswani et al., equation 1).

    With `cap`, a score s becomes cap · tanh(s / cap) before the bias is added.
    """
    query = _scaled(query, scale)
    batch, length, num_heads, size = query.shape
    num_kv_heads = key.shape[1]
    if num_kv_heads == num_heads:
        scores = jnp.einsum("BTNH,BNHS->BNTS", query, key, preferred_element_type=jnp.float32)
    elif length <= FEW_QUERIES or query.dtype == jnp.bfloat16:
        # Query head n uses key head n // G, with G = N / K: fold the G heads into the row axis.
        # XLA's CPU backend does not support a batched bfloat16 matmul with two row axes.
        query = jnp.einsum("BTNH->BNTH", query).reshape(batch, num_kv_heads, -1, size)
        scores = jnp.einsum("BKMH,BKHS->BKMS", query, key, preferred_element_type=jnp.float32)
        scores = scores.reshape(batch, num_heads, length, -1)
    else:
        # For many queries, keep the heads of a group as an axis, so that no transpose is needed.
        query = query.reshape(batch, length, num_kv_heads, -1, size)
        scores = jnp.einsum("BTKGH,BKHS->BKGTS", query, key, preferred_element_type=jnp.float32)
        scores = scores.reshape(batch, num_heads, length, -1)
    # Cap the scores before adding biases: a large negative bias masks a key and must not be capped.
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    if bias is not None:
        scores += bias
    return jax.nn.softmax(jnp.where(mask, scores, HIDDEN), axis=-1)


def weighted_values(
    weights: Float[Array, "B N T S"], value: Float[Array, "B K S V"]
) -> Float[Array, "B T N V"]:
    """Returns, for each query, the sum of all values weighted by the query's attention weights."""
    batch, num_heads, length, num_keys = weights.shape
    num_kv_heads = value.shape[1]
    # Transpose in a separate step. XLA's CPU backend swaps the operands of a single einsum, which
    # then takes 7 times as long for few queries.
    if num_kv_heads == num_heads:
        context = jnp.einsum("BNTS,BNSH->BNTH", weights, value)
    else:
        # [B, N, T, S] to [B, K, G, T, S]: G query heads share a value head.
        grouped = weights.reshape(batch, num_kv_heads, -1, length, num_keys)
        context = jnp.einsum("BKGTS,BKSH->BKGTH", grouped, value)
        context = context.reshape(batch, num_heads, length, -1)
    return jnp.einsum("BNTH->BTNH", context)


def _scaled(query: Float[Array, "B T N H"], scale: Scale) -> Float[Array, "B T N H"]:
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    return (query * factor).astype(query.dtype)


@struct.dataclass
class AttentionContext:
    """All inputs of an attention layer except for the residual stream.

    `LayerContext.self_attention` and `LayerContext.cross_attention` build this record.
    """

    mask: AttentionMask
    """The keys that each query may attend to. If the mask is not materialized, a kernel computes
    attention. Such a call uses no cache and no score terms, and returns no weights.
    """
    positions: Positions = struct.field(default_factory=Positions)
    """Positions of the tokens, used in self-attention. Cached keys have already been rotated by
    their positions, unless positions are relative."""
    layer: Int[Array, ""] | int = 0
    """Index of the layer."""
    cache: LayerCache | None = None
    """The cached keys and values of earlier calls."""
    cache_index: Int[Array, ""] | int = 0
    """The next cache slot to write."""
    source: Float[Array, "B S D"] | LayerCache | None = None
    """For cross-attention, the encoder's output, or the keys and values that an earlier call
    projected from it."""
    rng: RowKeys | None = None
    """Dropout keys. If None, dropout is off."""
    head_mask: Float[Array, " N"] | None = None
    """The factor that multiplies each head's attention weights. A factor of 0 disables the head."""
    output_attentions: bool = struct.field(pytree_node=False, default=False)
    """Whether to return the attention weights."""


class Attended(NamedTuple):
    """The result of an attention call."""

    output: Float[Array, "B T D"]
    cache: LayerCache | None
    """The cache, including the tokens of this call; for cross-attention, the keys and values that
    this call projected from the encoder's output. None if the call has no cache."""
    weights: Float[Array, "B N T S"] | None
    """The attention weights, if they were requested."""


class MultiHeadAttention(nn.Module):
    """Attention of a sequence to itself, or to an encoder's output.

    A subclass can override `score_terms` to add terms to the scores, and `values` to change the
    weighted values.

    Attributes:
      config: sizes (N query heads and K key/value heads; `key_dim` is the size of queries and keys,
        `value_dim` the size of values); `attention_bias` adds biases to the four projections,
        `score_cap` bounds the scores, `query_key_norm` normalizes queries and keys.
      execution: precision, and the attention kernel, which is used if it supports the call.
      output_init_std: standard deviation of the initial output projection.
    """

    config: TransformerConfig
    execution: Execution
    output_init_std: float | None

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], context: AttentionContext) -> Attended:
        """Computes attention from `x` to cached tokens and to `x`, or to the encoder's output."""
        c, positions = self.config, context.positions
        # [B, T, D] to [B, T, N, H].
        query = self.project("query", c.num_heads, c.key_dim, x)
        query = self.rotate("query_norm", query, positions)
        # Cross-attention with a cache: after the first call, keys and values are already projected.
        if isinstance(context.source, LayerCache):
            keys = Keys(context.source.key, context.source.value)
            return self._attend_by_xla(query, keys, None, context)
        # Self-attention projects its input, and cross-attention projects the encoder's output.
        source = x if context.source is None else context.source
        key = self.project("key", c.kv_heads, c.key_dim, source)
        key = self.rotate("key_norm", key, positions)
        # [B, S, K, V], where K divides N; values are never rotated.
        value = self.project("value", c.kv_heads, c.value_dim, source)
        return self.attend(query, key, value, context)

    def project(
        self, name: str, num_heads: int, size: int, x: Float[Array, "B S D"]
    ) -> Float[Array, "B S {num_heads} {size}"]:
        """Returns the projection of `x` to queries, keys or values."""
        c, e = self.config, self.execution
        std = c.query_init_std if name == "query" else c.init_std
        features = num_heads, size
        return Linear(features, std, use_bias=c.attention_bias, execution=e, name=name)(x)

    def rotate(
        self, norm: str, x: Float[Array, "B T N H"], positions: Positions
    ) -> Float[Array, "B T N H"]:
        """Normalizes queries or keys (`query_key_norm`), and applies rotary positions."""
        c = self.config
        if c.query_key_norm is not None:
            x = QUERY_KEY_NORMS[c.query_key_norm](c, self.execution, name=norm)(x)
        return x if positions.rotary is None else positions.rotary.rotate(x)

    def attend(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S K H"],
        value: Float[Array, "B S K V"],
        context: AttentionContext,
    ) -> Attended:
        """Computes attention to the tokens of this call and to cached tokens."""
        # If the mask is not materialized, a kernel computes attention from sequence lengths and
        # segments.
        if context.mask.values is None:
            return self._attend_fused(query, key, value, context)
        # Convert to the layout of `LayerCache`, which the matmuls read without a transpose: keys
        # [B, K, H, S] and values [B, K, S, V].
        key = jnp.einsum("BSKH->BKHS", key)
        value = jnp.einsum("BSKH->BKSH", value)
        # Self-attention appends new tokens to its cache, and cross-attention stores the projected
        # encoder output.
        keys, written = Keys(key, value), None
        if context.cache is not None and context.source is None:
            written, keys = write_tokens(context.cache, key, value, context.cache_index)
        elif context.cache is not None:
            written = LayerCache(key, value)
        return self._attend_by_xla(query, keys, written, context)

    def score_terms(
        self, query: Float[Array, "B T N H"], keys: Keys, context: AttentionContext
    ) -> Float[Array, "#B #N #T S"] | None:
        """Returns terms to add to the scores, or None. Classes with relative positions override it.

        Args:
          query: scaled queries.
          keys: the keys and values to attend to.
          context: contains the positions of these keys.
        """
        del query, keys
        return context.positions.bias

    def values(
        self, weights: Float[Array, "B N T S"], keys: Keys, context: AttentionContext
    ) -> Float[Array, "B T N V"]:
        """Returns, for each query, the sum of all values weighted by the attention weights."""
        del context
        return weighted_values(weights, keys.value)

    def output(self, attended: Float[Array, "B T N V"]) -> Float[Array, "B T D"]:
        """Returns the projection of all heads back to the residual stream."""
        return Linear(
            (self.config.d_model,),
            self.output_init_std,
            num_input_axes=2,
            use_bias=self.config.attention_output_bias,
            execution=self.execution,
            name="output",
        )(attended)

    def _attend_by_xla(
        self,
        query: Float[Array, "B T N H"],
        keys: Keys,
        written: LayerCache | None,
        context: AttentionContext,
    ) -> Attended:
        """Computes attention with XLA, which materializes the weights of all queries and keys."""
        c = self.config
        visible = context.mask.materialize()
        # A ring buffer stores only some of the S slots: select their columns in the mask and the
        # biases.
        if keys.columns is not None:
            context = dataclasses.replace(context, positions=context.positions.of_keys(keys))
            visible = keys.mask(visible)
        # Scale the queries and not the scores: this takes T · H instead of T · S multiplications.
        query = _scaled(query, c.score_scale(context.layer))
        # Score terms are computed from scaled queries, so the scores are not scaled again.
        terms = self.score_terms(query, keys, context)
        weights = attention_weights(
            query, keys.key, visible, scale=1.0, bias=terms, cap=c.score_cap
        )
        dropped = drop_weights(weights, c.attention_dropout_rate, context.rng)
        dropped = dropped.astype(keys.value.dtype)
        # [B, N, T, S] weights and [B, K, S, V] values to [B, T, N, V].
        attended = self.values(dropped, keys, context)
        if context.head_mask is not None:
            # Apply the head mask only to the returned weights. `_masked_output` applies it to the
            # output.
            weights = weights * context.head_mask[:, None, None]
        # [B, T, N, V] back to [B, T, D].
        output = self._masked_output(attended, context.head_mask)
        return Attended(output, written, weights if context.output_attentions else None)

    def _attend_fused(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S K H"],
        value: Float[Array, "B S K V"],
        context: AttentionContext,
    ) -> Attended:
        """Computes attention with the kernel of `execution`, without materializing weights."""
        c, mask = self.config, context.mask
        rate = c.attention_dropout_rate
        # The kernel is a module, so that distributed training can find it and shard its inputs.
        fused = FusedAttention(
            self.execution.attention,
            mask.causal,
            mask.window,
            c.score_cap,
            dropout_rate=rate,
            name="fused",
        )
        # The kernel draws the dropout mask from one key per head.
        dropout_keys = None
        if context.rng is not None and rate > 0:
            dropout_keys = head_keys(context.rng, c.num_heads)
        attended = fused(
            _scaled(query, c.score_scale(context.layer)),
            key,
            value,
            segments=mask.segments(),
            use_window=mask.use_window,
            keys=dropout_keys,
        )
        return Attended(self._masked_output(attended, context.head_mask), None, None)

    def _masked_output(
        self, attended: Float[Array, "B T N V"], head_mask: Float[Array, " N"] | None
    ) -> Float[Array, "B T D"]:
        # The sum over keys is linear, so scaling the output of a head is equivalent to scaling its
        # weights.
        if head_mask is not None:
            attended = (attended * head_mask[:, None]).astype(attended.dtype)
        return self.output(attended)

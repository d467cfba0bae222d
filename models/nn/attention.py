"""Scaled dot-product attention with N query heads and K key/value heads.

Vaswani et al. 2017, "Attention is all you need", section 3.2. With K < N, each key/value head
serves N / K query heads (Ainslie et al. 2023, "GQA"; K = 1: Shazeer 2019, "Fast transformer
decoding").
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from ..config import Execution, TransformerConfig
from .cache import Keys, LayerCache, write_tokens
from .fused_attention import FusedAttention
from .head_convolution import EarlierTokens, HeadConvolution
from .layers import Embedding, Linear, RMSNorm, RowKeys, drop_weights, head_keys
from .masks import AttentionMask
from .positions import Positions
from .relative_positions import relative_scores, relative_values
from .typing import Array, Bool, Float, Int

# The score of a hidden key.  Finite, so that a query without keys (padding) gives a uniform
# average and not NaN.
HIDDEN = -1e30

FEW_QUERIES = 8
"""With so few queries, those of the heads that share keys are the rows of one product with these:
XLA's CPU backend would otherwise copy all keys to another layout for every token. That is also the
only form in which this backend has the product of a batch of bfloat16."""

NO_POSITIONS = Positions()

Scale = Float[Array, ""] | float | None
"""The factor of attention scores; None: 1 / √H."""


def attention_weights(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B K H S"],
    mask: Bool[Array, "#B 1 #T #S"],
    *,
    scale: Scale = None,
    bias: Float[Array, "#B N #T S"] | None = None,
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
    elif (
        length <= FEW_QUERIES or query.dtype == jnp.bfloat16
    ):  # query head n belongs to key head n // G, with G = N / K
        query = jnp.einsum("BTNH->BNTH", query).reshape(batch, num_kv_heads, -1, size)
        scores = jnp.einsum("BKMH,BKHS->BKMS", query, key, preferred_element_type=jnp.float32)
        scores = scores.reshape(batch, num_heads, length, -1)
    else:
        query = query.reshape(batch, length, num_kv_heads, -1, size)
        scores = jnp.einsum("BTKGH,BKHS->BKGTS", query, key, preferred_element_type=jnp.float32)
        scores = scores.reshape(batch, num_heads, length, -1)
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    if bias is not None:
        scores += bias
    return jax.nn.softmax(jnp.where(mask, scores, HIDDEN), axis=-1)


def weighted_values(
    weights: Float[Array, "B N T S"], value: Float[Array, "B K S V"]
) -> Float[Array, "B T N V"]:
    """Returns the sum of the values of each query, weighted by its attention weights."""
    batch, num_heads, length, num_keys = weights.shape
    num_kv_heads = value.shape[1]
    # Two steps in either case: in one, XLA's CPU backend swaps the operands, which takes 7 times
    # as long where there are few queries.
    if num_kv_heads == num_heads:
        context = jnp.einsum("BNTS,BNSH->BNTH", weights, value)
    else:
        grouped = weights.reshape(batch, num_kv_heads, -1, length, num_keys)
        context = jnp.einsum("BKGTS,BKSH->BKGTH", grouped, value)
        context = context.reshape(batch, num_heads, length, -1)
    return jnp.einsum("BNTH->BTNH", context)


def _scaled(query: Float[Array, "B T N H"], scale: Scale) -> Float[Array, "B T N H"]:
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    return (query * factor).astype(query.dtype)


def _masked(
    context: Float[Array, "B T N V"], head_mask: Float[Array, " N"] | None
) -> Float[Array, "B T N V"]:
    """Multiplies each head's output by its factor: as if its weights had been multiplied."""
    return context if head_mask is None else (context * head_mask[:, None]).astype(context.dtype)


class MultiHeadAttention(nn.Module):
    """Attention of a sequence to itself, or to an encoder's output.

    Attributes:
      config: sizes (N query heads and K key/value heads; queries and keys have `key_dim`, values
        `value_dim`); `attention_bias` adds biases to the four projections, `head_convolution` a
        convolution to three; with `attention` "simple" there are none, and queries, keys and values
        are N parts of the input. `scale_scores` says whether scores are divided by √H, `score_cap`
        how large they may be, `query_key_norm` whether queries and keys are normalized.
      execution: precision, and the kernel that computes attention where it can.
      output_init_std: standard deviation of the initial output projection.
    """

    config: TransformerConfig
    execution: Execution
    output_init_std: float | None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        mask: AttentionMask,
        *,
        cache: LayerCache | None = None,
        index: Int[Array, ""] | int = 0,
        rng: RowKeys | None = None,
        output_attentions: bool = False,
        encoder_hidden_states: Float[Array, "B S D"] | LayerCache | None = None,
        scale: Scale = None,
        positions: Positions = NO_POSITIONS,
        bias: Float[Array, "#B N #T S"] | None = None,
        head_mask: Float[Array, " N"] | None = None,
        earlier: EarlierTokens | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None, Float[Array, "B N T S"] | None]:
        """Attends from `x` to the cached tokens and `x` itself, or only to the encoder's output.

        Args:
          x: input of the sublayer.
          mask: the keys that each query may attend to. If it is not materialized, a kernel
            computes attention; there is then no cache, bias, or output of weights.
          cache: keys and values of earlier calls.
          index: the next slot of the cache to write.
          rng: keys of dropout; None: no dropout.
          output_attentions: whether to return the weights too.
          encoder_hidden_states: the output of an encoder, or its projected keys and values.
          scale: factor of the scores; by default 1 / √H, or 1 without `config.scale_scores`.
          positions: of the tokens of `x`, for self-attention; cached keys contain theirs, unless
            they are relative.
          bias: added to the scaled scores.
          head_mask: factor of each head's weights: 0 takes the head out.
          earlier: the tokens that the convolution of heads may read; None: there is none.

        Returns:
          The output; the cache with slots `index … index + T` written, or the keys and values of
          `encoder_hidden_states`; the weights if requested.
        """
        c = self.config
        if scale is None and not c.scale_scores:
            scale = 1.0
        history = (None,) * 3 if cache is None or cache.recent is None else cache.recent
        placed = positions.at_queries_keys(x)
        query = self._project("query", c.num_heads, c.key_dim, placed)
        query, recent_query = self._convolve("query", query, earlier, history[0])
        query = self._normalize("query_norm", query)
        query = positions.at_projections(query)
        query = query if positions.rotary is None else positions.rotary.rotate(query)

        if isinstance(encoder_hidden_states, LayerCache):
            written = encoder_hidden_states
            keys = Keys(written.key, written.value)
        else:
            own = encoder_hidden_states is None
            source = placed if own else encoder_hidden_states
            key = self._project("key", c.kv_heads, c.key_dim, source)
            key, recent_key = self._convolve("key", key, earlier, history[1])
            key = self._normalize("key_norm", key)
            key = positions.at_projections(key)
            key = key if positions.rotary is None else positions.rotary.rotate(key)
            source = x if own else encoder_hidden_states
            value = self._project("value", c.kv_heads, c.value_dim, source)
            value, recent_value = self._convolve("value", value, earlier, history[2])
            value = positions.at_projections(value)
            if mask.values is None:
                rate = c.attention_dropout_rate
                fused = FusedAttention(
                    self.execution.attention,
                    mask.causal,
                    mask.window,
                    c.score_cap,
                    dropout_rate=rate,
                    name="fused",
                )
                context = fused(
                    _scaled(query, scale),
                    key,
                    value,
                    segments=mask.segments(),
                    use_window=mask.use_window,
                    keys=None if rng is None or rate == 0 else head_keys(rng, c.num_heads),
                )
                return self._output(_masked(context, head_mask)), None, None
            key = jnp.einsum("BSKH->BKHS", key)
            value = jnp.einsum("BSKH->BKSH", value)
            keys, written = Keys(key, value), None if own else LayerCache(key, value)
            if cache is not None:
                written, keys = write_tokens(cache, key, value, index)
            if recent_query is not None and recent_key is not None and recent_value is not None:
                recent = recent_query, recent_key, recent_value
                written = None if written is None else dataclasses.replace(written, recent=recent)

        visible = mask.materialize()
        if keys.columns is not None:  # a ring has some of the slots
            positions, visible = positions.of_keys(keys), keys.mask(visible)
            bias = None if bias is None else keys.of_columns(bias)
        for more in (positions.bias, self._relative_scores(query, scale, positions)):
            bias = more if bias is None else bias if more is None else bias + more
        weights = attention_weights(
            query, keys.key, visible, scale=scale, bias=bias, cap=c.score_cap
        )
        dropped = drop_weights(weights, c.attention_dropout_rate, rng)
        dropped = dropped.astype(keys.value.dtype)
        context = weighted_values(dropped, keys.value)
        if positions.distances is not None:
            vectors = self._relative("values", positions.distances, c.value_dim)
            context += relative_values(dropped, positions.distances, vectors)
        if head_mask is not None:
            weights = weights * head_mask[:, None, None]
        context = _masked(context, head_mask)
        return self._output(context), written, weights if output_attentions else None

    def _convolve(
        self,
        name: str,
        x: Float[Array, "B T N H"],
        earlier: EarlierTokens | None,
        history: Float[Array, "B M w N H"] | None,
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B M w N H"] | None]:
        width = self.config.head_convolution
        if width is None or earlier is None:
            return x, None
        convolution = HeadConvolution(width, self.execution, name=f"{name}_convolution")
        return convolution(x, earlier, history)

    def _normalize(self, name: str, x: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
        c = self.config
        if not c.query_key_norm:
            return x
        return RMSNorm(c.norm_eps, self.execution, offset=c.norm_offset, name=name)(x)

    def _relative_scores(
        self, query: Float[Array, "B T N H"], scale: Scale, positions: Positions
    ) -> Float[Array, "B N T S"] | None:
        if positions.distances is None:
            return None
        vectors = self._relative("keys", positions.distances, self.config.key_dim)
        return relative_scores(_scaled(query, scale), positions.distances, vectors)

    def _relative(
        self, name: str, distances: Float[Array, "#B #T S R"], size: int
    ) -> Float[Array, "R {size}"]:
        """Returns the vector of each distance that is added to keys or to values."""
        e = self.execution
        table = Embedding(distances.shape[-1], size, execution=e, name=f"relative_{name}")
        return table.embedding.astype(e.dtype)

    def _project(
        self, name: str, num_heads: int, size: int, x: Float[Array, "B S D"]
    ) -> Float[Array, "B S {num_heads} {size}"]:
        c, e = self.config, self.execution
        features = num_heads, size
        if c.attention == "simple":
            return x.astype(e.dtype).reshape(*x.shape[:2], *features)
        std = c.query_init_std if name == "query" else c.init_std
        return Linear(features, std, use_bias=c.attention_bias, execution=e, name=name)(x)

    def _output(self, context: Float[Array, "B T N V"]) -> Float[Array, "B T D"]:
        if self.config.attention == "simple":
            return context.reshape(*context.shape[:2], -1)
        return Linear(
            (self.config.d_model,),
            self.output_init_std,
            num_input_axes=2,
            use_bias=self.config.attention_output_bias,
            execution=self.execution,
            name="output",
        )(context)

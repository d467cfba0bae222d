"""Scaled dot-product attention, its masks and its key/value cache.

Vaswani et al. 2017, "Attention is all you need", section 3.2.  In every mask
`True` means *may be seen*.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from .array_types import Array, Bool, Float, Int
from .config import Execution, TransformerConfig
from .dropout import RowKeys, dropout
from .linear import Linear

AnyArray = Array | np.ndarray
"""What a caller may give: arrays of jax, or numpy's outside a compiled function."""

Size = Any
"""An int; or, in a program that is exported with free sizes, not yet a number."""

# Added to hidden scores.  Finite, so that a row that may see nothing (padding)
# gives a uniform average and not NaN.
HIDDEN = -1e30


@struct.dataclass
class LayerCache:
    """Keys `[B, N, H, S]` and values `[B, N, S, H]` of one layer, or of all with a leading L.

    Laid out as the two matrix products read them, so that decoding a token
    transposes nothing of what was decoded before.
    """

    key: Array
    value: Array


@struct.dataclass
class Cache:
    """Keys and values of the S slots of each row, of which `index` are written."""

    layers: Any
    """A `LayerCache` with a leading L, or a tuple of L (separate layers)."""
    index: Int[Array, ""]
    """The next slot to write, the same for every row: pad shorter prompts on the left."""
    cross: Any = None
    """Of a decoder that looks at an encoder: the keys and values of what the encoder said, in
    the form of `layers`. They are projected in the first call, and then only read."""

    @property
    def length(self) -> int:
        """The number of slots, S."""
        first = self.layers[0] if isinstance(self.layers, tuple) else self.layers
        return first.key.shape[-1]


def init_cache(
    config: TransformerConfig, execution: Execution, batch_size: int, length: int
) -> Cache:
    """An empty cache of `length` slots for each of `batch_size` rows."""
    config = config.decoder
    rows = (batch_size, config.num_heads)

    def layer(*lead: int) -> LayerCache:
        return LayerCache(
            key=jnp.zeros((*lead, *rows, config.key_dim, length), execution.dtype),
            value=jnp.zeros((*lead, *rows, length, config.head_dim), execution.dtype),
        )

    separate = execution.layers == "separate"
    layers = (
        tuple(layer() for _ in range(config.num_layers)) if separate else layer(config.num_layers)
    )
    return Cache(layers, jnp.zeros((), jnp.int32))


def advance_cache(
    cache: Cache, layers: Any, x: Float[Array, "B T D"], cross: Any = None
) -> tuple[Float[Array, "B T D"], Cache]:
    """What a model answers beside a cache whose layers have been written.

    A write beyond the last slot would have landed on it: NaN, not a plausible
    answer.
    """
    end = cache.index + x.shape[1]
    return jnp.where(end <= cache.length, x, jnp.nan), Cache(layers, end, cross)


def check_inputs(
    config: TransformerConfig,
    input_ids: AnyArray,
    attention_mask: AnyArray | None,
    segment_ids: AnyArray | None,
    cache: Cache | None,
) -> None:
    """What every model asks of its inputs' shapes.

    Raises:
      ValueError: the tokens are more than `max_length`, `attention_mask` does
        not cover the tokens (or the slots of the cache), or a cache is given
        together with packed rows.
    """
    length = input_ids.shape[1]
    # Of a mask for each query they are beams, not a row's tokens.
    beams = attention_mask is not None and attention_mask.ndim == 3
    if length > config.max_length and not beams:
        raise ValueError(
            f"input of {length} tokens exceeds max_length {config.max_length}: shorten it"
        )
    if cache is not None and segment_ids is not None:
        raise ValueError("a cache cannot continue packed rows: leave segment_ids out")
    num_keys = length if cache is None else cache.length
    if attention_mask is not None and attention_mask.shape[-1] != num_keys:
        raise ValueError(
            f"attention_mask has {attention_mask.shape[-1]} columns for {num_keys} "
            f"{'tokens' if cache is None else 'slots of the cache'}: give one for each"
        )


def causal_mask(
    query_index: Int[Array, " T"], key_index: Int[Array, " S"], window: int | None = None
) -> Bool[Array, "1 1 T S"]:
    """Each query sees itself and what came before it.

    With `window`, only the last `window` of these: the band of Child et al.
    2019, "Generating long sequences with sparse transformers".
    """
    distance = query_index[:, None] - key_index[None, :]
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    return mask[None, None]


def last_seen(mask: Bool[Array, "#B 1 T S"], window: int) -> Bool[Array, "#B 1 T S"]:
    """Of what each query sees the last `window`: a band where keys do not stand side by side."""
    behind = jnp.cumsum(mask[..., ::-1], axis=-1)[..., ::-1]
    return mask & (behind <= window)


def visible_mask(
    attention_mask: Int[AnyArray, "B S"] | Bool[AnyArray, "B T S"] | None,
    segment_ids: Int[AnyArray, "B S"] | None,
    query_segment_ids: Int[AnyArray, "B T"] | None = None,
) -> Bool[Array, "#B 1 #T #S"]:
    """Real tokens are seen; in packed rows only by their own document, padding (0) by nobody.

    The queries are the keys' own tokens, or those of `query_segment_ids`. An `attention_mask` of
    three axes says it for each query.
    """
    mask = jnp.ones((1, 1, 1, 1), bool)
    if attention_mask is not None:
        mask = jnp.asarray(attention_mask != 0)
        mask = mask[:, None] if mask.ndim == 3 else mask[:, None, None, :]
    if segment_ids is not None:
        queries = segment_ids if query_segment_ids is None else query_segment_ids
        same = queries[:, :, None] == segment_ids[:, None, :]
        mask &= (same & (segment_ids != 0)[:, None, :])[:, None]
    return mask


def attention_weights(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B N H S"],
    mask: Bool[Array, "#B 1 #T #S"],
    scale: Float[Array, ""] | float | None = None,
) -> Float[Array, "B N T S"]:
    """softmax(Q Kᵀ / √H), in float32 (Vaswani et al., equation 1); or with a scale of its own."""
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    query = (query * factor).astype(query.dtype)
    scores = jnp.einsum("BTNH,BNHS->BNTS", query, key, preferred_element_type=jnp.float32)
    return jax.nn.softmax(jnp.where(mask, scores, HIDDEN), axis=-1)


def default_positions(
    start: Int[Array, ""],
    length: Size,
    attention_mask: Int[AnyArray, "B S"] | Bool[AnyArray, "B T S"] | None,
    segment_ids: Int[AnyArray, "B T"] | None,
) -> Int[Array, "#B T"]:
    """0, 1, 2 … over the real tokens of each row, anew in each document of a packed row.

    Args:
      start: first of the slots asked for (not 0 when a cache is continued).
      length: how many slots are asked for, T.
      attention_mask: over all slots, on whichever side the padding stands.
      segment_ids: of a packed row.

    Raises:
      ValueError: the mask is one for each token, whose tokens need not be one sequence.
    """
    if attention_mask is not None and attention_mask.ndim == 3:
        raise ValueError(
            "an attention_mask for each token leaves open where it stands: give position_ids"
        )
    index = jnp.arange(length)
    if segment_ids is not None:
        begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
        return index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
    if attention_mask is not None:
        positions = jnp.maximum(jnp.cumsum(attention_mask != 0, axis=1) - 1, 0)
        return jax.lax.dynamic_slice_in_dim(positions, start, length, axis=1)
    return (start + index)[None]


class MultiHeadAttention(nn.Module):
    """Attention with N heads: of a sequence to itself, or to an encoder's output.

    Attributes:
      config: sizes (values have H = D / N, queries and keys `key_dim`);
        `attention_bias` adds biases to the four projections.
      execution: precision.
      output_init_std: standard deviation of the initial output projection.
    """

    config: Any
    execution: Execution
    output_init_std: float | None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        mask: Bool[Array, "#B 1 #T #S"],
        cache: LayerCache | None = None,
        index: Int[Array, ""] | int = 0,
        rng: RowKeys | None = None,
        output_attentions: bool = False,
        encoded: Float[Array, "B S D"] | LayerCache | None = None,
        scale: Float[Array, ""] | float | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None, Array | None]:
        """Attends from `x` to what the cache holds and then itself, or only to `encoded`.

        Args:
          x: the residual stream.
          mask: what each query may see.
          cache: keys and values of earlier calls.
          index: the next slot of the cache to write.
          rng: keys of dropout.
          output_attentions: whether to answer the weights as well.
          encoded: what an encoder answered, or the keys and values of it.
          scale: what scores are multiplied by; by default 1 / √H.

        Returns:
          The output; the cache with slots `index … index + T` written, or the
          keys and values of `encoded`; the weights `[B, N, T, S]` if asked for.
        """
        c = self.config
        query = self._project("query", c.key_dim, x)
        if isinstance(encoded, LayerCache):
            held = cache = encoded
        else:
            source = x if encoded is None else encoded
            key = jnp.einsum("BSNH->BNHS", self._project("key", c.key_dim, source))
            value = jnp.einsum("BSNH->BNSH", self._project("value", c.head_dim, source))
            if cache is not None:
                key = jax.lax.dynamic_update_slice_in_dim(cache.key, key, index, axis=3)
                value = jax.lax.dynamic_update_slice_in_dim(cache.value, value, index, axis=2)
            held = LayerCache(key, value)
            cache = held if cache is not None or encoded is not None else None
        weights = attention_weights(query, held.key, mask, scale)
        dropped = dropout(weights, c.attention_dropout_rate, rng, "attention_weights")
        # In two steps: in one, XLA's CPU swaps the operands, which takes 7 times as long where
        # there are few queries.
        context = jnp.einsum("BNTS,BNSH->BNTH", dropped.astype(held.value.dtype), held.value)
        context = jnp.einsum("BNTH->BTNH", context)
        output = Linear(
            (c.d_model,),
            self.output_init_std,
            num_input_axes=2,
            use_bias=c.attention_bias,
            execution=self.execution,
            name="output",
        )(context)
        return output, cache, weights if output_attentions else None

    def _project(
        self, name: str, size: int, x: Float[Array, "B S D"]
    ) -> Float[Array, "B S N {size}"]:
        c = self.config
        return Linear(
            (c.num_heads, size),
            c.init_std,
            use_bias=c.attention_bias,
            execution=self.execution,
            name=name,
        )(x)

"""Scaled dot-product attention and its key/value cache.

Vaswani et al. 2017, "Attention is all you need", section 3.2.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from ...data.errors import UserError
from ..config import Execution, TransformerConfig
from .dropout import RowKeys, dropout
from .fused_attention import FusedAttention
from .linear import Linear
from .masks import AnyArray, Mask, Size, Structure
from .typing import Array, Bool, Float, Int

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
      UserError: the tokens are more than `max_length`, `attention_mask` does
        not cover the tokens (or the slots of the cache), or a cache is given
        together with packed rows.
    """
    length = input_ids.shape[1]
    # Of a mask for each query they are beams, not a row's tokens.
    beams = attention_mask is not None and attention_mask.ndim == 3
    if length > config.max_length and not beams:
        raise UserError(
            f"input of {length} tokens exceeds max_length {config.max_length}: shorten it"
        )
    if cache is not None and segment_ids is not None:
        raise UserError("a cache cannot continue packed rows: leave segment_ids out")
    num_keys = length if cache is None else cache.length
    if attention_mask is not None and attention_mask.shape[-1] != num_keys:
        raise UserError(
            f"attention_mask has {attention_mask.shape[-1]} columns for {num_keys} "
            f"{'tokens' if cache is None else 'slots of the cache'}: give one for each"
        )


def source_length(encoded: Array | None, cache: Cache | None) -> Size:
    """How many tokens the encoder has seen, whose output is given or was cached."""
    if encoded is not None:
        return encoded.shape[1]
    assert cache is not None
    cross = cache.cross[0] if isinstance(cache.cross, tuple) else cache.cross
    return cross.key.shape[-1]


def check_source(
    mask: Int[AnyArray, "B columns"] | None, encoded: Array | None, cache: Cache | None
) -> None:
    """Raises ValueError unless a mask of the source has a column for each of its tokens."""
    if mask is None:
        return
    length = source_length(encoded, cache)
    if mask.shape[1] != length:
        raise UserError(
            f"attention_mask has {mask.shape[1]} columns for {length} encoded tokens: give one "
            "for each"
        )


def attention_weights(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B N H S"],
    mask: Bool[Array, "#B 1 #T #S"],
    scale: Float[Array, ""] | float | None = None,
) -> Float[Array, "B N T S"]:
    """softmax(Q Kᵀ / √H), in float32 (Vaswani et al., equation 1); or with a scale of its own."""
    query = _scaled(query, scale)
    scores = jnp.einsum("BTNH,BNHS->BNTS", query, key, preferred_element_type=jnp.float32)
    return jax.nn.softmax(jnp.where(mask, scores, HIDDEN), axis=-1)


def _scaled(
    query: Float[Array, "B T N H"], scale: Float[Array, ""] | float | None
) -> Float[Array, "B T N H"]:
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    return (query * factor).astype(query.dtype)


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
      UserError: the mask is one for each token, whose tokens need not be one sequence.
    """
    if attention_mask is not None and attention_mask.ndim == 3:
        raise UserError(
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
      execution: precision, and the kernel of masks that are not written out.
      output_init_std: standard deviation of the initial output projection.
    """

    config: Any
    execution: Execution
    output_init_std: float | None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        mask: Mask,
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
          mask: what each query may see. Not written out, a kernel computes
            attention, without a cache, dropout or weights to answer.
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
        if isinstance(mask, Structure):
            assert not isinstance(encoded, LayerCache)
            source = x if encoded is None else encoded
            return self._output(self._fused(query, source, mask, scale)), None, None
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
        return self._output(context), cache, weights if output_attentions else None

    def _fused(
        self,
        query: Float[Array, "B T N H"],
        source: Float[Array, "B S D"],
        mask: Structure,
        scale: Float[Array, ""] | float | None,
    ) -> Float[Array, "B T N V"]:
        """What each query gathers, by a kernel."""
        c = self.config
        key = self._project("key", c.key_dim, source)
        value = self._project("value", c.head_dim, source)
        fused = FusedAttention(self.execution.attention, mask.causal, mask.window, name="fused")
        return fused(_scaled(query, scale), key, value, mask.segments, mask.banded)

    def _output(self, context: Float[Array, "B T N V"]) -> Float[Array, "B T D"]:
        return Linear(
            (self.config.d_model,),
            self.output_init_std,
            num_input_axes=2,
            use_bias=self.config.attention_bias,
            execution=self.execution,
            name="output",
        )(context)

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

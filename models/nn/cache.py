"""Keys and values of earlier calls, kept so that decoding projects each token once."""

import jax.numpy as jnp
from flax import struct

from ..config import Execution, TransformerConfig
from .typing import Array, Float, Int


@struct.dataclass
class LayerCache:
    """Keys `[B, K, H, S]` and values `[B, K, S, H]` of one layer; of all layers with a leading L.

    K is the number of key/value heads. The layout is that in which the two matrix products of
    attention read their operands, so that decoding a token transposes no earlier token.
    """

    key: Array
    value: Array


LayerCaches = LayerCache | tuple[LayerCache, ...]
"""The caches of all layers: one with a leading L, or a tuple of L (separate layers)."""


@struct.dataclass
class Cache:
    """Keys and values in S slots of each sequence, of which `index` are written."""

    layers: LayerCaches
    index: Int[Array, ""]
    """The next slot to write, the same for every sequence: pad shorter prompts on the left."""
    cross: LayerCaches | None = None
    """Keys and values of the encoder's hidden states, for a decoder with cross-attention. The first
    call projects them; later calls only read them."""
    positions: Int[Array, "B S"] | None = None
    """The position of the token in each slot, if attention depends on distances."""

    @property
    def length(self) -> int:
        """The number of slots, S."""
        first = self.layers[0] if isinstance(self.layers, tuple) else self.layers
        return first.key.shape[-1]

    @property
    def source_length(self) -> int:
        """The number of cached encoder positions."""
        first = self.cross[0] if isinstance(self.cross, tuple) else self.cross
        assert first is not None
        return first.key.shape[-1]


def init_cache(
    config: TransformerConfig, execution: Execution, batch_size: int, length: int
) -> Cache:
    """Returns an empty cache of `length` slots for each of `batch_size` sequences."""
    config = config.decoder
    heads = (batch_size, config.kv_heads)

    def layer(*lead: int) -> LayerCache:
        return LayerCache(
            key=jnp.zeros((*lead, *heads, config.key_dim, length), execution.dtype),
            value=jnp.zeros((*lead, *heads, length, config.head_dim), execution.dtype),
        )

    separate = execution.layers == "separate"
    layers = (
        tuple(layer() for _ in range(config.num_layers)) if separate else layer(config.num_layers)
    )
    positions = jnp.zeros((batch_size, length), jnp.int32) if config.scores_by_distance else None
    return Cache(layers, jnp.zeros((), jnp.int32), positions=positions)


def advance_cache(
    cache: Cache,
    layers: LayerCaches,
    x: Float[Array, "B T D"],
    cross: LayerCaches | None = None,
    *,
    positions: Int[Array, "B S"] | None = None,
) -> tuple[Float[Array, "B T D"], Cache]:
    """Returns the hidden states and the cache after T slots were written.

    A write beyond the last slot would have overwritten it. The hidden states are then NaN, so that
    the mistake shows.
    """
    end = cache.index + x.shape[1]
    x = jnp.where(end <= cache.length, x, jnp.nan)
    return x, Cache(layers, end, cross, positions)

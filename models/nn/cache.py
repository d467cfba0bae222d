"""Keys and values of earlier calls, kept so that decoding projects each token once."""

import dataclasses
from collections.abc import Callable

import jax
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
    recent: tuple[Array, Array, Array] | None = None
    """With a convolution of heads: the projections to queries, keys and values of the last
    `head_convolution` - 1 tokens before that convolution, each `[B, M, w, N, H]` for M beams."""


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
    width = config.head_convolution

    def recent(num_heads: int, size: int, lead: tuple[int, ...]) -> Float[Array, "*L B 1 w N H"]:
        assert width is not None
        return jnp.zeros((*lead, batch_size, 1, width - 1, num_heads, size), execution.dtype)

    def layer(*lead: int) -> LayerCache:
        return LayerCache(
            key=jnp.zeros((*lead, *heads, config.key_dim, length), execution.dtype),
            value=jnp.zeros((*lead, *heads, length, config.value_dim), execution.dtype),
            recent=None
            if width is None
            else (
                recent(config.num_heads, config.key_dim, lead),
                recent(config.kv_heads, config.key_dim, lead),
                recent(config.kv_heads, config.value_dim, lead),
            ),
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


def with_beams(cache: Cache, num_beams: int) -> Cache:
    """Returns the cache after a prompt for the same beams of it: each has the prompt's history."""
    return _map_recent(lambda x: jnp.repeat(x, num_beams, axis=-4), cache)


def choose_beams(cache: Cache, beams: Int[Array, "B K"]) -> Cache:
    """Returns the cache for beams that continue those of the given numbers.

    Keys and values stay in their slots, which all beams share; the masks say who sees them. Only
    what each beam has of its own moves: the inputs of the convolution of heads.
    """

    def chosen(x: Array) -> Array:
        indices = beams.reshape(*(1,) * (x.ndim - 5), *beams.shape, 1, 1, 1)
        return jnp.take_along_axis(x, indices, axis=-4)  # [*L, B, K, w, N, H]

    return _map_recent(chosen, cache)


def _map_recent(change: Callable[[Array], Array], cache: Cache) -> Cache:
    def changed(layer: LayerCache) -> LayerCache:
        return dataclasses.replace(layer, recent=jax.tree.map(change, layer.recent))

    layers = cache.layers
    layers = tuple(map(changed, layers)) if isinstance(layers, tuple) else changed(layers)
    return dataclasses.replace(cache, layers=layers)

"""The key/value cache lets decoding project each token only once.

A layer with an attention window keeps only the tokens of the window, in a ring of R slots. Slot j
contains the newest token whose index, counted from the first slot of the cache, is j modulo R.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from ..config import Execution, TransformerConfig
from .typing import Array, Bool, Float, Int, PyTree


@struct.dataclass
class LayerCache:
    """Keys `[B, K, H, R]` and values `[B, K, R, H]` of a layer.

    If one record stores all layers, the arrays have a leading axis L. K is the number of key/value
    heads, R the number of slots. The two matrix products of attention read this layout directly, so
    decoding a token does not transpose earlier tokens.
    """

    key: Array
    value: Array
    recent: tuple[Array, ...] = ()
    """The inputs of the head convolution for the last w tokens of each of M beams,
    `[B, M, w, N, H]`. See `config.recent_shapes`."""
    window: int | None = struct.field(pytree_node=False, default=None)
    """The attention window, if the slots form a ring. If None, the layer keeps all tokens."""

    @property
    def num_slots(self) -> int:
        """The number of slots, R."""
        return self.key.shape[-1]


LayerCaches = LayerCache | tuple[LayerCache, ...]
"""The caches of all layers: one record whose arrays have a leading axis L, or a tuple of L records
(separate layers)."""


@struct.dataclass
class Cache:
    """Keys and values in S slots of each sequence. The first `index` slots have been written.

    To remove the newest tokens, decrease `index`: decoding continues as if they had not been
    written. A ring that is full has overwritten older tokens. In this case, the index can be at
    most `spare` below the largest number of tokens written so far (`can_go_back`).
    """

    layers: LayerCaches
    index: Int[Array, ""]
    """The next slot to write, the same for every sequence. Pad shorter prompts on the left."""
    length: int = struct.field(pytree_node=False)
    """The number of slots, S, which is also the number of columns of an attention mask."""
    spare: int = struct.field(pytree_node=False, default=0)
    """The number of additional tokens that a layer with a window keeps before its window."""
    cross: LayerCaches | None = None
    """Keys and values of the encoder's hidden states, for a decoder with cross-attention. The first
    call computes these projections; later calls only read the cache.
    """
    positions: Int[Array, "B S"] | None = None
    """The position of the token in each slot, if attention depends on distances."""

    @property
    def rings(self) -> tuple[LayerCache, ...]:
        """The caches of the layers that keep only a window."""
        layers = self.layers if isinstance(self.layers, tuple) else (self.layers,)
        return tuple(layer for layer in layers if layer.window is not None)

    def can_go_back(self, written: int, index: int) -> bool:
        """Returns whether a cache of `written` tokens can go back to its first `index` tokens."""
        full = any(written > ring.num_slots for ring in self.rings)
        return not full or written - index <= self.spare

    @property
    def source_length(self) -> int:
        """The number of cached encoder positions."""
        first = self.cross[0] if isinstance(self.cross, tuple) else self.cross
        assert first is not None
        return first.key.shape[-1]


def init_cache(
    config: TransformerConfig,
    execution: Execution,
    batch_size: int,
    length: int,
    *,
    spare: int = 0,
    num_beams: int = 1,
) -> Cache:
    """Returns an empty cache of `length` slots for each of `batch_size` sequences.

    A layer with a window of W tokens keeps only W tokens instead of `length`. If layers are stacked
    (`execution.layers` is not "separate") and their windows differ, every layer keeps `length`
    tokens.

    Args:
      config: sizes of the model.
      execution: whether layers are stacked, and the precision.
      batch_size: the number of sequences, B.
      length: the number of slots, S.
      spare: the number of tokens that are kept in addition to a window. At most `spare` tokens can
        be removed (`Cache`). If `spare` equals `length`, every layer keeps all slots.
      num_beams: the number of beams. All beams share the slots. A mask `[B, num_beams, S]` selects
        the slots of each beam. Windows are multiplied by `num_beams`.
    """
    config = config.decoder
    heads = (batch_size, config.kv_heads)
    zeros = functools.partial(jnp.zeros, dtype=execution.dtype)

    def layer(window: int | None, *lead: int) -> LayerCache:
        slots = length if window is None else min(length, window * num_beams + spare)
        return LayerCache(
            # Keys [B, K, H, S] and values [B, K, S, V]: the layouts that both matmuls read.
            key=zeros((*lead, *heads, config.key_dim, slots)),
            value=zeros((*lead, *heads, slots, config.value_dim)),
            recent=tuple(zeros((*lead, batch_size, 1, *shape)) for shape in config.recent_shapes),
            window=window if slots < length else None,
        )

    windows = config.layer_windows
    if execution.layers == "separate":
        layers = tuple(map(layer, windows))
    else:
        # Stacked layers share one shape, so a ring needs the same window in every layer.
        same = len(set(windows)) == 1
        layers = layer(windows[0] if same else None, config.num_layers)
    # Only distance biases need the position of each slot: a rotated key already contains its
    # position.
    positions = jnp.zeros((batch_size, length), jnp.int32) if config.scores_by_distance else None
    index = jnp.zeros((), jnp.int32)
    return Cache(layers, index, length, spare, positions=positions)


def grow_cache(cache: Cache, config: TransformerConfig, execution: Execution, length: int) -> Cache:
    """Returns a single-beam cache with more slots that contains the same tokens.

    Args:
      cache: a cache that `init_cache` returned for the same model.
      config: sizes of the model.
      execution: the same as for `init_cache`.
      length: the new number of slots, at least `cache.length`.
    """
    first = cache.layers[0] if isinstance(cache.layers, tuple) else cache.layers
    # A layer axis L may precede the batch axis.
    rows = first.key.shape[-4]
    # Take the shapes and static fields of a larger cache, and pad every array to the new shape.
    larger = jax.eval_shape(lambda: init_cache(config, execution, rows, length, spare=cache.spare))
    larger = dataclasses.replace(larger, cross=cache.cross)
    # Only rings that have not wrapped around grow, so tokens keep their slots.
    arrays = [
        jax.lax.pad(
            x,
            jnp.zeros((), x.dtype),
            [(0, new - old, 0) for old, new in zip(x.shape, to.shape, strict=True)],
        )
        for x, to in zip(jax.tree.leaves(cache), jax.tree.leaves(larger), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(larger), arrays)


def advance_cache(
    cache: Cache | None,
    layers: LayerCaches | None,
    x: Float[Array, "B T D"],
    cross: LayerCaches | None = None,
    *,
    positions: Int[Array, "B S"] | None = None,
) -> tuple[Float[Array, "B T D"], Cache | None]:
    """Returns the hidden states, and the cache after a call that wrote T slots (or None).

    Keys and values of the source, `cross`, are computed once and reused by later calls.
    A write beyond the last slot overwrites that slot. After such a write, the hidden states are
    NaN, so that the mistake is noticed.
    """
    if cache is None:
        return x, None
    cross = cross if cache.cross is None else cache.cross
    # JAX cannot raise an error for a traced index, so make an overflow visible as NaN.
    end = cache.index + x.shape[1]
    x = jnp.where(end <= cache.length, x, jnp.nan)
    cache = dataclasses.replace(cache, layers=layers, index=end, cross=cross, positions=positions)
    return x, cache


class Keys(NamedTuple):
    """The keys and values that the tokens of a call attend to."""

    key: Float[Array, "B K H R"]
    value: Float[Array, "B K R V"]
    columns: Int[Array, " R"] | None = None
    """The index of each key among all S slots, which is also its column in the mask; negative for
    an empty slot. If None, the keys are all slots in order."""

    def of_columns(self, x: Array, axis: int = -1) -> Array:
        """Selects the entries for these keys from an array with an entry for each slot."""
        if self.columns is None or x.shape[axis] == 1:
            return x
        return jnp.take(x, jnp.maximum(self.columns, 0), axis=axis)

    def mask(self, mask: Bool[Array, "#B 1 #T #S"]) -> Bool[Array, "#B 1 #T #R"]:
        """Selects the columns for these keys from a mask over all S slots."""
        return mask if self.columns is None else self.of_columns(mask) & (self.columns >= 0)


def write_tokens(
    cache: LayerCache,
    key: Float[Array, "B K H T"],
    value: Float[Array, "B K T V"],
    index: Int[Array, ""] | int,
) -> tuple[LayerCache, Keys]:
    """Writes T tokens into a layer's cache; returns the cache and the keys that they attend to.

    The first token is written to slot `index`, counted over the whole cache. If R ≥ W + T - 1, the
    ring after the write still contains every key that the T tokens attend to. Otherwise, the T
    tokens attend to the keys of the ring before the write, and to their own keys.
    """
    # There are T new tokens and R slots; without a window, slot i contains token i.
    length, slots = key.shape[-1], cache.num_slots
    if cache.window is None:
        key, value = _write_slots((cache.key, key), (cache.value, value), jnp.asarray(index))
        return dataclasses.replace(cache, key=key, value=value), Keys(key, value)
    written = _write_ring(cache, key, value, index)
    if cache.window + length - 1 <= slots:
        return written, Keys(written.key, written.value, newest_tokens(index + length, slots))
    # The write overwrites keys that the first new tokens need, so use the old ring and the new
    # tokens.
    before = newest_tokens(index, slots)
    keys = Keys(
        jnp.concatenate([cache.key, key], axis=3),
        jnp.concatenate([cache.value, value], axis=2),
        jnp.concatenate([before, index + jnp.arange(length)]),
    )
    return written, keys


def newest_tokens(end: Int[Array, ""] | int, num_slots: int) -> Int[Array, " R"]:
    """Returns the index of the token that each slot of a ring contains, negative for an empty slot.

    Args:
      end: the number of tokens that have been written.
      num_slots: the number of slots, R.
    """
    # Slot r contains the newest token t with t % R = r.
    last = jnp.asarray(end) - 1
    return last - (last - jnp.arange(num_slots)) % num_slots


FEW_TOKENS = 8
"""Up to this number of tokens are written one by one, because XLA writes a single token in place.
"""


def _write_ring(
    cache: LayerCache,
    key: Float[Array, "B K H T"],
    value: Float[Array, "B K T V"],
    index: Int[Array, ""] | int,
) -> LayerCache:
    length, slots = key.shape[-1], cache.num_slots
    keys, values = cache.key, cache.value
    # A few new tokens overwrite the oldest slots of the ring, one by one.
    if length <= min(FEW_TOKENS, slots):
        for i in range(length):
            slot = (jnp.asarray(index) + i) % slots
            one = (keys, key[..., i : i + 1]), (values, value[..., i : i + 1, :])
            keys, values = _write_slots(*one, slot)
        return dataclasses.replace(cache, key=keys, value=values)
    # For many tokens, build a new ring from the new tokens and the remaining old tokens.
    tokens = newest_tokens(index + length, slots)  # [R]
    new, offsets = tokens >= index, jnp.clip(tokens - index, 0, length - 1)
    return dataclasses.replace(
        cache,
        key=jnp.where(new, jnp.take(key, offsets, axis=3), keys),
        value=jnp.where(new[:, None], jnp.take(value, offsets, axis=2), values),
    )


def with_beams(cache: Cache, num_beams: int) -> Cache:
    """Prepares the cache of a prompt for several beams. All beams continue the prompt."""
    return _map_recent(lambda x: jnp.repeat(x, num_beams, axis=-4), cache)


def choose_beams(cache: Cache, beams: Int[Array, "B K"]) -> Cache:
    """Returns the cache for new beams. New beam k continues the old beam `beams[:, k]`.

    Keys and values stay in their slots. Beams share the slots, and masks select the slots of each
    beam. Only the inputs of the head convolution are stored per beam; they are reordered.
    """

    def chosen(x: Array) -> Array:
        # Axes [*L, B, K, 1, 1, 1], to select whole beams.
        indices = beams.reshape(*(1,) * (x.ndim - 5), *beams.shape, 1, 1, 1)
        return jnp.take_along_axis(x, indices, axis=-4)  # [*L, B, K, w, N, H]

    return _map_recent(chosen, cache)


def _map_recent(change: Callable[[Array], Array], cache: Cache) -> Cache:
    def changed(layer: LayerCache) -> LayerCache:
        return dataclasses.replace(layer, recent=jax.tree.map(change, layer.recent))

    layers = cache.layers
    layers = tuple(map(changed, layers)) if isinstance(layers, tuple) else changed(layers)
    return dataclasses.replace(cache, layers=layers)


def _write_slots(
    key: tuple[Float[Array, "B K H R"], Float[Array, "B K H T"]],
    value: tuple[Float[Array, "B K R V"], Float[Array, "B K T V"]],
    slot: Int[Array, ""],
) -> tuple[Float[Array, "B K H R"], Float[Array, "B K R V"]]:
    """Writes T tokens into consecutive slots from `slot` on. Each pair is (cache, new tokens)."""
    # With one row or one key/value head, XLA's CPU backend would copy the whole cache.
    if 1 not in key[0].shape[:2]:
        return _update_slots(key, value, slot)
    return _write_to_one(key, value, slot)


def _update_slots(
    key: tuple[Array, Array], value: tuple[Array, Array], slot: Array
) -> tuple[Array, Array]:
    return (
        # Tokens are axis 3 of the keys [B, K, H, R] and axis 2 of the values [B, K, R, V].
        jax.lax.dynamic_update_slice_in_dim(*key, slot, axis=3),
        jax.lax.dynamic_update_slice_in_dim(*value, slot, axis=2),
    )


@jax.custom_batching.custom_vmap
def _write_to_one(
    key: tuple[Array, Array], value: tuple[Array, Array], slot: Array
) -> tuple[Array, Array]:
    """Writes into the slots of a cache with one row or one key/value head.

    XLA's CPU backend removes an axis of size 1 before the matmuls of attention. It fuses this
    reshape with the write, and then copies each whole array four times per token. XLA does not fuse
    across the branches of `cond`, so this function writes inside a branch.
    """

    def write_in_branch(
        key: tuple[Array, Array], value: tuple[Array, Array], slot: Array
    ) -> tuple[Array, Array]:
        # If the tokens do not fit, `advance_cache` sets the result to NaN, so the written values do
        # not matter.
        fits = slot + key[1].shape[3] <= key[0].shape[3]
        old = key[0], value[0]
        return jax.lax.cond(fits, _update_slots, lambda *_: old, key, value, slot)

    return jax.lax.platform_dependent(key, value, slot, cpu=write_in_branch, default=_update_slots)


@_write_to_one.def_vmap
def _write_to_rows(
    axis_size: int,
    batched: Sequence[tuple[bool, bool] | bool],
    *arguments: PyTree,
) -> tuple[tuple[Array, Array], tuple[bool, bool]]:
    """Writes into the slots of each row that `vmap` maps over.

    This function does not use `cond`, because `vmap` converts it to a select, which copies whole
    arrays.
    """
    axes = jax.tree.map(lambda mapped: 0 if mapped else None, tuple(batched))
    write = jax.vmap(_update_slots, in_axes=axes, axis_size=axis_size)
    return write(*arguments), (True, True)

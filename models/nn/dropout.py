"""Dropout whose mask depends on the sequence, not on the layout of the batch.

Every sequence of the global batch has its own key, a function of seed, step and index. The mask is
therefore the same on one device and on many, for a whole batch and for micro-batches: all of them
train the same model. Without a key there is no dropout; there is no `deterministic` switch.
"""

import zlib
from typing import overload

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.random import threefry_2x32

from .typing import Array, Float, Key

DROPOUT_MASK = "dropout_mask"
"""The name under which rematerialization may keep the masks, one byte per element."""

RowKeys = Key[Array, " B"]


def row_keys(rng: Key[Array, ""], num_rows: int, first_row: int | Array = 0) -> RowKeys:
    """Returns one key per sequence, for `num_rows` sequences of a batch from `first_row` on."""
    rows = jnp.arange(num_rows) + first_row
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(rng, rows)


@overload
def fold_in(rng: RowKeys, data: int | Array) -> RowKeys: ...
@overload
def fold_in(rng: None, data: int | Array) -> None: ...
@overload
def fold_in(rng: RowKeys | None, data: int | Array) -> RowKeys | None: ...
def fold_in(rng: RowKeys | None, data: int | Array) -> RowKeys | None:
    """Derives the keys of one layer, or of one dropout in it, by its number; None stays None."""
    if rng is None:
        return None
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(rng, data)


def dropout(
    x: Float[Array, "B *rest"], rate: float, rng: RowKeys | None, place: str
) -> Float[Array, "B *rest"]:
    """Sets elements of `x` to 0 with probability `rate` and divides the others by 1 - rate.

    Srivastava et al. 2014. The probability is rounded to a multiple of 2⁻¹⁶, so that one word of
    Threefry decides about two elements.

    Args:
      x: any array whose first axis is the sequences.
      rate: in [0, 1); 0 changes nothing.
      rng: one key per sequence; None changes nothing.
      place: the name of this dropout in its layer.
    """
    if rate == 0 or rng is None:
        return x
    keys = jax.random.key_data(fold_in(rng, zlib.crc32(place.encode())))
    size = x[0].size
    counters = jnp.arange(-(-size // 2), dtype=jnp.uint32)
    words = jax.vmap(lambda key: threefry_2x32(key, counters))(keys)
    draws = jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(x.shape[0], -1)[:, :size]
    dropped_below = min(round(rate * 2**16), 2**16 - 1)
    keep = checkpoint_name(draws.reshape(x.shape) >= dropped_below, DROPOUT_MASK)
    return jnp.where(keep, x / (1 - rate), 0)

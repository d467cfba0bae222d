"""Dropout whose mask belongs to a row, not to a place in a batch.

Every row of the global batch has its own key, a function of (seed, step, row).
The mask of an element is then the same whether the batch lies on one device or
on many, whole or cut into micro-batches: all of them train the same model.
No key, no dropout: there is no `deterministic` switch.
"""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.random import threefry_2x32

from .typing import Array, Float, Key

DROPOUT_MASK = "dropout_mask"
"""The name under which rematerialisation may keep the masks: a byte an element."""

RowKeys = Key[Array, " B"]


def row_keys(rng: Key[Array, ""], num_rows: int, first_row: int | Array = 0) -> RowKeys:
    """One key for each of `num_rows` rows, the first being row `first_row` of the batch."""
    rows = jnp.arange(num_rows) + first_row
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(rng, rows)


def fold_in(rng: Any, data: int | Array) -> Any:
    """Row keys for one layer or one place of a model; None stays None."""
    if rng is None:
        return None
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(rng, data)


def dropout(
    x: Float[Array, "B *rest"], rate: float, rng: RowKeys | None, place: str
) -> Float[Array, "B *rest"]:
    """Zeroes elements of `x` with probability `rate` and scales the others up.

    Srivastava et al. 2014.  The probability is rounded to a multiple of 2⁻¹⁶,
    so that one word of Threefry serves two elements.

    Args:
      x: any array with rows in front.
      rate: in [0, 1); 0 changes nothing.
      rng: row keys; None changes nothing.
      place: names this dropout among those of a layer.
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

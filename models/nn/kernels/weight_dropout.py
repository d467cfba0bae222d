"""Which attention weights dropout keeps: one definition for XLA and for kernels.

Srivastava et al. 2014, "Dropout". Every element (query, key) of every head draws 16 bits of a
counter-based generator, Threefry-2x32 (Salmon et al. 2011, "Parallel random numbers: as easy as
1, 2, 3"), under a key of the sequence, the layer and the head. A kernel can therefore draw any
block of elements by itself, in any order and more than once, and a device that holds some of the
sequences or heads draws what a single device would.

One Threefry block has 64 bits and decides about four keys of a query. These lie 8 apart, because
a TPU's registers have 8 rows: keys r, r + 8, r + 16 and r + 24 of each 32 keys have the number
g = 8 · (32 keys before) + r in common, and counters are (query, g).
"""

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from ..layers import DROPOUT_MASK, RowKeys, fold_in
from ..typing import Array, Bool, Float, UInt

GROUP = 32
"""Keys of a query whose bits come from the same 8 Threefry blocks."""
ROWS = 8
"""Distance of the keys that share a block."""
ROUNDS = 13
"""Salmon et al., table 2: the fewest with which Threefry-2x32 passes BigCrush. (jax draws with 20,
which here would be paid two or three times, once for each pass of a kernel.)"""

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_PARITY = 0x1BD11BDA

HeadKeys = UInt[Array, "B N 2"]
"""One key of Threefry-2x32 for each head of each sequence: two words, uint32."""
Word = UInt[Array, "..."]
"""Words of 32 bits, uint32."""


def threefry(
    key: tuple[Word, Word], counter: tuple[Word, Word], rounds: int = ROUNDS
) -> tuple[Word, Word]:
    """Returns the words of Threefry-2x32 (Salmon et al. 2011, section 4), element by element."""
    parity = key[0] ^ key[1] ^ np.uint32(_PARITY)
    schedule = *key, parity
    x, y = counter[0] + key[0], counter[1] + key[1]
    for i in range(rounds):
        left = _ROTATIONS[i // 4 % 2][i % 4]
        x = x + y
        y = x ^ (jax.lax.shift_left(y, np.uint32(left)) | _shift_right(y, 32 - left))
        if i % 4 == 3:
            step = i // 4 + 1
            x = x + schedule[step % 3]
            y = y + (schedule[(step + 1) % 3] + np.uint32(step))
    return x, y


def _shift_right(x: Word, by: int) -> Word:
    return jax.lax.shift_right_logical(x, np.uint32(by))


def dropped_below(rate: float) -> int:
    """Returns the number that a draw of 16 bits must reach for its element to be kept."""
    return min(round(rate * 2**16), 2**16 - 1)


def draws(words: tuple[Word, Word]) -> tuple[Word, Word, Word, Word]:
    """Returns the 16 bits of the first, second, third and fourth key of a Threefry block."""
    low, high = np.uint32(0xFFFF), 16
    first, second = words
    return first & low, _shift_right(first, high), second & low, _shift_right(second, high)


def head_keys(rng: RowKeys, num_heads: int) -> HeadKeys:
    """Returns the keys of the heads' draws, from a layer's key for each sequence."""
    rng = fold_in(rng, zlib.crc32(b"attention_weights"))
    per_head = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))
    return jax.random.key_data(per_head(rng, jnp.arange(num_heads)))


def kept_weights(
    keys: HeadKeys, num_queries: int, num_keys: int, rate: float
) -> Bool[Array, "B N {num_queries} {num_keys}"]:
    """Returns whether each attention weight is kept, for all queries and keys.

    Args:
      keys: from `head_keys`.
      num_queries: T.
      num_keys: S.
      rate: probability that a weight is dropped, in [0, 1); rounded to a multiple of 2⁻¹⁶.
    """
    shape = num_queries, -(-num_keys // GROUP) * ROWS
    counter = tuple(jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in (0, 1))
    first, second = (keys[..., word, None, None] for word in (0, 1))
    words = threefry((first, second), (counter[0], counter[1]))
    # Without the barrier, XLA would compute a block anew for each of its four keys.
    words = (x.reshape(*x.shape[:-1], -1, ROWS) for x in jax.lax.optimization_barrier(words))
    below = dropped_below(rate)
    kept = jax.lax.platform_dependent(
        *words,
        cpu=functools.partial(_kept_elementwise, below=below),
        default=functools.partial(_kept_stacked, below=below),
    )
    return kept.reshape(*kept.shape[:3], -1)[..., :num_keys]


def _kept_stacked(first: Word, second: Word, below: int) -> Bool[Array, "B N T G 4 8"]:
    return jnp.stack([x >= below for x in draws((first, second))], axis=-2)


def _kept_elementwise(first: Word, second: Word, below: int) -> Bool[Array, "B N T G 4 8"]:
    """Returns the same, in a sixth of the time on a CPU; a TPU would write words for each key."""
    part = jnp.arange(GROUP // ROWS, dtype=jnp.uint32)[:, None]
    both = jnp.where(part < 2, first[..., None, :], second[..., None, :])
    return jnp.where(part % 2 == 0, both & 0xFFFF, _shift_right(both, 16)) >= below


def drop_weights(
    weights: Float[Array, "B N T S"], rate: float, rng: RowKeys | None
) -> Float[Array, "B N T S"]:
    """Sets attention weights to 0 with probability `rate` and divides the others by 1 - rate.

    As `layers.dropout`, whose laws hold here too, but with draws that a kernel can repeat.

    Args:
      weights: of all queries and keys.
      rate: in [0, 1); 0 changes nothing.
      rng: a layer's key for each sequence; None changes nothing.
    """
    if rate == 0 or rng is None:
        return weights
    _, num_heads, num_queries, num_keys = weights.shape
    kept = kept_weights(head_keys(rng, num_heads), num_queries, num_keys, rate)
    return jnp.where(checkpoint_name(kept, DROPOUT_MASK), weights / (1 - rate), 0)

"""Dropout of activations and attention weights, with a counter-based random number generator.

Dropout was introduced by Srivastava et al. 2014. Whether an element is dropped depends only on the
seed, the step, the sequence, the layer, the name of the dropout in the layer, the row and the
column. For activations, rows are tokens and columns are features. For attention weights, rows are
queries and columns are keys. The result does not depend on how the data is divided into batches,
micro-batches and devices, so every layout trains the same model. A device draws the mask of its
shard of a sequence without communication. An attention kernel can draw the mask of any block, in
any order, more than once.

One block of Threefry-2x32 provides 64 random bits, 16 bits for each of four columns. The four
columns of a block are 8 apart, because a TPU's registers have 8 rows. Columns r, r + 8, r + 16 and
r + 24 of each group of 32 columns share the block with the counter (row, g), where g = 8 · (number
of earlier groups) + r.
"""

import functools
import math
import zlib
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from ...data.common.fields import Rate, check_value, require
from .typing import Array, Bool, Float, Int, Key, UInt

DROPOUT_MASK = "dropout_mask"
"""A rematerialization policy can use this name to save the masks, with one byte per element."""

GROUP = 32
"""The number of columns in a group. The bits for a row of a group come from 8 Threefry blocks."""
ROWS = 8
"""The distance between columns that share a Threefry block."""
ROUNDS = 13
"""The minimum number of rounds that Threefry-2x32 needs to pass BigCrush (Salmon et al., table 2).
(jax uses 20 rounds. Fewer rounds save time here, since each of a kernel's two or three passes draws
again.)
"""

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_PARITY = 0x1BD11BDA

RowKeys = Key[Array, " B"]
"""One random key for each sequence of a batch."""
Keys = TypeVar("Keys", bound=RowKeys | None)
HeadKeys = UInt[Array, "B N 2"]
"""One Threefry-2x32 key, two uint32 words, for each head of each sequence."""
Word = UInt[Array, "..."]
"""32-bit words, as uint32."""
Places = tuple[Int[Array, "B R"], Int[Array, "B C"]]
"""The index of each row and each column within the whole sequence."""


def row_keys(rng: Key[Array, ""], num_rows: int, first_row: int | Array = 0) -> RowKeys:
    """Returns one key for each of `num_rows` sequences of a batch, starting at `first_row`."""
    rows = jnp.arange(num_rows) + first_row
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(rng, rows)


def fold_in(rng: Keys, data: int | Array) -> Keys:
    """Derives keys for a layer, or for a dropout in a layer, by folding in an integer.

    Returns None if the keys are None.
    """
    if rng is None:
        return rng
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(rng, data)  # pyright: ignore[reportReturnType]


def key_words(keys: Key[Array, "*shape"] | UInt[Array, "*shape 2"]) -> UInt[Array, "*shape 2"]:
    """Returns the two words of each Threefry-2x32 key.

    Raises:
      UserError: the keys belong to another generator.
    """
    implementation = jax.random.key_impl(keys)
    require(
        str(implementation) == "threefry2x32",
        f"dropout does not support keys of {implementation}: give "
        "jax.random.key(seed, impl='threefry2x32'), or no keys",
    )
    return jax.random.key_data(keys)


def dropout(
    x: Float[Array, "B *rest"], rate: float, rng: RowKeys | None, name: str
) -> Float[Array, "B *rest"]:
    """Sets elements of `x` to 0 with probability `rate` and divides the others by 1 - rate.

    To disable dropout, pass None for the keys; the function has no argument `deterministic`. The
    probability is rounded to a multiple of 2⁻¹⁶.

    Args:
      x: `[B, T, …]` for the tokens of sequences, or `[B, D]` for one vector per sequence.
      rate: the dropout rate, in [0, 1). If 0, dropout is off.
      rng: one key per sequence. If None, dropout is off.
      name: the name of this dropout in its layer.

    Raises:
      UserError: the keys are not of Threefry-2x32, or the rate is not in [0, 1).
    """
    if rate == 0 or rng is None:
        return x
    # `zlib.crc32` is stable between processes, unlike `hash`.
    keys = key_words(fold_in(rng, zlib.crc32(name.encode())))
    # Draw for [B, T, F], where F counts all features of a token. A single vector is one token.
    _, num_tokens, *features = x.shape if x.ndim > 2 else (x.shape[0], 1, x.shape[1])
    kept = kept_elements(keys, num_tokens, math.prod(features), rate).reshape(x.shape)
    return jnp.where(checkpoint_name(kept, DROPOUT_MASK), x / (1 - rate), 0)


def head_keys(rng: RowKeys, num_heads: int) -> HeadKeys:
    """Returns the dropout keys of each head, from a layer's key for each sequence.

    Raises:
      UserError: the keys are not of Threefry-2x32.
    """
    rng = fold_in(rng, zlib.crc32(b"attention_weights"))
    per_head = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))
    return key_words(per_head(rng, jnp.arange(num_heads)))


def drop_weights(
    weights: Float[Array, "B N T S"], rate: float, rng: RowKeys | None
) -> Float[Array, "B N T S"]:
    """Sets attention weights to 0 with probability `rate` and divides the others by 1 - rate.

    Args:
      weights: the attention weights of all queries and keys.
      rate: the dropout rate, in [0, 1). If 0, dropout is off.
      rng: a layer's key for each sequence. If None, dropout is off.
    """
    if rate == 0 or rng is None:
        return weights
    _, num_heads, num_queries, num_keys = weights.shape
    kept = kept_elements(head_keys(rng, num_heads), num_queries, num_keys, rate)
    return jnp.where(checkpoint_name(kept, DROPOUT_MASK), weights / (1 - rate), 0)


def kept_elements(
    keys: UInt[Array, "B *lead 2"],
    num_rows: int,
    num_columns: int,
    rate: float,
    *,
    places: Places | None = None,
) -> Bool[Array, "B *lead {num_rows} {num_columns}"]:
    """Returns whether each element of each matrix is kept.

    Args:
      keys: the random key of each matrix with R rows and C columns, as two words.
      num_rows: the number of rows, R.
      num_columns: the number of columns, C.
      rate: probability that an element is dropped, in [0, 1); rounded to a multiple of 2⁻¹⁶.
      places: the indices of the rows and columns. Columns form groups: each group has `GROUP`
        consecutive columns and starts at a multiple of `GROUP`. If None, indices count from 0.
    """
    # Four columns share a counter, so each group of 32 columns has 8 counters.
    shape = num_rows, -(-num_columns // GROUP) * ROWS
    row, counter = (jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in (0, 1))
    if places is not None:
        # Indices may differ between sequences, so broadcast them over the head axes.
        lead = (-1, *(1,) * (keys.ndim - 2))
        row = places[0].astype(jnp.uint32).reshape(*lead, num_rows, 1)
        firsts = places[1][:, ::GROUP].astype(jnp.uint32)[..., None] // np.uint32(GROUP // ROWS)
        counter = (firsts + jnp.arange(ROWS, dtype=jnp.uint32)).reshape(*lead, 1, shape[1])
        row, counter = jnp.broadcast_arrays(row, counter)
    first, second = (keys[..., word, None, None] for word in (0, 1))
    words = threefry((first, second), (row, counter))
    # Without the barrier, XLA recomputes each block for each of its four columns.
    words = (x.reshape(*x.shape[:-1], -1, ROWS) for x in jax.lax.optimization_barrier(words))
    below = dropped_below(rate)
    kept = jax.lax.platform_dependent(
        *words,
        cpu=functools.partial(_kept_elementwise, below=below),
        default=functools.partial(_kept_stacked, below=below),
    )
    return kept[..., :num_columns]


def _kept_stacked(first: Word, second: Word, below: int) -> Bool[Array, "*lead R C"]:
    """Returns whether the elements are kept, given random words `[…, R, C / 32, 8]`."""
    # Before the barrier, use bytes and flatten the axes of attention weights. Otherwise, the TPU
    # compiler (libtpu 0.0.42) crashes with a segmentation fault for a scan of layers with 1,024
    # tokens, if the dropout masks are kept for the backward pass.
    lead = first.shape[:-2]
    flat = (-1,) if len(lead) > 2 else lead
    words = (x.reshape(*flat, *x.shape[-2:]) for x in (first, second))
    bytes_ = [(x >= below).astype(jnp.int8) for x in draws((next(words), next(words)))]
    kept = jax.lax.optimization_barrier(jnp.stack(bytes_, axis=-2))
    return kept.reshape(*lead, -1) != 0


def _kept_elementwise(first: Word, second: Word, below: int) -> Bool[Array, "*lead R C"]:
    """Computes the same result as `_kept_stacked`.

    This version is 6 times as fast on CPU, but needs more memory on a TPU.
    """
    # The columns of a group form 4 parts of 8 columns. Parts 0 and 1 use the low and high half of
    # the first word; parts 2 and 3 use the low and high half of the second word (`draws`).
    part = jnp.arange(GROUP // ROWS, dtype=jnp.uint32)[:, None]
    # […, R, C / 32, 8] to […, R, C / 32, 4, 8].
    both = jnp.where(part < 2, first[..., None, :], second[..., None, :])
    kept = jnp.where(part % 2 == 0, both & 0xFFFF, _shift_right(both, 16)) >= below
    return kept.reshape(*first.shape[:-2], -1)


def threefry(
    key: tuple[Word, Word], counter: tuple[Word, Word], rounds: int = ROUNDS
) -> tuple[Word, Word]:
    """Computes the two words of Threefry-2x32 (Salmon et al. 2011, section 4) for each element."""
    parity = key[0] ^ key[1] ^ np.uint32(_PARITY)
    schedule = *key, parity
    x, y = counter[0] + key[0], counter[1] + key[1]
    for i in range(rounds):
        left = _ROTATIONS[i // 4 % 2][i % 4]
        x = x + y
        y = x ^ (jax.lax.shift_left(y, np.uint32(left)) | _shift_right(y, 32 - left))
        # Inject the key every four rounds, as Threefry specifies.
        if i % 4 == 3:
            step = i // 4 + 1
            x = x + schedule[step % 3]
            y = y + (schedule[(step + 1) % 3] + np.uint32(step))
    return x, y


def _shift_right(x: Word, by: int) -> Word:
    return jax.lax.shift_right_logical(x, np.uint32(by))


def dropped_below(rate: float) -> int:
    """Returns the threshold for 16-bit draws: smaller draws are dropped.

    Raises:
      UserError: the rate is not in [0, 1).
    """
    check_value("rate", rate, Rate)
    return min(round(rate * 2**16), 2**16 - 1)


def draws(words: tuple[Word, Word]) -> tuple[Word, Word, Word, Word]:
    """Returns the 16 random bits for each of the four columns of a Threefry block."""
    low, high = np.uint32(0xFFFF), 16
    first, second = words
    return first & low, _shift_right(first, high), second & low, _shift_right(second, high)

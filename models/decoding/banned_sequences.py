"""Bans sequences of tokens.

If a text ends with all tokens of a banned sequence except the last one, the last token of the
sequence gets the logit -inf.

The caller specifies the banned sequences, or bans the repetition of any sequence of a given length
within a row (`completes_repetition`).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ...data.common.fields import require
from ..nn.typing import Array, Bool, Float, Int
from .padding import pad_rows, power_of_two

ANY, NOTHING = -1, -2
"""Padding values. `ANY` pads short prefixes and matches every token. `NOTHING` pads rows before
their first token and matches no token of a prefix.
"""


@struct.dataclass
class BannedSequences:
    """W banned sequences, stored as arrays for the compiled steps."""

    prefixes: Int[Array, "W P"]
    """All tokens of each sequence except the last one, padded on the left with `ANY`."""
    last_tokens: Int[Array, " W"]

    @property
    def prefix_length(self) -> int:
        """The number of recent tokens that are compared with the sequences, P."""
        return self.prefixes.shape[1]


def banned_sequences(sequences: Sequence[Sequence[int]], vocab_size: int) -> BannedSequences:
    """Converts banned sequences to arrays.

    Args:
      sequences: sequences of one or more tokens.
      vocab_size: the size of the model's vocabulary.

    Raises:
      UserError: a sequence is empty or not within the vocabulary, or all tokens are banned.
    """
    for sequence in sequences:
        require(sequence, "a banned sequence has no token: leave it out")
        require(
            0 <= min(sequence) <= max(sequence) < vocab_size,
            f"banned sequence {[*sequence]} is not within the vocabulary of {vocab_size}: use the "
            "model's own tokenizer",
        )
    require(
        len({sequence[0] for sequence in sequences if len(sequence) == 1}) < vocab_size,
        f"all {vocab_size} tokens are banned: leave at least one token out",
    )
    # Repeat the first sequence up to a power of two, so that few programs are compiled.
    number = power_of_two(len(sequences)) if sequences else 0
    sequences = [*sequences, *[*sequences][:1] * (number - len(sequences))]
    prefixes, _ = pad_rows([sequence[:-1] for sequence in sequences], fill=ANY, left=True)
    return BannedSequences(
        jnp.asarray(prefixes), jnp.asarray([sequence[-1] for sequence in sequences], jnp.int32)
    )


def last_tokens(rows: Sequence[Sequence[int]], number: int) -> np.ndarray:
    """Returns the last `number` tokens of each row, int32[B, number]."""
    # `row[-number:]` would be wrong: if `number` is 0, this slice is the whole row.
    ends = [row[max(0, len(row) - number) :] for row in rows]
    return pad_rows(ends, length=number, fill=NOTHING, left=True)[0]


def append_recent(
    recent: Int[Array, "*rows P"], tokens: Int[Array, "*rows"]
) -> Int[Array, "*rows P"]:
    """Appends a token to the recent tokens of each row, and drops the oldest token."""
    number = recent.shape[-1]
    return jnp.concatenate([recent, tokens[..., None]], axis=-1)[..., 1 : 1 + number]


def hide_banned(
    logits: Float[Array, "*rows V"], recent: Int[Array, "*rows P"], banned: BannedSequences
) -> Float[Array, "*rows V"]:
    """Sets the logits of tokens that would complete a banned sequence to -inf."""
    if banned.prefix_length == 0:
        return logits.at[..., banned.last_tokens].set(-jnp.inf)
    # [*rows, W, P]: compare each prefix with the end of each row.
    same: Bool[Array, "*rows W P"] = (banned.prefixes == ANY) | (
        banned.prefixes == recent[..., None, :]
    )
    # Several sequences may end with the same token, which is banned if any of them matches, so use
    # `min` and not `set`.
    bound = jnp.where(jnp.all(same, axis=-1), -jnp.inf, jnp.inf)  # [*rows, W]
    return logits.at[..., banned.last_tokens].min(bound)


def completes_repetition(
    written: Int[Array, "*rows L"], length: Int[Array, ""], size: int, *, vocab_size: int
) -> Bool[Array, "*rows {vocab_size}"]:
    """Returns which next tokens would repeat a sequence of `size` tokens in the same row.

    Args:
      written: the tokens of each row.
      length: the number of tokens in each row so far.
      size: the length of a sequence, at least 1.
      vocab_size: the size of the vocabulary.
    """
    # The number of positions where a sequence of this size may begin.
    number = written.shape[-1] - size + 1
    if number < 1:
        return jnp.zeros((*written.shape[:-1], vocab_size), bool)
    # Compare the newest `size` - 1 tokens with the prefix at every position.
    prefixes = [written[..., i : i + number] for i in range(size - 1)]
    newest = [jnp.take(written, length - (size - 1) + i, axis=-1) for i in range(size - 1)]
    # Ignore sequences that end after the last written token.
    whole = (jnp.arange(number) + size <= length) & (length >= size - 1)
    repeated: Bool[Array, "*rows number"] = jnp.broadcast_to(whole, (*written.shape[:-1], number))
    for prefix, token in zip(prefixes, newest, strict=True):
        repeated &= prefix == token[..., None]

    def mark(tokens: Array, repeated: Array) -> Array:
        return jnp.zeros(vocab_size, jnp.int32).at[tokens].add(repeated.astype(jnp.int32)) > 0

    # Ban the last token of each repeated sequence.
    rows = jax.vmap(mark)(
        written[..., size - 1 :].reshape(-1, number), repeated.reshape(-1, number)
    )
    return rows.reshape(*written.shape[:-1], vocab_size)

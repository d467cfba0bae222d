"""Words that are not to be written: of one token, or of several, of which the last is hidden."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import struct

from ...data.errors import UserError
from ..nn.typing import Array, Float, Int

ANY, NOTHING = -1, -2
"""What stands before a shorter word, and before the first token of a row."""


@struct.dataclass
class BadWords:
    """Words as a compiled step takes them."""

    beginnings: Int[Array, "W P"]
    """All tokens of each word but its last."""
    ends: Int[Array, " W"]

    @property
    def num_recent(self) -> int:
        """How many of the newest tokens tell whether a word has begun, P."""
        return self.beginnings.shape[1]


def bad_words(words: Sequence[Sequence[int]]) -> BadWords:
    """Words of one or more tokens each."""
    # Some twice, so that few numbers of them are compiled for.
    words = [*words, *words[:1] * (2 ** (len(words) - 1).bit_length() - len(words))]
    longest = max(map(len, words), default=1)
    beginnings = [[ANY] * (longest - len(word)) + [*word[:-1]] for word in words]
    return BadWords(
        jnp.asarray(beginnings, jnp.int32).reshape(len(words), longest - 1),
        jnp.asarray([word[-1] for word in words], jnp.int32),
    )


def check_bad_words(words: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Raises ValueError unless they are words, and leave tokens to choose from."""
    for word in words:
        if not word:
            raise UserError("a bad word has no token: leave it out")
        if not 0 <= min(word) <= max(word) < vocab_size:
            raise UserError(
                f"bad word {[*word]} is not within the vocabulary of {vocab_size}: use the "
                "model's own tokenizer"
            )
    if len({word[0] for word in words if len(word) == 1}) == vocab_size:
        raise UserError(f"all {vocab_size} tokens are suppressed: leave some to choose from")


def newest(rows: Sequence[Sequence[int]], number: int) -> np.ndarray:
    """The newest tokens of each row, int32[B, number]."""
    recent = np.full((len(rows), number), NOTHING, np.int32)
    for i, row in enumerate(rows):
        length = min(number, len(row))
        recent[i, number - length :] = row[len(row) - length :]
    return recent


def push(recent: Int[Array, "*rows P"], tokens: Int[Array, "*rows"]) -> Int[Array, "*rows P"]:
    """The newest tokens once another one is written."""
    number = recent.shape[-1]
    return jnp.concatenate([recent, tokens[..., None]], axis=-1)[..., 1 : 1 + number]


def hide_bad_words(
    logits: Float[Array, "*rows V"], recent: Int[Array, "*rows P"], words: BadWords
) -> Float[Array, "*rows V"]:
    """Hides every token that would complete a word."""
    if words.num_recent == 0:
        return logits.at[..., words.ends].set(-jnp.inf)
    begun = (words.beginnings == ANY) | (words.beginnings == recent[..., None, :])
    bound = jnp.where(jnp.all(begun, axis=-1), -jnp.inf, jnp.inf)
    return logits.at[..., words.ends].min(bound)

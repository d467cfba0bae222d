"""Chooses the next token: greedy, temperature, top-k, top-p, min-p, repetition penalty.

The temperature and the filters are traced arrays, so that changing a value does not recompile.
"""

import dataclasses
from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ...data.common.fields import require
from ..nn.attention import HIDDEN
from ..nn.masks import AnyArray
from ..nn.typing import Array, Bool, Float, Int, Key
from .banned_sequences import BannedSequences, banned_sequences, hide_banned, last_tokens
from .request import SMALLEST_TEMPERATURE, Sampling

NO_TOKEN = -1
"""The value that replaces a token if the logits are NaN or infinite."""


def require_tokens(tokens: Int[AnyArray, "..."] | list[int]) -> np.ndarray:
    """Returns the chosen tokens as a NumPy array, after a check for `NO_TOKEN`.

    Raises:
      UserError: a token is `NO_TOKEN`.
    """
    chosen = np.asarray(tokens)
    require(
        (chosen != NO_TOKEN).all(),
        "the model's logits are NaN or infinite: its parameters are too large; give another "
        "--step or another model",
    )
    return chosen


@struct.dataclass
class SamplingParams:
    """`Sampling` as traced arrays, so that changing a value does not recompile.

    If the settings of rows differ (`row_sampling`), the arrays have the shape [R, 1].
    """

    temperature: Float[Array, "*rows"]
    top_k: Int[Array, "*rows"]
    top_p: Float[Array, "*rows"]
    min_p: Float[Array, "*rows"]
    repetition_penalty: Float[Array, "*rows"]
    banned: BannedSequences
    greedy: bool = struct.field(pytree_node=False)
    filtered: bool = struct.field(pytree_node=False)
    penalized: bool = struct.field(pytree_node=False)
    scored: bool = struct.field(pytree_node=False)
    """Whether the log-probabilities of chosen tokens are computed."""
    takes_best: Bool[Array, "R 1"] | None = None
    """If some rows are greedy and others are not, whether each row is greedy."""
    adjustments: "Adjustments | None" = None
    """Additional changes to the logits of each row."""
    num_alternatives: int = struct.field(pytree_node=False, default=0)
    """The number of the most probable tokens whose log-probabilities are computed."""


@struct.dataclass
class Adjustments:
    """Penalties and biases of the logits, as OpenAI's API defines them."""

    bias: Float[Array, "R V"]
    """Added to the logits of each row."""
    presence: Float[Array, "R 1"]
    """Subtracted from the logits of tokens that were chosen before."""
    frequency: Float[Array, "R 1"]
    """Subtracted from the logits of tokens for each time that they were chosen."""

    def __call__(
        self, logits: Float[Array, "R V"], counts: Int[Array, "R V"]
    ) -> Float[Array, "R V"]:
        """Returns the changed logits, given how often each token was chosen."""
        return logits + self.bias - self.frequency * counts - self.presence * (counts > 0)


def sampling_params(
    sampling: Sampling,
    vocab_size: int,
    *,
    banned: Sequence[Sequence[int]] = (),
    greedy: bool = False,
    scored: bool = True,
) -> SamplingParams:
    """Converts the settings `sampling` to traced arrays.

    Args:
      sampling: the settings.
      vocab_size: the size of the vocabulary.
      banned: sequences of tokens that are never generated.
      greedy: whether to choose the best token for any temperature.
      scored: whether the log-probabilities of the chosen tokens are computed.

    Raises:
      UserError: a banned sequence is not within the vocabulary, or all tokens are banned.
    """
    # The default filters keep all tokens.
    top_k = vocab_size if sampling.top_k is None else min(sampling.top_k, vocab_size)
    top_p = 1.0 if sampling.top_p is None else sampling.top_p
    min_p = sampling.min_p or 0.0
    greedy = greedy or sampling.temperature < SMALLEST_TEMPERATURE
    return SamplingParams(
        temperature=jnp.float32(1.0 if greedy else sampling.temperature),
        top_k=jnp.int32(top_k),
        top_p=jnp.float32(top_p),
        min_p=jnp.float32(min_p),
        repetition_penalty=jnp.float32(sampling.repetition_penalty),
        banned=banned_sequences(banned, vocab_size),
        greedy=greedy,
        filtered=not greedy and (top_k < vocab_size or top_p < 1 or min_p > 0),
        penalized=sampling.repetition_penalty != 1,
        scored=scored,
    )


def penalize_repetition(
    logits: Float[Array, "B V"], seen: Bool[Array, "B V"], penalty: Float[Array, "*rows"]
) -> Float[Array, "B V"]:
    """Makes tokens that have already occurred less likely (Keskar et al. 2019, section 4.1)."""
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def filter_tokens(
    logits: Float[Array, "B V"],
    top_k: Int[Array, "*rows"],
    top_p: Float[Array, "*rows"],
    min_p: Float[Array, "*rows"] | float = 0.0,
) -> Float[Array, "B V"]:
    """Hides the tokens that the filters exclude: first `top_k`, then `top_p`, then `min_p`."""
    order = jnp.argsort(logits, axis=-1, descending=True)
    ordered = jnp.take_along_axis(logits, order, axis=-1)  # [B, V], the best first
    ordered = jnp.where(jnp.arange(ordered.shape[-1]) < top_k, ordered, HIDDEN)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    # The total probability of better tokens. The token that crosses p belongs to the nucleus.
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # With p = 1, keep all tokens, even if the sum is rounded.
    nucleus = (before < top_p) | (jnp.asarray(top_p) >= 1)
    kept = nucleus & (probabilities >= min_p * probabilities[..., :1])
    ordered = jnp.where(kept, ordered, HIDDEN)
    return jnp.put_along_axis(logits, order, ordered, axis=-1, inplace=False)


@struct.dataclass
class History:
    """The arrays that, together with the logits, determine the next tokens of R rows."""

    seen: Bool[Array, "R V"] | None
    """Whether each token has occurred in each row, for the repetition penalty."""
    recent: Int[Array, "R P"]
    """The last P tokens of each row, for banned sequences."""
    keys: Key[Array, " R"]
    count: Int[Array, " R"]
    """The number of chosen tokens of each row."""
    chosen: Int[Array, "R V"] | None = None
    """How often each token was chosen, for `Adjustments`."""

    def after(self, new: Int[Array, "R N"], number: Int[Array, " R"] | int = 1) -> "History":
        """Returns the history after the first `number` of the new tokens of each row."""
        number = jnp.broadcast_to(jnp.asarray(number), new.shape[:1])
        seen, chosen = self.seen, self.chosen
        rows, counts = jnp.arange(new.shape[0])[:, None], jnp.arange(new.shape[1]) < number[:, None]
        if seen is not None:
            seen = seen.at[rows, new].max(counts)
        if chosen is not None:
            chosen = chosen.at[rows, new].add(counts.astype(jnp.int32))
        # Append the accepted new tokens to the recent tokens, and keep the last P tokens.
        both = jnp.concatenate([self.recent, new], axis=1)
        last = number[:, None] + jnp.arange(self.recent.shape[1])
        return dataclasses.replace(
            self,
            seen=seen,
            recent=jnp.take_along_axis(both, last, axis=1),
            count=self.count + number,
            chosen=chosen,
        )

    def next_keys(self) -> Key[Array, " R"]:
        """Returns the key of each row's next token, which depends only on its index."""
        return jax.vmap(jax.random.fold_in)(self.keys, self.count)


def history_of(
    contexts: Sequence[Sequence[int]],
    used: Sequence[Collection[int]],
    keys: Key[Array, " R"],
    count: Sequence[int],
    *,
    sampling: SamplingParams,
    vocab_size: int,
) -> History:
    """Returns the history of rows with the given contexts.

    Args:
      contexts: the tokens of each row.
      used: all tokens that have occurred in each row, including tokens that were dropped from its
        context.
      keys: the keys of the rows.
      count: the number of chosen tokens of each row.
      sampling: determines which fields of the history are needed.
      vocab_size: the size of the vocabulary.
    """
    seen = None
    if sampling.penalized:
        seen = np.zeros((len(contexts), vocab_size), bool)
        for row, tokens in enumerate(used):
            seen[row, list(tokens)] = True
        seen = jnp.asarray(seen)
    recent = jnp.asarray(last_tokens(contexts, sampling.banned.prefix_length))
    return History(seen, recent, keys, jnp.asarray(count, jnp.int32))


def processed_logits(
    logits: Float[Array, "B V"], past: History, *, sampling: SamplingParams
) -> Float[Array, "B V"]:
    """Returns the logits that determine the next token of each row."""
    # Apply bans and penalties first: greedy search needs them, but no temperature and no filters.
    logits = hide_banned(logits.astype(jnp.float32), past.recent, sampling.banned)
    if sampling.adjustments is not None and past.chosen is not None:
        logits = sampling.adjustments(logits, past.chosen)
    if past.seen is not None:
        logits = penalize_repetition(logits, past.seen, sampling.repetition_penalty)
    if sampling.greedy:
        return logits
    logits = logits / sampling.temperature
    if sampling.filtered:
        logits = filter_tokens(logits, sampling.top_k, sampling.top_p, sampling.min_p)
    return logits


def best_token(logits: Float[Array, "B V"]) -> Int[Array, " B"]:
    """Returns the first token with the maximal logit, like argmax, or V if a logit is NaN.

    On a CPU, argmax takes three times as long, because it compares pairs of a logit and a token.
    """
    vocabulary = logits.shape[-1]
    best = logits == jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(best, jnp.arange(vocabulary), vocabulary), axis=-1)


def choose(
    logits: Float[Array, "R V"], past: History, *, sampling: SamplingParams
) -> tuple[Int[Array, " R"], Float[Array, " R"] | None, History]:
    """Chooses the next token of each row.

    Returns:
      The tokens, their log-probabilities under the unmodified logits (None if not
      `sampling.scored`), and the new history.
    """
    processed = processed_logits(logits, past, sampling=sampling)
    if sampling.greedy:
        tokens = best_token(processed)
    else:
        tokens = jax.vmap(jax.random.categorical)(past.next_keys(), processed)
    # Greedy rows ignore the sampled token, so that greedy and sampled rows share a program.
    if sampling.takes_best is not None:
        tokens = jnp.where(sampling.takes_best[:, 0], best_token(processed), tokens)
    tokens = checked(tokens, logits).astype(jnp.int32)
    log_probs = log_probabilities(logits, tokens) if sampling.scored else None
    return tokens, log_probs, past.after(tokens[:, None])


def most_probable(
    logits: Float[Array, "*rows V"], number: int
) -> tuple[Int[Array, "*rows {number}"], Float[Array, "*rows {number}"]]:
    """Returns the most probable tokens under the unmodified logits, best first.

    Returns:
      The tokens and their log-probabilities.
    """
    every = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    log_probs, tokens = jax.lax.top_k(every, number)
    return tokens, log_probs


def checked(tokens: Int[Array, "*rows"], logits: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """Returns the tokens, with `NO_TOKEN` where the logits are NaN or infinite."""
    # Tokens chosen from NaN or infinite logits would be meaningless. Some logits may be -inf, so
    # check only the maximum.
    return jnp.where(jnp.isfinite(jnp.max(logits, axis=-1)), tokens, NO_TOKEN)


def log_probabilities(
    logits: Float[Array, "*rows V"], tokens: Int[Array, "*rows"]
) -> Float[Array, "*rows"]:
    """Returns the log-probability of each token under the unmodified logits."""
    every = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return jnp.take_along_axis(every, tokens[..., None], axis=-1)[..., 0]

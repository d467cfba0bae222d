"""Sampling of the next token: greedy, temperature, top-k, top-p, repetition penalty.

Everything is compiled once for each number of rows, length of prompts and length of the cache.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ...data.common.errors import UserError
from ..model import Model
from ..nn.attention import HIDDEN
from ..nn.cache import Cache, grow_cache, init_cache
from ..nn.dropout import fold_in
from ..nn.heads import CausalLMOutput
from ..nn.masks import AnyArray
from ..nn.typing import Array, Bool, Float, Int, Key, Params
from .banned_sequences import BannedSequences, append_recent, banned_sequences, hide_banned
from .beam_adapters import last_logits
from .request import Sampling

SMALLEST_TEMPERATURE = 1e-6
"""Below it the best token is taken: float32 has no space for smaller divisors."""

NO_TOKEN = -1
"""Stands where the logits are NaN or infinite."""


def require_tokens(tokens: Int[AnyArray, "..."] | list[int]) -> np.ndarray:
    """Returns chosen tokens as an array of numpy.

    Raises:
      UserError: one is `NO_TOKEN`.
    """
    chosen = np.asarray(tokens)
    if (chosen == NO_TOKEN).any():
        raise UserError(
            "the model's logits are NaN or infinite: its parameters are too large; give another "
            "--step or another model"
        )
    return chosen


@struct.dataclass
class SamplingParams:
    """`Sampling` as the compiled step takes it: another value compiles nothing anew."""

    temperature: Float[Array, ""]
    top_k: Int[Array, ""]
    top_p: Float[Array, ""]
    repetition_penalty: Float[Array, ""]
    banned: BannedSequences
    greedy: bool = struct.field(pytree_node=False)
    filtered: bool = struct.field(pytree_node=False)
    penalized: bool = struct.field(pytree_node=False)


def sampling_params(
    sampling: Sampling, banned: tuple[tuple[int, ...], ...], vocab_size: int
) -> SamplingParams:
    """Makes the arrays of a `Sampling` and of banned sequences.

    Raises:
      UserError: a banned sequence is not within the vocabulary, or no token is left.
    """
    top_k = vocab_size if sampling.top_k is None else min(sampling.top_k, vocab_size)
    top_p = 1.0 if sampling.top_p is None else sampling.top_p
    greedy = sampling.temperature < SMALLEST_TEMPERATURE
    return SamplingParams(
        temperature=jnp.float32(1.0 if greedy else sampling.temperature),
        top_k=jnp.int32(top_k),
        top_p=jnp.float32(top_p),
        repetition_penalty=jnp.float32(sampling.repetition_penalty),
        banned=banned_sequences(banned, vocab_size),
        greedy=greedy,
        filtered=not greedy and (top_k < vocab_size or top_p < 1),
        penalized=sampling.repetition_penalty != 1,
    )


def penalize_repetition(
    logits: Float[Array, "B V"], seen: Bool[Array, "B V"], penalty: Float[Array, ""]
) -> Float[Array, "B V"]:
    """Makes tokens that were seen less likely (Keskar et al. 2019, section 4.1)."""
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def filter_top_k_top_p(
    logits: Float[Array, "B V"], top_k: Int[Array, ""], top_p: Float[Array, ""]
) -> Float[Array, "B V"]:
    """Hides all but the `top_k` best tokens, and of these all but the `top_p` nucleus."""
    order = jnp.argsort(logits, axis=-1, descending=True)
    ordered = jnp.take_along_axis(logits, order, axis=-1)  # [B, V], the best first
    ordered = jnp.where(jnp.arange(ordered.shape[-1]) < top_k, ordered, HIDDEN)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    # The probability of all better tokens: the one that passes p still belongs to the nucleus.
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    ordered = jnp.where(before < top_p, ordered, HIDDEN)
    return jnp.put_along_axis(logits, order, ordered, axis=-1, inplace=False)


def processed_logits(
    logits: Float[Array, "B V"],
    seen: Bool[Array, "B V"] | None,
    recent: Int[Array, "B P"],
    *,
    sampling: SamplingParams,
) -> Float[Array, "B V"]:
    """Returns the logits that the next token of each row is chosen by."""
    logits = hide_banned(logits, recent, sampling.banned)
    if seen is not None:
        logits = penalize_repetition(logits, seen, sampling.repetition_penalty)
    if sampling.greedy:
        return logits
    logits = logits / sampling.temperature
    if sampling.filtered:
        logits = filter_top_k_top_p(logits, sampling.top_k, sampling.top_p)
    return logits


def best_token(logits: Float[Array, "B V"]) -> Int[Array, " B"]:
    """Returns the first of the tokens with the greatest logit, as argmax does; V if one is NaN.

    On CPU argmax takes three times as long, for it compares pairs of a logit and a token.
    """
    vocabulary = logits.shape[-1]
    best = logits == jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(best, jnp.arange(vocabulary), vocabulary), axis=-1)


def sample_token(
    logits: Float[Array, "B V"],
    seen: Bool[Array, "B V"] | None,
    recent: Int[Array, "B P"],
    keys: Key[Array, " B"],
    *,
    sampling: SamplingParams,
) -> Int[Array, " B"]:
    """Chooses the next token of each row."""
    logits = processed_logits(logits, seen, recent, sampling=sampling)
    if sampling.greedy:
        return best_token(logits)
    return jax.vmap(jax.random.categorical)(keys, logits)


@struct.dataclass
class DecodeState:
    """The state that the compiled step carries from token to token."""

    cache: Cache
    attention_mask: Int[Array, "B S"]
    tokens: Int[Array, " B"]
    """The newest token of each row, not yet in the cache; `NO_TOKEN` if its logits are NaN."""
    seen: Bool[Array, "B V"] | None
    """The tokens that each row has, for the repetition penalty."""
    recent: Int[Array, "B P"]
    """The last tokens of each row, `tokens` included, for banned sequences."""
    keys: Key[Array, " B"]
    count: Int[Array, ""]
    """The number of tokens that were chosen for each row."""
    log_probs: Float[Array, " B"] | None = None
    """The log-probability of each of `tokens`, in nats; None: not computed."""


# Module-level, so that all `Generator`s share the compilation cache.
@functools.partial(jax.jit, static_argnames=("model", "cache_length", "with_log_probs"))
def prefill(
    model: Model,
    params: Params,
    ids: Int[Array, "B T"],
    mask: Int[Array, "B T"],
    *,
    seen: Bool[Array, "B V"] | None,
    recent: Int[Array, "B P"],
    keys: Key[Array, " B"],
    count: Int[Array, ""],
    sampling: SamplingParams,
    cache_length: int,
    with_log_probs: bool = False,
) -> DecodeState:
    """Reads contexts, padded on the left, and chooses the token that follows each."""
    rows, length = ids.shape
    mask = jnp.pad(mask, ((0, 0), (0, cache_length - length)), constant_values=1)
    cache = init_cache(model.config, model.execution, rows, cache_length)
    output = model.apply({"params": params}, ids, mask, cache=cache)
    empty = jnp.zeros((rows,), jnp.int32)
    log_probs = jnp.zeros((rows,), jnp.float32) if with_log_probs else None
    state = DecodeState(output.cache, mask, empty, seen, recent, keys, jnp.int32(count), log_probs)
    return _with_next_token(state, output, sampling)


@functools.partial(jax.jit, static_argnames=("model", "cache_length"))
def enlarge(model: Model, state: DecodeState, cache_length: int) -> DecodeState:
    """Returns the state with more slots in the cache, for tokens that are still to come."""
    cache = grow_cache(state.cache, model.config, model.execution, cache_length)
    more = ((0, 0), (0, cache_length - state.attention_mask.shape[1]))
    mask = jnp.pad(state.attention_mask, more, constant_values=1)
    return dataclasses.replace(state, cache=cache, attention_mask=mask)


@functools.partial(jax.jit, static_argnames=("model", "num_tokens"), donate_argnames="state")
def advance(
    model: Model,
    params: Params,
    state: DecodeState,
    *,
    sampling: SamplingParams,
    num_tokens: int,
) -> tuple[DecodeState, Int[Array, "B {num_tokens}"], Float[Array, "B {num_tokens}"] | None]:
    """Chooses the next `num_tokens` tokens of each row; returns their log-probabilities, too."""

    def step(state: DecodeState, _: None = None) -> tuple[DecodeState, tuple[Array, Array | None]]:
        output = model.apply(
            {"params": params}, state.tokens[:, None], state.attention_mask, cache=state.cache
        )
        state = dataclasses.replace(state, cache=output.cache)
        state = _with_next_token(state, output, sampling)
        return state, (state.tokens, state.log_probs)

    if num_tokens == 1:
        state, (tokens, log_probs) = step(state)
        return state, tokens[:, None], None if log_probs is None else log_probs[:, None]
    state, (tokens, log_probs) = jax.lax.scan(step, state, length=num_tokens)  # [num_tokens, B]
    return state, tokens.T, None if log_probs is None else log_probs.T


def _with_next_token(
    state: DecodeState, output: CausalLMOutput, sampling: SamplingParams
) -> DecodeState:
    """Chooses each row's next token from the logits of its last position."""
    keys = fold_in(state.keys, state.count)
    logits = last_logits(output)[:, 0]  # [B, V]
    tokens = sample_token(logits, state.seen, state.recent, keys, sampling=sampling)
    # A token from NaN or infinity would mean nothing. Of many logits, -inf may be one.
    tokens = jnp.where(jnp.isfinite(jnp.max(logits, axis=-1)), tokens, NO_TOKEN)
    log_probs = state.log_probs
    if log_probs is not None:
        every = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)  # [B, V]
        log_probs = jnp.take_along_axis(every, tokens[:, None], axis=-1)[:, 0]
    seen = state.seen
    if seen is not None:
        seen = seen.at[jnp.arange(tokens.shape[0]), tokens].set(True)
    recent = append_recent(state.recent, tokens)
    return dataclasses.replace(
        state,
        tokens=tokens,
        seen=seen,
        recent=recent,
        count=state.count + 1,
        log_probs=log_probs,
    )

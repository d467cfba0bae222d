"""Rows that are continued independently: each has a cache, a position and an end of its own.

`sample` continues a batch in step: all rows share the next slot of one cache. Here the compiled
functions map over caches of one sequence each, so that a row may advance by more tokens than its
neighbor (speculative decoding), or be replaced while the others go on (continuous batching). The
model itself knows nothing of it, whatever its layers keep in their caches.
"""

import dataclasses
import functools
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import struct

from ..config import TransformerConfig
from ..model import Model
from ..nn.cache import Cache, init_cache
from ..nn.typing import Array, Bool, Float, Int, Key, Params
from .banned_sequences import append_recent
from .sample import NO_TOKEN, SamplingParams, sample_token


@struct.dataclass
class RowCaches:
    """The tokens of R rows that a model has read."""

    cache: Cache
    """The caches of one sequence each, stacked: every array has a leading R, `index` too."""
    padding: Int[Array, " R"]
    """The number of slots before the context of each row."""


@struct.dataclass
class RowStates:
    """The state that the compiled steps carry from token to token."""

    context: RowCaches
    tokens: Int[Array, " R"]
    """The newest token of each row, not yet in the cache."""
    seen: Bool[Array, "R V"] | None
    """The tokens that each row has, for the repetition penalty."""
    recent: Int[Array, "R P"]
    """The last tokens of each row, `tokens` included, for banned sequences."""
    keys: Key[Array, " R"]
    count: Int[Array, " R"]
    """The number of tokens that were chosen for each row."""
    draft: RowCaches | None = None
    """The tokens that a draft model has read: all before `before`."""
    before: Int[Array, " R"] | None = None
    """The token before the newest one, which the draft model reads once more."""


RowTree = TypeVar("RowTree", RowCaches, RowStates)


@struct.dataclass
class NewTokens:
    """The tokens that one call chose for R rows, up to N for each."""

    tokens: Int[Array, "R N"]
    """The tokens; `NO_TOKEN` where the logits are NaN or infinite."""
    log_probs: Float[Array, "R N"]
    """The logarithm of each token's probability by the model alone, in nats."""
    lengths: Int[Array, " R"]
    """The number of tokens of each row; those behind are meaningless."""


def refusal_of_rows(config: TransformerConfig) -> str | None:
    """Returns which model it is, if it cannot continue rows by different numbers of tokens."""
    if config.num_experts:  # XLA's products of ragged groups cannot be mapped over rows
        return f"a mixture of {config.num_experts} experts"
    if config.reread_length is not None:
        return f"one that reads its text anew beyond {config.reread_length} tokens"
    return None


def empty_caches(model: Model, num_rows: int, length: int, spare: int) -> RowCaches:
    """Returns the caches of R rows that have read nothing.

    Args:
      model: the model.
      num_rows: R.
      length: the number of slots of each row.
      spare: the number of tokens that may be taken back.
    """
    cache = init_cache(model.config, model.execution, 1, length, spare=spare)
    repeated = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_rows, *x.shape)), cache)
    return RowCaches(repeated, jnp.zeros((num_rows,), jnp.int32))


def apply_to_rows(
    model: Model,
    params: Params,
    ids: Int[Array, "R T"],
    rows: RowCaches,
    *,
    num_logits: int = 1,
) -> tuple[Float[Array, "R {num_logits} V"], RowCaches]:
    """Runs a model on the next T tokens of each row; returns the logits of the last ones.

    A token beyond the model's last position is hidden and has that position, so that nothing is
    NaN; its own logits mean nothing.
    """

    def one(
        ids: Int[Array, " T"], padding: Int[Array, ""], cache: Cache
    ) -> tuple[Float[Array, "n V"], Cache]:
        slot = jnp.arange(cache.length)
        visible = (slot >= padding) & (slot < padding + model.config.max_length)
        mask = visible[None].astype(jnp.int32)
        output = model.apply({"params": params}, ids[None], mask, cache=cache)
        projection = output.projection
        last = dataclasses.replace(projection, hidden=projection.hidden[:, -num_logits:])
        return last.logits()[0], output.cache

    inputs = ids, rows.padding, rows.cache
    if ids.shape[0] > 1:
        logits, cache = jax.vmap(one)(*inputs)
    else:  # mapped over one row, a write is a scatter, for which XLA copies the caches on CPU
        alone = one(*jax.tree.map(lambda x: x[0], inputs))
        logits, cache = jax.tree.map(lambda x: x[None], alone)
    return logits, RowCaches(cache, rows.padding)


def move_to(rows: RowCaches, index: Int[Array, " R"]) -> RowCaches:
    """Sets the next slot of each row: what stands in it and behind it is taken back."""
    return dataclasses.replace(rows, cache=dataclasses.replace(rows.cache, index=index))


def of_live_rows(rows: RowCaches, live: Bool[Array, " R"]) -> RowCaches:
    """Moves rows that nobody waits for to slot 0, so that they never pass the last slot."""
    return move_to(rows, jnp.where(live, rows.cache.index, 0))


# Module-level functions, so that all generators share the compilation cache.
@functools.partial(jax.jit, static_argnames=("model", "spare"))
def read_context(
    model: Model,
    params: Params,
    ids: Int[Array, "1 T"],
    padding: Int[Array, "1"],
    *,
    spare: int,
) -> tuple[Float[Array, "1 V"], RowCaches]:
    """Reads a context, padded on the left, into T slots; returns the logits after its last token.

    `enter_row` copies what was read to where there is space for more.
    """
    rows = dataclasses.replace(empty_caches(model, 1, ids.shape[1], spare), padding=padding)
    logits, rows = apply_to_rows(model, params, ids, rows)
    return logits[:, 0], rows


@functools.partial(jax.jit, donate_argnames="rows")
def enter_row(rows: RowTree, number: Int[Array, ""], one: RowTree) -> RowTree:
    """Replaces one of R rows; each array of `one` has a leading 1 instead of R.

    A slot has the same number in caches of any length, also where a layer keeps a window in a ring:
    as long as that is not full, its slots are the first ones of a longer ring.
    """
    return _overwrite(rows, one, number)


@functools.partial(jax.jit, static_argnames=("model", "length"))
def lengthen(model: Model, rows: RowCaches, *, length: int) -> RowCaches:
    """Copies rows to caches of more slots."""
    spare = rows.cache.spare
    return _overwrite(empty_caches(model, rows.padding.shape[0], length, spare), rows, 0)


def _overwrite(rows: RowTree, new: RowTree, first: Int[Array, ""] | int) -> RowTree:
    """Replaces rows from the row `first` on, and in each array the first slots."""

    def write(old: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice(old, new, (first, *(0,) * (new.ndim - 1)))

    # The caches differ in length, and so in structure.
    leaves = map(write, jax.tree.leaves(rows), jax.tree.leaves(new))
    return jax.tree.unflatten(jax.tree.structure(rows), leaves)


@jax.jit
def choose_first(
    logits: Float[Array, "1 V"],
    seen: Bool[Array, "1 V"] | None,
    recent: Int[Array, "1 P"],
    *,
    keys: Key[Array, "1"],
    count: Int[Array, "1"],
    sampling: SamplingParams,
) -> tuple[NewTokens, Bool[Array, "1 V"] | None, Int[Array, "1 P"]]:
    """Chooses the token after a context; returns it, the tokens seen, and the last ones."""
    tokens, log_probs = choose(logits, seen, recent, fold_in_rows(keys, count), sampling=sampling)
    new = NewTokens(tokens[:, None], log_probs[:, None], jnp.ones_like(tokens))
    seen = None if seen is None else seen.at[0, tokens[0]].set(True)
    return new, seen, append_recent(recent, tokens)


@functools.partial(jax.jit, static_argnames=("model", "num_tokens"), donate_argnames="state")
def advance_rows(
    model: Model,
    params: Params,
    state: RowStates,
    live: Bool[Array, " R"],
    *,
    sampling: SamplingParams,
    num_tokens: int,
) -> tuple[RowStates, NewTokens]:
    """Chooses the next `num_tokens` tokens of each row; those of rows that do not live are void."""
    context = of_live_rows(state.context, live)
    state = dataclasses.replace(state, context=context)

    def step(state: RowStates, _: None = None) -> tuple[RowStates, tuple[Array, Array]]:
        ids = jnp.where(live, state.tokens, 0)[:, None]
        logits, context = apply_to_rows(model, params, ids, state.context)
        keys = fold_in_rows(state.keys, state.count)
        tokens, log_probs = choose(logits[:, 0], state.seen, state.recent, keys, sampling=sampling)
        seen = state.seen
        if seen is not None:
            seen = seen.at[jnp.arange(tokens.shape[0]), tokens].set(True)
        state = dataclasses.replace(
            state,
            context=context,
            tokens=tokens,
            seen=seen,
            recent=append_recent(state.recent, tokens),
            count=state.count + 1,
        )
        return state, (tokens, log_probs)

    if num_tokens == 1:  # a loop of one step is slower than the step
        state, (tokens, log_probs) = step(state)
        tokens, log_probs = tokens[None], log_probs[None]
    else:
        state, (tokens, log_probs) = jax.lax.scan(step, state, length=num_tokens)
    lengths = jnp.full_like(state.count, num_tokens)
    return state, NewTokens(tokens.T, log_probs.T, lengths)


def choose(
    logits: Float[Array, "R V"],
    seen: Bool[Array, "R V"] | None,
    recent: Int[Array, "R P"],
    keys: Key[Array, " R"],
    *,
    sampling: SamplingParams,
) -> tuple[Int[Array, " R"], Float[Array, " R"]]:
    """Chooses the next token of each row; returns its log-probability by the model alone, too."""
    tokens = sample_token(logits, seen, recent, keys, sampling=sampling)
    tokens = checked(tokens, logits)
    return tokens, log_probabilities(logits, tokens)


def checked(tokens: Int[Array, "*rows"], logits: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """Returns the tokens, and `NO_TOKEN` where the logits are NaN or infinite."""
    # A token from NaN or infinity would mean nothing. Of many logits, -inf may be one.
    return jnp.where(jnp.isfinite(jnp.max(logits, axis=-1)), tokens, NO_TOKEN)


def log_probabilities(
    logits: Float[Array, "*rows V"], tokens: Int[Array, "*rows"]
) -> Float[Array, "*rows"]:
    """Returns the logarithm of each token's probability, before anything changes the logits."""
    every = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return jnp.take_along_axis(every, tokens[..., None], axis=-1)[..., 0]


def fold_in_rows(keys: Key[Array, " R"], count: Int[Array, " R"]) -> Key[Array, " R"]:
    """Derives the key of each row's next token from the number of its tokens."""
    return jax.vmap(jax.random.fold_in)(keys, count)

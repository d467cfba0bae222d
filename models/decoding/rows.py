"""The caches of R rows (growing texts), and the compiled steps that extend them.

Rows either share the next slot of one cache (`SharedCache`), which is fastest, or have separate
positions (`RowCaches`). With separate positions, a row may advance faster than others (speculative
decoding) or begin later (continuous batching).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import struct

from ..heads.outputs import CausalLMOutput
from ..model import Model
from ..nn.cache import Cache, grow_cache, init_cache
from ..nn.masks import AnyArray
from ..nn.typing import Array, Bool, Float, Int, Params
from .sample import History, SamplingParams, choose, most_probable


def last_logits(output: CausalLMOutput, number: int = 1) -> Float[Array, "B {number} V"]:
    """Returns only the logits of the last `number` positions of each row."""
    projection = output.projection
    return dataclasses.replace(projection, hidden=projection.hidden[:, -number:]).logits()


@struct.dataclass
class SharedCache:
    """The cached tokens of R rows in lockstep: each call writes to the same slots in all rows."""

    cache: Cache
    mask: Int[Array, "R S"]
    """0 for the padding slots before the context of each row, 1 for all other slots."""

    @classmethod
    def empty(
        cls, model: Model, padding: Int[Array, " R"], length: int, spare: int = 0
    ) -> "SharedCache":
        """Returns an empty cache; see `RowCaches.empty`."""
        rows = padding.shape[0]
        cache = init_cache(model.config, model.execution, rows, length, spare=spare)
        return cls(cache, (jnp.arange(length) >= padding[:, None]).astype(jnp.int32))

    def read(
        self,
        model: Model,
        params: Params,
        ids: Int[Array, "R T"],
        *,
        apply_fn: Callable[..., Any] | None = None,
    ) -> tuple[Float[Array, "R 1 V"], "SharedCache"]:
        """Runs a model on the next T tokens of each row; returns the last logits.

        Args:
          model: the model.
          params: its parameters.
          ids: the tokens.
          apply_fn: the function to call instead of `model.apply` if the model runs on a mesh.
        """
        output = (apply_fn or model.apply)({"params": params}, ids, self.mask, cache=self.cache)
        return last_logits(output), dataclasses.replace(self, cache=output.cache)

    def lengthened(self, model: Model, length: int) -> "SharedCache":
        """Copies the tokens to a cache with more slots."""
        cache = grow_cache(self.cache, model.config, model.execution, length)
        # The new slots may be visible, because a token is written to each slot before it is read.
        more = ((0, 0), (0, length - self.cache.length))
        mask = jnp.pad(self.mask, more, constant_values=1)
        return dataclasses.replace(self, cache=cache, mask=mask)

    def only_live(self, live: Bool[AnyArray, " R"]) -> "SharedCache":
        """Returns the cache unchanged, because idle rows advance with the other rows."""
        del live
        return self


@struct.dataclass
class RowCaches:
    """The cached tokens of R rows, each with a separate next position.

    The compiled functions are vmapped over caches that contain one sequence each, so models do not
    need to support separate positions.
    """

    cache: Cache
    """A stack of R caches that contain one sequence each. Every array, including `index`, has a
    leading axis R.
    """
    padding: Int[Array, " R"]
    """The number of slots before the context of each row."""

    @classmethod
    def empty(
        cls, model: Model, padding: Int[Array, " R"], length: int, spare: int = 0
    ) -> "RowCaches":
        """Returns empty caches.

        Args:
          model: the model.
          padding: the number of slots before the context of each row.
          length: the number of slots of each row.
          spare: the number of newest tokens that can be removed again (`Cache.spare`).
        """
        cache = init_cache(model.config, model.execution, 1, length, spare=spare)
        # Add a leading axis R to every array of a cache for one sequence.
        repeated = jax.tree.map(lambda x: jnp.broadcast_to(x, (*padding.shape, *x.shape)), cache)
        return cls(repeated, padding)

    def read(
        self, model: Model, params: Params, ids: Int[Array, "R T"], num_logits: int = 1
    ) -> tuple[Float[Array, "R {num_logits} V"], "RowCaches"]:
        """Runs a model on the next T tokens of each row; returns the last logits.

        To avoid NaN, a token beyond the model's last position is masked and gets the index of the
        last position. The logits of such a token are meaningless.
        """

        def one(
            ids: Int[Array, " T"], padding: Int[Array, ""], cache: Cache
        ) -> tuple[Float[Array, "n V"], Cache]:
            # [slots]: hide the padding on the left and the slots beyond the last position.
            slot = jnp.arange(cache.length)
            visible = (slot >= padding) & (slot < padding + model.config.max_length)
            mask = visible[None].astype(jnp.int32)
            output = model.apply({"params": params}, ids[None], mask, cache=cache)
            return last_logits(output, num_logits)[0], output.cache

        inputs = ids, self.padding, self.cache
        if ids.shape[0] > 1 and model.config.num_experts:
            # JAX cannot vmap `ragged_dot`, so process one row at a time.
            logits, cache = jax.lax.map(lambda row: one(*row), inputs)
        elif ids.shape[0] > 1:
            logits, cache = jax.vmap(one)(*inputs)
        else:
            # With vmap over one row, a write becomes a scatter, and XLA copies the caches on a CPU.
            alone = one(*jax.tree.map(lambda x: x[0], inputs))
            logits, cache = jax.tree.map(lambda x: x[None], alone)
        return logits, dataclasses.replace(self, cache=cache)

    def lengthened(self, model: Model, length: int) -> "RowCaches":
        """Copies the tokens to caches with more slots."""
        return _overwrite(self.empty(model, self.padding, length, self.cache.spare), self, 0)

    def only_live(self, live: Bool[AnyArray, " R"]) -> "RowCaches":
        """Resets idle rows to slot 0, so that they never exceed the last slot."""
        return self.moved_to(jnp.where(live, self.cache.index, 0))

    def moved_to(self, index: Int[Array, " R"]) -> "RowCaches":
        """Sets the next slot of each row. Tokens from this slot on are removed."""
        return dataclasses.replace(self, cache=dataclasses.replace(self.cache, index=index))


Context = SharedCache | RowCaches
SomeContext = TypeVar("SomeContext", bound=SharedCache | RowCaches)
RowTree = TypeVar("RowTree")


@struct.dataclass
class RowStates:
    """The state that the compiled steps carry from token to token."""

    context: Context
    tokens: Int[Array, " R"]
    """The newest token of each row, which is not in the cache yet."""
    past: History


@struct.dataclass
class NewTokens:
    """The tokens that one call chose for R rows, at most N tokens for each row."""

    tokens: Int[Array, "R N"]
    """The tokens, or `NO_TOKEN` if the logits are NaN or infinite."""
    log_probs: Float[Array, "R N"] | None
    """The log-probability of each token under the unmodified logits, in nats, if computed."""
    lengths: Int[Array, " R"]
    """The number of tokens of each row. Later entries are meaningless."""
    alternatives: tuple[Int[Array, "R N K"], Float[Array, "R N K"]] | None = None
    """The most probable tokens at each position and their log-probabilities, if computed."""


# Module-level functions, so that all generators share the compilation cache.
@functools.partial(jax.jit, static_argnames=("kind", "model", "length", "spare"))
def read_contexts(
    model: Model,
    params: Params,
    ids: Int[Array, "R T"],
    padding: Int[Array, " R"],
    *,
    kind: type[SomeContext],
    length: int,
    spare: int,
) -> tuple[Float[Array, "R V"], SomeContext]:
    """Reads contexts that are padded on the left; returns the logits after their last tokens.

    Args:
      model: the model.
      params: its parameters.
      ids: the tokens of the contexts.
      padding: the number of padding tokens before each context.
      kind: the class of the cache.
      length: the number of slots of each row.
      spare: the number of newest tokens that can be removed again (`Cache.spare`).
    """
    logits, rows = kind.empty(model, padding, length, spare).read(model, params, ids)
    return logits[:, 0], rows  # pyright: ignore[reportReturnType]


@functools.partial(jax.jit, static_argnames="model", donate_argnames="rows")
def read_more(
    model: Model, params: Params, ids: Int[Array, "R T"], rows: RowCaches
) -> tuple[Float[Array, "R V"], RowCaches]:
    """Reads more tokens into the caches; returns the logits after the last token of each row."""
    logits, rows = rows.read(model, params, ids)
    return logits[:, 0], rows


@functools.partial(jax.jit, static_argnames=("model", "length"))
def lengthen(model: Model, rows: SomeContext, *, length: int) -> SomeContext:
    """Copies rows to caches with more slots."""
    return rows.lengthened(model, length)  # pyright: ignore[reportReturnType]


@functools.partial(jax.jit, donate_argnames="rows")
def enter_rows(rows: RowTree, first: Int[Array, ""], new: RowTree) -> RowTree:
    """Overwrites consecutive rows with the rows `new`, beginning at the row with index `first`.

    The new caches may be shorter, because the slot of a token does not depend on the cache length.
    This is also true of a ring buffer that is not full: its slots are the first slots of a longer
    ring buffer.
    """
    return _overwrite(rows, new, first)


def _overwrite(rows: RowTree, new: RowTree, first: Int[Array, ""] | int) -> RowTree:
    """Overwrites rows with `new`, from index `first` on. Slots that `new` lacks are unchanged."""

    def write(old: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice(old, new, (first, *(0,) * (new.ndim - 1)))

    # Caches of different lengths have different static fields, for which `jax.tree.map` fails.
    leaves = map(write, jax.tree.leaves(rows), jax.tree.leaves(new))
    return jax.tree.unflatten(jax.tree.structure(rows), leaves)


@jax.jit
def take_rows(rows: RowTree, indices: Int[Array, " N"]) -> RowTree:
    """Copies the rows with the given indices. An index may occur several times."""
    return jax.tree.map(lambda x: x[indices], rows)


@jax.jit
def choose_first(
    logits: Float[Array, "R V"], past: History, *, sampling: SamplingParams
) -> tuple[NewTokens, History]:
    """Chooses the next token of each context; returns the tokens and the new history."""
    chosen, past = _choose(logits, past, sampling=sampling)
    tokens, log_probs, alternatives = jax.tree.map(lambda x: x[:, None], chosen)
    lengths = jnp.ones_like(chosen[0])
    return NewTokens(tokens, log_probs, lengths, alternatives), past


_Chosen = tuple[Array, Array | None, tuple[Array, Array] | None]


def _choose(
    logits: Float[Array, "R V"], past: History, *, sampling: SamplingParams
) -> tuple[_Chosen, History]:
    """Returns the tokens, log-probabilities and alternatives of one position, and the history."""
    tokens, log_probs, past = choose(logits, past, sampling=sampling)
    number = sampling.num_alternatives
    return (tokens, log_probs, most_probable(logits, number) if number else None), past


@functools.partial(jax.jit, static_argnames=("model", "num_tokens"), donate_argnames="state")
def advance_rows(
    model: Model,
    params: Params,
    state: RowStates,
    live: Bool[AnyArray, " R"],
    *,
    sampling: SamplingParams,
    num_tokens: int,
) -> tuple[RowStates, NewTokens]:
    """Chooses the next `num_tokens` tokens of each row. Tokens of idle rows are meaningless."""
    # Reset idle rows before the loop, so that no row exceeds its last slot in the loop.
    state = dataclasses.replace(state, context=state.context.only_live(live))

    def step(state: RowStates, _: None = None) -> tuple[RowStates, _Chosen]:
        # [R, 1]: an idle row reads token 0, which every vocabulary has.
        ids = jnp.where(live, state.tokens, 0)[:, None]
        logits, context = state.context.read(model, params, ids)
        chosen, past = _choose(logits[:, 0], state.past, sampling=sampling)
        state = dataclasses.replace(state, context=context, tokens=chosen[0], past=past)
        return state, chosen

    # A loop of one step is slower than the step itself.
    if num_tokens == 1:
        state, chosen = step(state)
        tokens, log_probs, alternatives = jax.tree.map(lambda x: x[:, None], chosen)
    else:
        state, chosen = jax.lax.scan(step, state, length=num_tokens)  # [num_tokens, R, …] each
        tokens, log_probs, alternatives = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), chosen)
    lengths = jnp.full_like(state.tokens, num_tokens)
    return state, NewTokens(tokens, log_probs, lengths, alternatives)

"""Answers sampled by one compiled program, for reinforcement learning.

`Generator` streams text to a person, and calls a program for every token. Here the number of rows
and the longest answer are known beforehand, and nobody reads before all are written: the whole
decoding is one loop on the devices, inside any `jit` and over any mesh.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from ..model import Model
from ..nn.cache import Cache, init_cache
from ..nn.dropout import RowKeys, fold_in
from ..nn.typing import Array, Bool, Float, Int, Params
from .beam_adapters import last_logits
from .sample import SMALLEST_TEMPERATURE


@struct.dataclass
class Answers:
    """The sampled answers of R prompts, of at most N tokens."""

    tokens: Int[Array, "R N"]
    """The tokens; 0 after the end of an answer."""
    mask: Int[Array, "R N"]
    """1 for the tokens of an answer, its end token included."""
    log_probs: Float[Array, "R N"]
    """The log-probability of each token at the sampling temperature, in nats; 0 after the end."""


@struct.dataclass
class _Progress:
    """The state of the loop after `count` tokens."""

    count: Int[Array, ""]
    cache: Cache
    newest: Int[Array, " R"]
    ended: Bool[Array, " R"]
    answers: Answers


def sample_answers(
    model: Model,
    params: Params,
    prompt_ids: Int[Array, "R P"],
    prompt_mask: Int[Array, "R P"],
    *,
    keys: RowKeys,
    max_new_tokens: int,
    end_ids: Sequence[int],
    temperature: float = 1.0,
    apply_fn: Callable[..., Any] | None = None,
) -> Answers:
    """Samples an answer to each prompt, to be compiled by the caller.

    The loop stops when all answers have ended. The answer of a row depends on its prompt and its
    key alone.

    Args:
      model: a causal language model; fastest in the layout of `unstack_layers`.
      params: its parameters.
      prompt_ids: tokens of the prompts, padded on the left.
      prompt_mask: 1 for the tokens of a prompt.
      keys: a key for each row, as of `models.row_keys`.
      max_new_tokens: the longest answer, N.
      end_ids: the tokens that end an answer.
      temperature: the divisor of the logits; below 1e-6 the best token is taken.
      apply_fn: `model.apply`, or that for a mesh.
    """
    apply = model.apply if apply_fn is None else apply_fn
    rows, length = prompt_ids.shape
    greedy = temperature < SMALLEST_TEMPERATURE
    ends = jnp.asarray(end_ids, jnp.int32)
    mask = jnp.pad(prompt_mask, ((0, 0), (0, max_new_tokens)), constant_values=1)

    def choose(output: Any, state: _Progress) -> _Progress:
        """Adds the token that follows, of rows that have not ended."""
        logits = last_logits(output)[:, 0].astype(jnp.float32)  # [R, V]
        logits = logits if greedy else logits / temperature
        if greedy:
            tokens = jnp.argmax(logits, axis=-1)
        else:
            tokens = jax.vmap(jax.random.categorical)(fold_in(keys, state.count), logits)
        every = jax.nn.log_softmax(logits, axis=-1)
        log_probs = jnp.take_along_axis(every, tokens[:, None], axis=-1)[:, 0]
        writes = ~state.ended
        tokens = jnp.where(writes, tokens, 0).astype(jnp.int32)
        old = state.answers
        answers = Answers(
            tokens=old.tokens.at[:, state.count].set(tokens),
            mask=old.mask.at[:, state.count].set(writes.astype(jnp.int32)),
            log_probs=old.log_probs.at[:, state.count].set(jnp.where(writes, log_probs, 0.0)),
        )
        is_end = jnp.any(tokens[:, None] == ends, axis=-1)
        return _Progress(
            state.count + 1, output.cache, tokens, state.ended | (is_end & writes), answers
        )

    def body(state: _Progress) -> _Progress:
        output = apply({"params": params}, state.newest[:, None], mask, cache=state.cache)
        return choose(output, state)

    cache = init_cache(model.config, model.execution, rows, length + max_new_tokens)
    output = apply({"params": params}, prompt_ids, mask, cache=cache)
    empty = Answers(
        tokens=jnp.zeros((rows, max_new_tokens), jnp.int32),
        mask=jnp.zeros((rows, max_new_tokens), jnp.int32),
        log_probs=jnp.zeros((rows, max_new_tokens), jnp.float32),
    )
    nothing = jnp.zeros((rows,), jnp.int32)
    first = _Progress(jnp.int32(0), cache, nothing, nothing.astype(bool), empty)
    last = jax.lax.while_loop(
        lambda state: (state.count < max_new_tokens) & ~jnp.all(state.ended),
        body,
        choose(output, first),
    )
    return last.answers

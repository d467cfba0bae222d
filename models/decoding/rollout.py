"""Completions sampled by one compiled program, for reinforcement learning.

`Generator` streams text and calls a program for every token. Here the number of rows and the
maximum length are known, and results are needed only at the end. Decoding is therefore one loop on
the devices, inside any `jit` and over any mesh.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from ..model import Model
from ..nn.cache import Cache, init_cache
from ..nn.typing import Array, Bool, Float, Int, Key, Params
from .request import Sampling
from .rows import last_logits
from .sample import History, choose, sampling_params


@struct.dataclass
class Answers:
    """The sampled answers of R prompts, of at most N tokens."""

    tokens: Int[Array, "R N"]
    """The tokens; 0 after the end of an answer."""
    mask: Int[Array, "R N"]
    """1 for the tokens of an answer, with its end token."""
    log_probs: Float[Array, "R N"]
    """The log-probability of each token under the unmodified logits, in nats; 0 after the end."""


@struct.dataclass
class _Progress:
    """The state of the loop after `count` tokens."""

    count: Int[Array, ""]
    cache: Cache
    newest: Int[Array, " R"]
    ended: Bool[Array, " R"]
    past: History
    answers: Answers


def sample_answers(
    model: Model,
    params: Params,
    prompt_ids: Int[Array, "R P"],
    prompt_mask: Int[Array, "R P"],
    *,
    keys: Key[Array, " R"],
    max_new_tokens: int,
    end_ids: Sequence[int],
    sampling: Sampling = Sampling(),
    apply_fn: Callable[..., Any] | None = None,
) -> Answers:
    """Samples an answer to each prompt. The caller compiles it.

    The loop stops when all answers have ended. The answer of a row depends only on its prompt and
    its key.

    Args:
      model: a causal language model; fastest in the layout of `unstack_layers`.
      params: its parameters.
      prompt_ids: tokens of the prompts, padded on the left.
      prompt_mask: 1 for the tokens of a prompt.
      keys: a key for each row, from `models.row_keys`.
      max_new_tokens: the maximum length of an answer, N.
      end_ids: the tokens that end an answer.
      sampling: how tokens are chosen.
      apply_fn: `model.apply`, or its variant for a mesh.
    """
    apply = model.apply if apply_fn is None else apply_fn
    rows, length = prompt_ids.shape
    arrays = sampling_params(sampling, model.config.vocab_size)
    ends = jnp.asarray(end_ids, jnp.int32)
    mask = jnp.pad(prompt_mask, ((0, 0), (0, max_new_tokens)), constant_values=1)

    def extended(output: Any, state: _Progress) -> _Progress:
        """Adds the next token of the rows that have not ended."""
        logits = last_logits(output)[:, 0]  # [R, V]
        tokens, log_probs, past = choose(logits, state.past, sampling=arrays)
        assert log_probs is not None
        # Ended rows keep decoding token 0, and their results are masked.
        writes = ~state.ended
        tokens = jnp.where(writes, tokens, 0)
        old = state.answers
        answers = Answers(
            tokens=old.tokens.at[:, state.count].set(tokens),
            mask=old.mask.at[:, state.count].set(writes.astype(jnp.int32)),
            log_probs=old.log_probs.at[:, state.count].set(jnp.where(writes, log_probs, 0.0)),
        )
        is_end = jnp.any(tokens[:, None] == ends, axis=-1)
        ended = state.ended | (is_end & writes)
        return _Progress(state.count + 1, output.cache, tokens, ended, past, answers)

    def body(state: _Progress) -> _Progress:
        output = apply({"params": params}, state.newest[:, None], mask, cache=state.cache)
        return extended(output, state)

    # Prefill: the logits of the last prompt token give the first new token.
    cache = init_cache(model.config, model.execution, rows, length + max_new_tokens)
    output = apply({"params": params}, prompt_ids, mask, cache=cache)
    empty = Answers(
        tokens=jnp.zeros((rows, max_new_tokens), jnp.int32),
        mask=jnp.zeros((rows, max_new_tokens), jnp.int32),
        log_probs=jnp.zeros((rows, max_new_tokens), jnp.float32),
    )
    nothing = jnp.zeros((rows,), jnp.int32)
    seen = None
    if arrays.penalized:
        seen = jnp.zeros((rows, model.config.vocab_size), bool)
        seen = seen.at[jnp.arange(rows)[:, None], prompt_ids].max(prompt_mask != 0)
    past = History(seen, jnp.zeros((rows, 0), jnp.int32), keys, nothing)
    first = _Progress(jnp.int32(0), cache, nothing, nothing.astype(bool), past, empty)
    last = jax.lax.while_loop(
        lambda state: (state.count < max_new_tokens) & ~jnp.all(state.ended),
        body,
        extended(output, first),
    )
    return last.answers

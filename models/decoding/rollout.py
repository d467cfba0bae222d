"""Samples completions with one compiled program, for reinforcement learning.

`Generator` streams text, so it calls a compiled program for every token. In a rollout, the number
of rows and the maximum length are known in advance, and the results are needed only at the end. All
tokens are therefore decoded in one loop on the devices, which works within any `jit` and with any
mesh.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from ..model import Model
from ..nn.typing import Array, Bool, Float, Int, Key, Params
from .request import Sampling
from .rows import SharedCache
from .sample import History, choose, sampling_params


@struct.dataclass
class Answers:
    """The sampled answers to R prompts, each of at most N tokens."""

    tokens: Int[Array, "R N"]
    """The tokens of each answer, followed by zeros."""
    mask: Int[Array, "R N"]
    """1 for the tokens of an answer, including its end token."""
    log_probs: Float[Array, "R N"]
    """The log-probability of each token under the unmodified logits, in nats; 0 after the end."""


@struct.dataclass
class _Progress:
    """The state of the loop after `count` tokens."""

    count: Int[Array, ""]
    context: SharedCache
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
    temperature: float = 1.0,
    apply_fn: Callable[..., Any] | None = None,
) -> Answers:
    """Samples an answer to each prompt. The caller compiles this function.

    The loop stops when all answers have ended. The answer of a row depends only on its prompt and
    its key.

    Args:
      model: a causal language model. The layout of `unstack_layers` is the fastest.
      params: its parameters.
      prompt_ids: tokens of the prompts, padded on the left.
      prompt_mask: 1 for the tokens of a prompt.
      keys: a key for each row, from `models.row_keys`.
      max_new_tokens: the maximum length of an answer, N.
      end_ids: the tokens that end an answer.
      temperature: divides the logits; with 0, the best token is always chosen.
      apply_fn: the function to call instead of `model.apply` if the model runs on a mesh.
    """
    rows, length = prompt_ids.shape
    sampling = sampling_params(Sampling(temperature), model.config.vocab_size)
    ends = jnp.asarray(end_ids, jnp.int32)

    def step(state: _Progress, ids: Int[Array, "R T"]) -> _Progress:
        """Reads the newest tokens, and adds a token to each answer that has not ended."""
        logits, context = state.context.read(model, params, ids, apply_fn=apply_fn)
        tokens, log_probs, past = choose(logits[:, 0], state.past, sampling=sampling)
        assert log_probs is not None
        # Rows whose answers have ended continue to read token 0, but their results are masked.
        writes = ~state.ended
        tokens = jnp.where(writes, tokens, 0)
        new = Answers(tokens, writes.astype(jnp.int32), jnp.where(writes, log_probs, 0.0))
        answers = jax.tree.map(lambda old, x: old.at[:, state.count].set(x), state.answers, new)
        is_end = jnp.any(tokens[:, None] == ends, axis=-1)
        ended = state.ended | (is_end & writes)
        return _Progress(state.count + 1, context, tokens, ended, past, answers)

    # The state before the first token, with slots for the prompts and all new tokens.
    nothing = jnp.zeros((rows,), jnp.int32)
    padding = length - jnp.sum(prompt_mask, axis=1)
    tokens = jnp.zeros((rows, max_new_tokens), jnp.int32)
    empty = _Progress(
        count=jnp.int32(0),
        context=SharedCache.empty(model, padding, length + max_new_tokens),
        newest=nothing,
        ended=nothing.astype(bool),
        past=History(None, jnp.zeros((rows, 0), jnp.int32), keys, nothing),
        answers=Answers(tokens, tokens, tokens.astype(jnp.float32)),
    )
    # The logits after the prompts determine the first new tokens.
    return jax.lax.while_loop(
        lambda state: (state.count < max_new_tokens) & ~jnp.all(state.ended),
        lambda state: step(state, state.newest[:, None]),
        step(empty, prompt_ids),
    ).answers

"""Beam search as a compiled loop, for any generative model. With one beam, the search is greedy.

- The length penalty, and early stopping when no beam can win any more, follow Wu et al. 2016,
  "Google's neural machine translation system", equation 14, and Vaswani et al. 2017, section 6.1.
- If there is one end token, each step considers the best 2 K continuations of a row's K beams. If
  one of the best K continuations ends, it becomes a finished hypothesis. The best K continuations
  that do not end are the next beams (as in transformers).

The result of a row does not depend on the other rows. The K beams of a row share one cache. Tokens
stay in the slots where they were written, and each beam has a mask of the slots that it sees. When
beams are chosen, only these masks are reordered; keys and values are not copied.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ..nn.typing import Array, Bool, Int, Params
from .beam_adapters import CausalBeams, EncoderDecoderBeams, SearchRows
from .beam_step import (
    BeamParams,
    BeamState,
    advance_beams,
    best_candidates,
    empty_state,
    hidden_by_target,
)


# Define the functions at module level, so that all `Generator`s share the compilation cache.
@functools.partial(jax.jit, static_argnames=("model", "num_beams", "num_tokens"))
def begin(
    model: CausalBeams | EncoderDecoderBeams,
    params: Params,
    rows: SearchRows,
    *,
    max_lengths: Int[Array, " B"],
    recent: Int[Array, "B R"],
    beam_params: BeamParams,
    num_beams: int,
    num_tokens: int,
) -> BeamState:
    """Reads the sources or prompts; returns the state of the search after the first token.

    Args:
      model: the model.
      params: its parameters.
      rows: the sources or prompts.
      max_lengths: the maximum target length of each row.
      recent: the last tokens of each row, for banned sequences.
      beam_params: the settings.
      num_beams: the number of beams, K.
      num_tokens: the size of the token arrays, T, at least the maximum of `max_lengths`.
    """
    # The model never reads the last new token, so it needs no slot.
    prefill = model.prefill(params, rows, num_beams, num_tokens - 1)
    state = empty_state(prefill, recent, max_lengths, num_beams=num_beams, num_tokens=num_tokens)
    # Before the first token, each row has a single beam.
    candidates = best_candidates(
        prefill.logits,
        jnp.zeros((rows.ids.shape[0], 1), jnp.float32),
        state.recent[:, :1],
        max_lengths == 1,
        params=beam_params,
        num_beams=num_beams,
        first=True,
        hidden=_hidden(prefill.logits, state.tokens[:, :1], state.count, rows, beam_params),
    )
    return advance_beams(state, candidates, max_lengths, beam_params)


@functools.partial(jax.jit, static_argnames="model", donate_argnames="state")
def proceed(
    model: CausalBeams | EncoderDecoderBeams,
    params: Params,
    rows: SearchRows,
    state: BeamState,
    *,
    max_lengths: Int[Array, " B"],
    beam_params: BeamParams,
    num_steps: Int[Array, ""],
) -> tuple[BeamState, Bool[Array, ""]]:
    """Adds at most `num_steps` tokens to all targets; returns whether the search has ended.

    See `begin` for the other arguments.
    """
    num_beams = state.tokens.shape[1]

    def step(state: BeamState) -> BeamState:
        tokens = jax.lax.dynamic_index_in_dim(state.tokens, state.count - 1, axis=2, keepdims=False)
        # [K, S]: the newest token of each beam is written to a slot that only this beam sees.
        own = state.cache.index + jnp.arange(num_beams)
        written = jnp.arange(state.visible_slots.shape[-1]) == own[:, None]
        visible = state.visible_slots | written
        output = model.step(
            params,
            rows,
            tokens,
            visible_slots=visible,
            count=state.count,
            cache=state.cache,
        )
        candidates = best_candidates(
            output.logits,
            state.log_probs,
            state.recent,
            max_lengths == state.count + 1,
            params=beam_params,
            num_beams=num_beams,
            hidden=_hidden(output.logits, state.tokens, state.count, rows, beam_params),
        )
        state = dataclasses.replace(state, cache=output.cache, visible_slots=visible)
        return advance_beams(state, candidates, max_lengths, beam_params)

    def continues(state: BeamState) -> Array:
        # If scores are NaN, no row is ever done, so the second condition ends the search.
        return jnp.any(~state.done) & (state.count < jnp.max(max_lengths))

    last = state.count + num_steps
    state = jax.lax.while_loop(lambda x: continues(x) & (x.count < last), step, state)
    return state, ~continues(state)


def _hidden(
    logits: Array, tokens: Array, count: Array, rows: SearchRows, params: BeamParams
) -> Array | None:
    """Returns the tokens that must not follow each beam; see `hidden_by_target`."""
    size = logits.shape[-1]
    return hidden_by_target(tokens, count, rows.start_id, params=params, vocab_size=size)

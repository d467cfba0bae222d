"""Computes the log-probabilities of a text's tokens and of the best tokens at each position."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ...heads.outputs import Projection
from ...model import Model
from ...nn.typing import Array, Float, Int, Params
from ...token_log_probs import over_positions


class TokenAlternatives(NamedTuple):
    """The log-probability of a token, and the most probable tokens at its position."""

    log_probability: float
    """In nats."""
    best: list[tuple[int, float]]
    """The most probable tokens and their log-probabilities, best first."""


@functools.partial(jax.jit, static_argnames=("model", "number"))
def score_tokens(
    model: Model, params: Params, ids: Int[Array, "B T"], *, number: int
) -> tuple[Float[Array, "B T"], Int[Array, "B T {number}"], Float[Array, "B T {number}"]]:
    """Returns the log-probability of each next token, and the most probable next tokens.

    The logits are computed in chunks of positions. The log-probability of a next token that is also
    among the most probable tokens is exactly the same in both results.

    Args:
      model: a causal language model.
      params: its parameters.
      ids: the tokens of the texts, padded on the right.
      number: the number of most probable tokens to return.
    """
    # [B, T]: the label of a position is the next token. The last position has no label.
    labels = jnp.pad(ids[:, 1:], ((0, 0), (0, 1)))

    def chunk(part: Projection, label: Array) -> tuple[tuple[Array, None, None], tuple[Array, ...]]:
        # The barrier makes XLA compute all scores from the same rounded array.
        every = jax.nn.log_softmax(part.logits().astype(jnp.float32))
        every = jax.lax.optimization_barrier(every)
        scores, best = jax.lax.top_k(every, number)
        chosen = jnp.take_along_axis(every, label[..., None], axis=-1)[..., 0]
        return (jnp.zeros(()), None, None), (chosen, best, scores)

    projection = model.apply({"params": params}, ids).projection
    return over_positions(chunk, projection, labels)[1]

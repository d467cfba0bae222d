"""Computes sentence vectors from the hidden states of the tokens.

- Mean, maximum and first token: Reimers and Gurevych 2019, "Sentence-BERT", section 3.
- Weighted mean and last token, for causal models: Muennighoff 2022, "SGPT", section 3.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp

from .masks import AnyArray
from .typing import Array, Float, Int

PoolingMode: TypeAlias = Literal[
    "cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"
]
"""A pooling mode, with its name in sentence-transformers."""
POOLING_MODES: tuple[PoolingMode, ...] = get_args(PoolingMode)
"""All modes, in the order of concatenation in sentence-transformers."""


def pool(
    last_hidden_state: Float[Array, "B T D"],
    mask: Int[AnyArray, "B T"],
    modes: Sequence[PoolingMode] = ("mean",),
) -> Float[Array, "B {len(modes)}*D"]:
    """Pools the hidden states of each sequence into one vector, in float32.

    Args:
        last_hidden_state: The hidden states.
        mask: 1 for the tokens to pool, which are consecutive.
        modes: cls: the first token to pool. max: the largest value in each dimension. mean: the
            average. mean_sqrt_len_tokens: the sum divided by √(number of tokens). weightedmean: the
            average with weights 1, 2, 3 …, the position of each token. lasttoken: the last token to
            pool. The vectors of several modes are concatenated.

    Returns:
        The vectors; the vector of a sequence without tokens is 0.
    """
    x = last_hidden_state.astype(jnp.float32)
    real = jnp.asarray(mask != 0, jnp.float32)[..., None]  # [B, T, 1]
    vectors = jnp.concatenate([_POOL[mode](x, real) for mode in modes], axis=-1)
    # For a sequence without tokens, the modes give different results (the maximum is -∞), so set
    # its vector to 0.
    return jnp.where(jnp.any(real, axis=1), vectors, 0)


def pool_segments(
    last_hidden_state: Float[Array, "B T D"],
    segment_ids: Int[AnyArray, "B T"],
    number: int,
    modes: Sequence[PoolingMode] = ("mean",),
) -> Float[Array, "B {number} {len(modes)}*D"]:
    """Pools each text of packed sequences into one vector, in the same way as `pool`.

    Args:
        last_hidden_state: The hidden states.
        segment_ids: The text of each token, from 1 to `number`; 0 for padding.
        number: The number of vectors of each sequence.
        modes: See `pool`.

    Returns:
        The vectors; the vector of a text without tokens is 0.
    """
    masks = jnp.asarray(segment_ids)[:, None] == jnp.arange(1, number + 1)[:, None]  # [B, K, T]
    pool_text = functools.partial(pool, last_hidden_state, modes=modes)
    return jax.vmap(pool_text, in_axes=1, out_axes=1)(masks.astype(jnp.int32))


def mean_pool(
    last_hidden_state: Float[Array, "B T D"], attention_mask: Int[AnyArray, "B T"]
) -> Float[Array, "B D"]:
    """Returns the mean hidden state of each sequence's real tokens, in float32.

    The vector of a sequence without real tokens is 0.
    """
    return pool(last_hidden_state, attention_mask, ("mean",))


def _weighted(x: Array, weights: Array) -> Array:
    """Returns the mean of `x` `[B, T, D]` with weights `[B, T, 1]`."""
    # Weights are integers, so a sum below 1 means that the sequence has no tokens.
    return jnp.sum(x * weights, axis=1) / jnp.maximum(jnp.sum(weights, axis=1), 1)


def _at(x: Array, positions: Array) -> Array:
    """Returns the hidden state at one position `[B, 1]` of each sequence."""
    return jnp.take_along_axis(x, positions[..., None], axis=1)[:, 0]


def _maximum(x: Array) -> Array:
    """Returns the maximum of `[B, T, D]` over tokens, `[B, D]`.

    The gradient goes to the first maximal token, as in PyTorch. With `jnp.max`, the gradient goes
    to all tokens that equal the maximum. No token gets a gradient if the compiler recomputes the
    tokens with different rounding.
    """
    # The first maximal token of each feature, [B, 1, D].
    indices = jnp.argmax(x, axis=1, keepdims=True)
    return jnp.take_along_axis(x, indices, axis=1)[:, 0]


def _last(real: Array) -> Array:
    """Returns the position of the last token, `[B, 1]`."""
    return jnp.max(jnp.where(real != 0, jnp.arange(real.shape[1])[:, None], 0), axis=1)


# Each function maps hidden states [B, T, D] and weights [B, T, 1] (1.0 for real tokens) to [B, D].
_POOL: dict[PoolingMode, Callable[[Array, Array], Array]] = {
    "cls": lambda x, real: _at(x, jnp.argmax(real, axis=1)),
    "max": lambda x, real: _maximum(jnp.where(real != 0, x, -jnp.inf)),
    "mean": _weighted,
    "mean_sqrt_len_tokens": lambda x, real: _weighted(x, real) * jnp.sqrt(jnp.sum(real, axis=1)),
    "weightedmean": lambda x, real: _weighted(x, real * jnp.cumsum(real, axis=1)),
    "lasttoken": lambda x, real: _at(x, _last(real)),
}

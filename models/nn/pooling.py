"""Computes sentence vectors from the hidden states of the tokens.

- Mean, maximum and first token: Reimers and Gurevych 2019, "Sentence-BERT", section 3.
- Weighted mean and last token, for causal models: Muennighoff 2022, "SGPT", section 3.
"""

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, get_args

import jax.numpy as jnp

from .masks import AnyArray
from .typing import Array, Float, Int

PoolingMode: TypeAlias = Literal[
    "cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"
]
"""A pooling mode. The names are the same as in sentence-transformers."""
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
            average with weights 1, 2, 3 …, the position of each token in its row, which must not
            have padding on the left. lasttoken: the last token to pool. The vectors of several
            modes are concatenated.

    Returns:
        The vectors. A sequence without tokens has the vector 0.
    """
    # The weighted mean counts the positions of the sequence, also before the first pooled token.
    ranks = jnp.arange(1, last_hidden_state.shape[1] + 1, dtype=jnp.float32)
    return _pool(last_hidden_state, jnp.asarray(mask)[:, None], ranks, modes)[:, 0]


def pool_segments(
    last_hidden_state: Float[Array, "B T D"],
    segment_ids: Int[AnyArray, "B T"],
    number: int,
    modes: Sequence[PoolingMode] = ("mean",),
) -> Float[Array, "B {number} {len(modes)}*D"]:
    """Pools each text of packed sequences into one vector, in the same way as `pool`.

    Args:
        last_hidden_state: The hidden states.
        segment_ids: The number of each token's text, from 1 to `number`; 0 for padding.
        number: The number of vectors for each sequence.
        modes: See `pool`.

    Returns:
        The vectors. A text without tokens has the vector 0.
    """
    masks = jnp.asarray(segment_ids)[:, None] == jnp.arange(1, number + 1)[:, None]  # [B, K, T]
    # The weighted mean counts the positions of each text.
    ranks = jnp.cumsum(masks, axis=-1, dtype=jnp.float32)
    return _pool(last_hidden_state, masks, ranks, modes)


def mean_pool(
    last_hidden_state: Float[Array, "B T D"], attention_mask: Int[AnyArray, "B T"]
) -> Float[Array, "B D"]:
    """Returns the mean hidden state of each sequence's real tokens, in float32.

    The vector of a sequence without real tokens is 0.
    """
    return pool(last_hidden_state, attention_mask, ("mean",))


def _pool(x: Array, masks: Array, ranks: Array, modes: Sequence[PoolingMode]) -> Array:
    """Pools the tokens of each mask `[B, K, T]` into one vector, `[B, K, modes * D]`.

    The ranks, which broadcast to the masks, are the weights of `weightedmean`.
    """
    x = x.astype(jnp.float32)
    real = jnp.asarray(masks != 0, jnp.float32)
    vectors = jnp.concatenate(
        [
            _weighted(x, real * ranks) if mode == "weightedmean" else _POOL[mode](x, real)
            for mode in modes
        ],
        axis=-1,
    )
    # For a sequence without tokens, the modes give different results, so set the vector to 0.
    return jnp.where(jnp.any(real, axis=-1, keepdims=True), vectors, 0)


def _weighted(x: Array, weights: Array) -> Array:
    """Returns the mean of `x` `[B, T, D]` with weights `[B, K, T]`."""
    # A matmul does not store the products, [B, K, T, D].
    sums = jnp.einsum("bkt,btd->bkd", weights, x, precision="highest")
    # Weights are integers, so a sum below 1 means that the sequence has no tokens.
    return sums / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1)


def _at(x: Array, positions: Array) -> Array:
    """Returns the hidden states `[B, K, D]` at the positions `[B, K]`."""
    return jnp.take_along_axis(x, positions[..., None], axis=1)


def _maximum(x: Array, real: Array) -> Array:
    """Returns the maximum of `[B, T, D]` over the tokens of each mask, `[B, K, D]`.

    The gradient goes to the first maximal token, as in PyTorch. With `jnp.max`, the gradient goes
    to all tokens that equal the maximum, and no token gets a gradient if the compiler recomputes
    the tokens with different rounding.
    """
    # The first maximal token of each feature, [B, K, D].
    indices = jnp.argmax(jnp.where(real[..., None] != 0, x[:, None], -jnp.inf), axis=2)
    return jnp.take_along_axis(x, indices, axis=1)


def _last(real: Array) -> Array:
    """Returns the position of the last token, `[B, K]`."""
    return jnp.max(jnp.where(real != 0, jnp.arange(real.shape[-1]), 0), axis=-1)


def _mean_sqrt_len(x: Array, real: Array) -> Array:
    """Returns the mean times √(number of tokens)."""
    return _weighted(x, real) * jnp.sqrt(jnp.sum(real, axis=-1, keepdims=True))


# Each function maps hidden states [B, T, D] and masks [B, K, T] (1.0 for real tokens) to [B, K, D].
_POOL: dict[PoolingMode, Callable[[Array, Array], Array]] = {
    "cls": lambda x, real: _at(x, jnp.argmax(real, axis=-1)),
    "max": _maximum,
    "mean": _weighted,
    "mean_sqrt_len_tokens": _mean_sqrt_len,
    "lasttoken": lambda x, real: _at(x, _last(real)),
}

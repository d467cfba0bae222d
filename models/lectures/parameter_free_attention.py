"""Attention without parameters: with any similarity, simple self-attention, kernel regression.

- Simple self-attention: Bloem, "Machine Learning at VU", lecture 10. Each output is the average of
  all inputs, weighted by the softmax of their dot products with the corresponding input.
- Kernel regression: Nadaraya 1964, "On estimating regression"; Watson 1964, "Smooth regression
  analysis". Each estimate is the average of all known values, weighted by a kernel of the distance
  between each value's key and the query.

Simple self-attention and kernel regression are soft look-ups: they compute scores of all pairs, a
softmax over the keys, and a weighted average of the values. Learned attention
(`models.nn.attention`) also applies linear maps to the queries, keys and values.
"""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ...data.common.fields import require, require_one_of
from ..nn.typing import Array, Bool, Float

HIDDEN = -1e30
"""The score of a masked key. The score is finite, so that a query without visible keys does not
give NaN.
"""

Similarity: TypeAlias = Callable[[Array, Array], Array]
"""Maps queries [..., Q, D] and keys [..., K, D] to scores [..., Q, K]."""


def dot_scores(
    queries: Float[Array, "*batch Q D"], keys: Float[Array, "*batch K D"]
) -> Float[Array, "*batch Q K"]:
    """Returns the dot product of each query with each key."""
    return jnp.einsum("...QD,...KD->...QK", queries, keys)


def scaled_scores(
    queries: Float[Array, "*batch Q D"], keys: Float[Array, "*batch K D"]
) -> Float[Array, "*batch Q K"]:
    """Returns the dot products divided by √D."""
    return dot_scores(queries, keys) / jnp.sqrt(queries.shape[-1])


def gaussian_scores(
    queries: Float[Array, "*batch Q D"], keys: Float[Array, "*batch K D"]
) -> Float[Array, "*batch Q K"]:
    """Returns -|q - k|² / 2, the logarithm of a Gaussian kernel with bandwidth 1."""
    # Use differences: q · k would lose precision by cancellation for keys far from 0.
    difference = queries[..., :, None, :] - keys[..., None, :, :]  # [..., Q, K, D]
    return -jnp.sum(jnp.square(difference), axis=-1) / 2


SIMILARITIES: dict[str, Similarity] = {
    "dot": dot_scores,
    "scaled": scaled_scores,
    "gaussian": gaussian_scores,
}
"""The similarities by name."""


def similarity_attention(
    queries: Float[Array, "*batch Q D"],
    keys: Float[Array, "*batch K D"],
    values: Float[Array, "*batch K V"],
    *,
    score: str | Similarity = "scaled",
    mask: Bool[Array, "*#batch #Q #K"] | None = None,
) -> Float[Array, "*batch Q V"]:
    """Averages values by the similarity of their keys to each query: Σₖ softmaxₖ(sim(q, k)) vₖ.

    Example::

        y = models.similarity_attention(x, x, x, score="dot")  # simple self-attention
        y = models.similarity_attention(x, x, x, score=lambda q, k: -abs(q - k.swapaxes(-1, -2)))

    Args:
      queries: Q vectors of size D, with any number of batch axes.
      keys: K vectors of size D.
      values: a vector of size V for each key.
      score: the similarity. dot: q · k. scaled: q · k / √D. gaussian: `-|q - k|² / 2`, which gives
        kernel regression with bandwidth 1. `score` can also be a function of queries and keys that
        returns scores `[..., Q, K]`.
      mask: True where the query (row) may attend to the key (column). A row without any True
        attends to all keys equally.

    Returns:
      One vector for each query, of size V.

    Raises:
      UserError: the name of the similarity is unknown.
    """
    return similarity_weights(queries, keys, score, mask) @ values


def similarity_weights(
    queries: Float[Array, "*batch Q D"],
    keys: Float[Array, "*batch K D"],
    score: str | Similarity = "scaled",
    mask: Bool[Array, "*#batch #Q #K"] | None = None,
) -> Float[Array, "*batch Q K"]:
    """Returns the weights of `similarity_attention`; each row sums to 1."""
    if isinstance(score, str):
        require_one_of("score", score, SIMILARITIES)
        score = SIMILARITIES[score]
    scores = score(queries, keys)
    if mask is not None:
        # Mask before the softmax. Masking after the softmax would give weights that sum to less
        # than 1.
        scores = jnp.where(mask, scores, HIDDEN)
    return jax.nn.softmax(scores, axis=-1)


def simple_attention_weights(
    x: Float[Array, "*batch T D"],
    *,
    scale: Float[Array, ""] | float | None = None,
    causal: bool = False,
    mask: Bool[Array, "*#batch #T #T"] | None = None,
) -> Float[Array, "*batch T T"]:
    """Returns the weights W of simple self-attention; each row sums to 1.

    The raw weights are W' = X Xᵀ, w'ᵢⱼ = xᵢ · xⱼ, and W is their softmax over j. See
    `simple_attention` for the arguments.

    Raises:
      UserError: `x` has no axis of vectors.
    """
    require(
        jnp.ndim(x) >= 2,
        f"x has the shape {jnp.shape(x)}: simple attention needs vectors in rows, [T, D], or a "
        "batch of them",
    )
    if causal:
        earlier = jnp.tri(x.shape[-2], dtype=bool)  # [T, T]
        mask = earlier if mask is None else mask & earlier
    factor = 1.0 if scale is None else scale
    return similarity_weights(x, x, lambda q, k: factor * dot_scores(q, k), mask)


def simple_attention(
    x: Float[Array, "*batch T D"],
    *,
    scale: Float[Array, ""] | float | None = None,
    causal: bool = False,
    mask: Bool[Array, "*#batch #T #T"] | None = None,
) -> Float[Array, "*batch T D"]:
    """Applies self-attention without parameters: yᵢ = Σⱼ softmaxⱼ(scale · xᵢ · xⱼ) xⱼ.

    Without `mask` and `causal`, a permutation of the inputs permutes the outputs in the same way.

    Example::

        y = models.simple_attention(x, scale=x.shape[-1] ** -0.5, causal=True)

    Args:
      x: T vectors of size D, or a batch of such sequences.
      scale: factor that multiplies the dot products, by default 1. Scaled attention uses 1 / √D.
      causal: whether a vector attends only to itself and to earlier vectors.
      mask: True where vector i (row) may attend to vector j (column). A row without any True
        attends to all vectors equally.

    Returns:
      One vector for each vector of `x`, of the same size.

    Raises:
      UserError: `x` has no axis of vectors.
    """
    weights = simple_attention_weights(x, scale=scale, causal=causal, mask=mask)
    return jnp.einsum("...TS,...SD->...TD", weights, x)


def kernel_weights(
    queries: Float[Array, "*batch Q D"],
    keys: Float[Array, "*batch K D"],
    bandwidth: Float[Array, ""] | float,
) -> Float[Array, "*batch Q K"]:
    """Returns the weights of kernel regression; each row sums to 1.

    The weight of key k for query q is `softmax(-|q - k|² / 2h²)` over the keys, with bandwidth h.
    `-|q - k|² / 2 = q · k - |k|² / 2 - |q|² / 2`, and the last term is the same for all keys. If
    all keys have the same norm, the weights equal dot-product attention, softmax(q · k / h²).

    Raises:
      UserError: The bandwidth is not above 0.
    """
    # The value of a traced bandwidth is unknown.
    is_valid = isinstance(bandwidth, Tracer) or bandwidth > 0
    require(is_valid, f"bandwidth {bandwidth} must be above 0, for example 1.0")
    return similarity_weights(queries, keys, lambda q, k: gaussian_scores(q, k) / bandwidth**2)


def kernel_regression(
    queries: Float[Array, "*batch Q D"],
    keys: Float[Array, "*batch K D"],
    values: Float[Array, "*batch K V"],
    bandwidth: Float[Array, ""] | float,
) -> Float[Array, "*batch Q V"]:
    """Estimates a function at the queries from its values at the keys (Nadaraya and Watson).

    Each estimate is the average of all values, weighted by a Gaussian kernel of the distance
    between each value's key and the query: `Σₖ softmaxₖ(-|q - k|² / 2h²) vₖ`. The estimate is
    differentiable in every argument, so a bandwidth, keys or values can be learned.

    Example::

        curve = models.kernel_regression(grid[:, None], x[:, None], y[:, None], bandwidth=0.5)

    Args:
      queries: Q points of size D (1 for a function of a scalar), or a batch of such sets.
      keys: K points with known values of the function.
      values: the value of the function at each key, of size V.
      bandwidth: standard deviation of the kernel, h, above 0. A small bandwidth gives the value of
        the nearest key, and a large bandwidth gives the mean of all values.

    Returns:
      An estimate for each query.

    Raises:
      UserError: The bandwidth is not above 0.
    """
    weights = kernel_weights(queries, keys, bandwidth)
    return jnp.einsum("...QK,...KV->...QV", weights, values)

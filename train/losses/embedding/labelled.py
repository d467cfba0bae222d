"""Losses on labeled texts, which make the vectors of texts with the same label similar."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from ....models.nn.typing import Array, Bool, Float, Int
from .vectors import Distance, each_to_each

Distances = Float[Array, "B B"]
FAR = 1e30
"""The distance of a missing negative."""


def batch_all_triplet(
    distances: Distances,
    labels: Int[Array, " B"],
    real: Bool[Array, " B"],
    *,
    margin: float = 5.0,
) -> Float[Array, ""]:
    """Returns the mean of d(a, p) - d(a, n) + margin over all triplets with a value above 0.

    The anchor a and the positive p are different texts with the same label, and the negative n has
    a different label (Hermans et al. 2017, "In defense of the triplet loss", section 2, "batch
    all").

    Args:
        distances: the distance between each pair of texts, [B, B].
        labels: the label of each text.
        real: whether each text is real; texts that are not real form no triplets.
        margin: how much farther from the anchor a negative must be than the positive.
    """
    positive, negative = _relations(labels, real)

    @jax.checkpoint  # else the backward pass would store an array [B, B, B]
    def of_anchor(row: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        d, is_positive, is_negative = row
        # For one anchor, [B, B]: the positive is the row, the negative is the column.
        losses = d[:, None] - d[None] + margin
        counted = is_positive[:, None] & is_negative[None] & (losses > 0)
        return jnp.sum(jnp.where(counted, losses, 0.0)), jnp.sum(counted, dtype=jnp.float32)

    # Process one anchor at a time, so that the largest arrays in memory are [B, B].
    sums, counts = jax.lax.map(of_anchor, (distances, positive, negative))
    return jnp.sum(sums) / jnp.maximum(jnp.sum(counts), 1)


def batch_hard_soft_margin(
    distances: Distances, labels: Int[Array, " B"], real: Bool[Array, " B"]
) -> Float[Array, " B"]:
    """Returns log(1 + exp(d(a, p) - d(a, n))) for each anchor a with its hardest texts p and n.

    p is the farthest text with the label of a, and n the nearest text with a different label
    (Hermans et al. 2017, section 2, "batch hard" with the soft margin).

    Args:
        distances: the distance between each pair of texts, [B, B].
        labels: the label of each text.
        real: whether each text may be a positive or a negative.
    """
    positive, negative = _relations(labels, real)
    # An anchor without negatives has loss 0, because its nearest negative is at `FAR`.
    farthest = jnp.max(jnp.where(positive, distances, 0.0), axis=1)
    nearest = jnp.min(jnp.where(negative, distances, FAR), axis=1)
    return jax.nn.softplus(farthest - nearest)


def _relations(labels: Array, real: Array) -> tuple[Bool[Array, "B B"], Bool[Array, "B B"]]:
    """Returns two masks [B, B]: the positives of each text, and its negatives."""
    both, same = real[:, None] & real, labels[:, None] == labels
    return both & same & ~jnp.eye(len(labels), dtype=bool), both & ~same


def _euclidean(x: Float[Array, "B D"]) -> Distances:
    # The formula |a - b|² = |a|² + |b|² - 2 a · b needs no array [B, B, D].
    norms = jnp.sum(jnp.square(x), axis=-1)
    squared = norms[:, None] + norms - 2 * each_to_each(x, x, "dot")
    # Equal texts have the squared distance 0. The square root has no gradient there, so avoid 0.
    nonzero = (squared > 0) & ~jnp.eye(len(x), dtype=bool)
    return jnp.where(nonzero, jnp.sqrt(jnp.where(nonzero, squared, 1.0)), 0.0)


def _manhattan(x: Float[Array, "B D"]) -> Distances:
    # Unlike the other distances, this one needs an array [B, B, D].
    return jnp.sum(jnp.abs(x[:, None] - x), axis=-1)


TO_EACH: Mapping[Distance, Callable[[Float[Array, "B D"]], Distances]] = {
    "cosine": lambda x: 1 - each_to_each(x, x, "cosine"),
    "euclidean": _euclidean,
    "manhattan": _manhattan,
}
"""Functions that compute the distances between all pairs of vectors, by the distance's name."""

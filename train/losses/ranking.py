"""Losses and ranking metrics for the scores that a model assigns to the documents of a query.

All arrays are `[B, C]`: C documents for each of B queries. Missing documents do not affect any
result.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp

from ...models.nn.typing import Array, Bool, Float

Weighting: TypeAlias = Literal["none", "lambda_rank", "ndcg_loss_2", "ndcg_loss_2pp"]
MASKED = -1e30
"""The logit of a missing document: its exp is 0, and its gradient is finite."""
CUTOFF = 10
"""The last rank that the metrics include."""


def contrast(
    scores: Float[Array, "B C"], real: Bool[Array, "B C"], *, scale: float = 10.0
) -> Float[Array, " B"]:
    """Returns the cross-entropy of the first document as target, with logits scale · σ(score).

    Args:
        scores: the scores of the documents: first the positive, then the negatives.
        real: a mask of the real documents; only real documents are candidates.
        scale: the factor that multiplies σ(score), which is only between 0 and 1.
    """
    logits = scale * jax.nn.sigmoid(scores)
    return jax.nn.logsumexp(jnp.where(real, logits, MASKED), axis=1) - logits[:, 0]


def list_net(
    scores: Float[Array, "B C"], labels: Float[Array, "B C"], real: Bool[Array, "B C"]
) -> Float[Array, " B"]:
    """Returns -Σ softmax(labels) log softmax(scores) (Cao et al. 2007, "ListNet", equation 6)."""
    # In both distributions, the probability of a missing document is 0.
    target_probs = jax.nn.softmax(jnp.where(real, labels, MASKED), axis=1)
    log_probs = jax.nn.log_softmax(jnp.where(real, scores, MASKED), axis=1)
    return -jnp.sum(jnp.where(real, target_probs * log_probs, 0.0), axis=1)


def ordered_pairs(labels: Float[Array, "B C"], real: Bool[Array, "B C"]) -> Bool[Array, "B C C"]:
    """Returns, for each pair of documents, whether the first has the larger label."""
    # [B, C, 1] and [B, 1, C] to [B, C, C]: the first document is along axis 1.
    return (labels[:, :, None] > labels[:, None]) & real[:, :, None] & real[:, None]


def lambda_loss(
    scores: Float[Array, "B C"],
    labels: Float[Array, "B C"],
    real: Bool[Array, "B C"],
    *,
    weighting: Weighting = "ndcg_loss_2pp",
    sigma: float = 1.0,
) -> Float[Array, " B"]:
    """Returns -Σ w_ij log₂ σ(sigma · (s_i - s_j)) over the pairs with label_i > label_j.

    The documents are sorted by their scores. G_i is the gain (2^label - 1) divided by the ideal
    DCG, and D_i = log₂(1 + i) is the discount of rank i. The weights w_ij are

    - `none`: 1 (Burges et al. 2005, "RankNet");
    - `lambda_rank`: |1 / D_i - 1 / D_j| · |G_i - G_j| (Burges et al. 2006);
    - `ndcg_loss_2`: |1 / D_|i-j| - 1 / D_(|i-j|+1)| · |G_i - G_j| (Wang et al. 2018, "LambdaLoss",
      equation 16);
    - `ndcg_loss_2pp`: 10 times `ndcg_loss_2` plus `lambda_rank` (section 4.4.2).

    Args:
        scores: the score of each document.
        labels: the relevance of each document, at least 0.
        real: a mask of the real documents; missing documents form no pairs.
        weighting: the formula for the weights of pairs.
        sigma: the factor that multiplies the differences between scores.

    Returns:
        For each query, the sum over its pairs. `ordered_pairs` returns a mask of these pairs.
    """
    num_documents = scores.shape[1]
    # Sort the documents by their scores, with missing documents last.
    order = jnp.argsort(jnp.where(real, -scores, -MASKED), axis=1, stable=True)
    s, y, is_real = (jnp.take_along_axis(x, order, axis=1) for x in (scores, labels, real))
    # Gains, divided by the gains of the ideal order, [B, C].
    inverse_discount = 1 / jnp.log2(2.0 + jnp.arange(num_documents))
    gains = jnp.where(is_real, 2 ** jnp.maximum(y, 0) - 1, 0)
    ideal = jnp.sum(-jnp.sort(-gains, axis=1) * inverse_discount, axis=1, keepdims=True)
    gains = gains / jnp.maximum(ideal, 1e-10)
    weights = WEIGHTINGS[weighting](gains, inverse_discount)
    # [B, C, C], with document i along axis 1 and document j along axis 2.
    losses = -weights * jax.nn.log_sigmoid(sigma * (s[:, :, None] - s[:, None])) / math.log(2)
    return jnp.sum(jnp.where(ordered_pairs(y, is_real), losses, 0.0), axis=(1, 2))


def _differences(x: Array) -> Array:
    """Returns |x_i - x_j|."""
    return jnp.abs(x[..., :, None] - x[..., None, :])


def _ndcg_loss_2(gains: Array, inverse_discount: Array) -> Array:
    ranks = jnp.arange(len(inverse_discount))
    between = jnp.abs(ranks[:, None] - ranks)  # |i - j|
    # Index k has the discount of rank k + 1. On the diagonal the index is -1, and the value is
    # replaced below.
    steps = jnp.abs(inverse_discount[between - 1] - inverse_discount[between])
    return jnp.where(between == 0, 0.0, steps) * _differences(gains)


def _lambda_rank(gains: Array, inverse_discount: Array) -> Array:
    return _differences(inverse_discount) * _differences(gains)


# Each function takes the gains in the order of the ranks, [B, C], and the inverse discounts, [C],
# and returns the weights, [B, C, C].
WEIGHTINGS: Mapping[Weighting, Callable[[Array, Array], Array]] = {
    "none": lambda gains, inverse_discount: jnp.ones_like(_differences(gains)),
    "lambda_rank": _lambda_rank,
    "ndcg_loss_2": _ndcg_loss_2,
    "ndcg_loss_2pp": lambda gains, inverse_discount: (
        10 * _ndcg_loss_2(gains, inverse_discount) + _lambda_rank(gains, inverse_discount)
    ),
}
rank_net = functools.partial(lambda_loss, weighting="none")
"""`lambda_loss` without weights."""


def margin_error(scores: Float[Array, "B C"], labels: Float[Array, "B C"]) -> Float[Array, "B N"]:
    """Returns (s_0 - s_n - (y_0 - y_n))² for each negative n, where y are a teacher's scores.

    MarginMSE: Hofstätter et al. 2020, "Improving efficient neural ranking models with
    cross-architecture knowledge distillation", equation 5.
    """
    return jnp.square(scores[:, :1] - scores[:, 1:] - (labels[:, :1] - labels[:, 1:]))


def can_be_ranked(labels: Float[Array, "B C"], real: Bool[Array, "B C"]) -> Bool[Array, " B"]:
    """Returns whether each query has both relevant (label above 0) and irrelevant documents."""
    relevant = (labels > 0) & real
    return jnp.any(relevant, axis=1) & jnp.any(real & ~relevant, axis=1)


def ranking_measures(
    scores: Float[Array, "B C"], labels: Float[Array, "B C"], real: Bool[Array, "B C"]
) -> dict[str, Float[Array, " B"]]:
    """Returns `ndcg@10` and `mrr@10` of each query; a document with a label above 0 is relevant.

    Among documents with the same score, relevant documents are ranked last. The data list relevant
    documents first, but a model that gives all documents the same score must not have a perfect
    ranking. The metrics are defined for the queries that `can_be_ranked` selects.
    """
    relevant = (labels > 0) & real
    order = jnp.lexsort((relevant, jnp.where(real, -scores, -MASKED)), axis=1)
    # Whether the document at each rank is relevant, [B, C].
    hits = jnp.take_along_axis(relevant, order, axis=1)
    ranks = jnp.arange(1, hits.shape[1] + 1)
    discounts = jnp.where(ranks <= CUTOFF, 1 / jnp.log2(1.0 + ranks), 0.0)
    # The ideal order has all relevant documents first.
    ideal = jnp.sum(-jnp.sort(-hits.astype(jnp.float32), axis=1) * discounts, axis=1)
    # The rank of the first relevant document. It is 1 for a query without relevant documents, but
    # `has_hit` excludes such a query.
    first = jnp.argmax(hits, axis=1) + 1
    has_hit = jnp.any(hits, axis=1) & (first <= CUTOFF)
    return {
        "ndcg@10": jnp.sum(hits * discounts, axis=1) / jnp.maximum(ideal, 1e-10),
        "mrr@10": jnp.where(has_hit, 1 / first, 0.0),
    }

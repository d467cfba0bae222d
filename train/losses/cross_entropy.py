"""Losses that are sums over weighted items, and the number of correct items, all in float32.

`cross_entropy` computes logits over a vocabulary and their gradient for one chunk of positions at a
time (`models/token_log_probs.py`). The other functions are for heads with few logits, and compute
all logits at once.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ...models.heads.outputs import Projection
from ...models.nn.typing import Array, Float, Int
from ...models.token_log_probs import Sums, as_projection, gradients_of_chunk, over_positions


class CrossEntropy(NamedTuple):
    """Sums over items."""

    loss: Float[Array, ""]
    """Σ weight · -log softmax(logits)[label], in nats; with label smoothing, the KL divergence."""
    correct: Float[Array, ""]
    """The sum of the weights of the items whose label has the highest logit. No gradient."""
    nll: Float[Array, ""]
    """The loss without label smoothing. No gradient."""


def softmax_cross_entropy(
    logits: Float[Array, "*items L"], labels: Int[Array, "*items"], weights: Float[Array, "*items"]
) -> CrossEntropy:
    """Sums weight · -log softmax(logits)[label] over items, and counts correct labels.

    Args:
        logits: scores of L labels or choices for each row, `[B, L]`; scores of L labels for each
          token, `[B, T, L]`; or scores of the T positions where a span may begin, `[B, T]`.
        labels: the correct label of each item.
        weights: the weight of each item; 0 if its label must be ignored, for example -100.
    """
    sums, _ = _sums(logits.astype(jnp.float32), labels, weights, 0.0)
    return CrossEntropy(sums.loss, *map(jax.lax.stop_gradient, (sums.correct, sums.nll)))


def sigmoid_cross_entropy(
    logits: Float[Array, "B L"], labels: Float[Array, "B L"], weights: Float[Array, " B"]
) -> Float[Array, ""]:
    """Sums weight · (mean cross-entropy of L binary labels) over sequences, in nats.

    Args:
        logits: the logit of each label.
        labels: 1 for labels that apply, else 0.
        weights: the weight of each sequence; 0 for sequences to ignore.
    """
    # A stable formula for -log σ(x) if the label is 1, and -log σ(-x) if it is 0.
    x = logits.astype(jnp.float32)
    losses = jax.nn.softplus(x) - labels * x
    return jnp.sum(jnp.where(weights != 0, weights * jnp.mean(losses, axis=-1), 0))


def squared_error(
    predictions: Float[Array, " B"], labels: Float[Array, " B"], weights: Float[Array, " B"]
) -> Float[Array, ""]:
    """Sums weight · (prediction - label)² over sequences. The weight 0 excludes a sequence."""
    errors = jnp.square(predictions.astype(jnp.float32) - labels)
    # 0 · NaN is NaN, so a weight of 0 alone would not exclude a prediction.
    return jnp.sum(jnp.where(weights != 0, weights * errors, 0))


def _sums(
    logits: Array, labels: Array, weights: Array, smoothing: float
) -> tuple[CrossEntropy, Array]:
    """Returns the sums, and the logarithm of each item's softmax denominator."""
    # Subtract the maximum for numerical stability; its gradient cancels.
    highest = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    exponentials = jnp.exp(logits - highest[..., None])
    log_normalizer = highest + jnp.log(jnp.sum(exponentials, axis=-1))
    # An invalid or negative label must result in NaN, and not in the loss of a different label.
    labels = jnp.where(weights != 0, jnp.where(labels < 0, logits.shape[-1], labels), 0)
    # The logit of each label, [..., L] to [...].
    label_logit = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    # A label is correct if its logit is the maximum, so no argmax over the vocabulary is needed.
    correct = jnp.sum(weights * (label_logit >= highest))
    each = log_normalizer - label_logit
    nll = jnp.sum(weights * each)
    if not smoothing:
        return CrossEntropy(nll, correct, nll), log_normalizer
    # KL is the cross-entropy with q minus the entropy of q, so that the minimum is 0.
    others = logits.shape[-1] - 1
    mean_of_others = (jnp.sum(logits, axis=-1) - label_logit) / others
    right, wrong = 1 - smoothing, smoothing / others
    negative_entropy = right * math.log(right) + others * (wrong * math.log(wrong))
    smoothed = each + smoothing * (label_logit - mean_of_others) + negative_entropy
    return CrossEntropy(jnp.sum(weights * smoothed), correct, nll), log_normalizer


def cross_entropy(
    projection: Projection,
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    label_smoothing: float = 0.0,
) -> CrossEntropy:
    """Sums weight · -log softmax(h Wᵀ + b)[label] over positions, and counts correct labels.

    With label smoothing ε (Szegedy et al. 2016, section 7; Vaswani et al. 2017, section 5.4) the
    loss is KL(q ‖ softmax), where q has 1 - ε at the label and ε / (V - 1) at every other token.
    The minimum of this loss is 0, unlike the minimum of the cross-entropy with q.

    The gradient is computed together with the loss from the same chunk of logits, so that each of
    the three matrix products is computed once.

    Args:
        projection: hidden states `[B, T, D]`, vocabulary matrix `[V, D]` and its
          bias, if any. T is the number of predicted positions.
        labels: the correct token at each position.
        weights: the weight of each position; 0 if the label must be ignored. Not differentiated.
        label_smoothing: ε, at least 0 and below 1.
    """
    return _cross_entropy(label_smoothing, projection, labels, weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(
    smoothing: float, projection: Projection, labels: Array, weights: Array
) -> CrossEntropy:
    def chunk(part: Projection, label: Array, weight: Array) -> tuple[Sums, None]:
        return (_sums(part.logits(), label, weight, smoothing)[0], None, None), None

    (total, _, _), _ = over_positions(chunk, projection, labels, weights)
    return total


def _forward(
    smoothing: float, projection: Projection, labels: Array, weights: Array
) -> tuple[CrossEntropy, Projection]:
    """Returns the sums, and the gradient of the loss with respect to the projection's arrays."""
    vocabulary = projection.kernel.shape[0]

    def chunk(part: Projection, label: Array, weight: Array) -> tuple[Sums, Array]:
        logits = part.logits()  # [B, T / chunks, V]
        total, log_normalizer = _sums(logits, label, weight, smoothing)
        softmax = jnp.exp(logits - log_normalizer[..., None])
        # The one-hot labels of the positions in a chunk, [B, T / chunks, V].
        is_label = label[..., None] == jnp.arange(vocabulary)
        target = is_label
        if smoothing:
            target = jnp.where(is_label, 1 - smoothing, smoothing / (vocabulary - 1))
        # The gradient of the loss is softmax - target, propagated through the logit cap, if there
        # is one.
        exact = part.uncapped(weight[..., None] * (softmax - target), logits)
        hidden_gradient, kernel_gradient, bias_gradient = gradients_of_chunk(exact, part)
        return (total, kernel_gradient, bias_gradient), hidden_gradient

    (total, *gradients), hidden_gradient = over_positions(chunk, projection, labels, weights)
    return total, as_projection(hidden_gradient, gradients, projection)


def _backward(
    smoothing: float, gradient: Projection, cotangent: CrossEntropy
) -> tuple[Projection, None, None]:
    del smoothing  # the gradient already includes the label smoothing
    # `correct` and `nll` have no gradient, so the gradient depends only on the cotangent of the
    # loss.
    scaled = jax.tree.map(lambda g: (cotangent.loss * g).astype(g.dtype), gradient)
    return scaled, None, None


_cross_entropy.defvjp(_forward, _backward)

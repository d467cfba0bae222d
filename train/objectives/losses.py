"""Losses as sums over weighted items, in float32, and how many items were right.

Logits over a vocabulary `[B, T, V]` are the largest array of a language model's
step by far.  `cross_entropy` has them for a chunk of the positions at a time:
each chunk's logits, their softmax and their gradient are used up before the
next chunk begins.  The few logits of the other heads are taken as they are.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ...models.nn.heads import Projection
from ...models.nn.typing import Array, Float, Int
from .chunked_loss import over_positions


class CrossEntropy(NamedTuple):
    """Sums over items."""

    loss: Float[Array, ""]
    """Σ weight · -log softmax(logits)[label], in nats; with label smoothing its KL form."""
    correct: Float[Array, ""]
    """Σ weight of the items whose label has the highest logit. No gradient."""
    nll: Float[Array, ""]
    """The loss without label smoothing. No gradient."""


def cross_entropy(
    projection: Projection,
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    label_smoothing: float = 0.0,
) -> CrossEntropy:
    """Sums over positions of weight · -log softmax(h Wᵀ + b)[label], and of what was right.

    With label smoothing ε (Szegedy et al. 2016, section 7; Vaswani et al. 2017, section 5.4)
    the loss is KL(q ‖ softmax), where q has 1 - ε at the label and ε / (V - 1) at every
    other word: 0 is its least value, which the cross-entropy of q does not have.

    The gradient is computed together with the loss, while a chunk's logits are
    at hand, so that each of the three matrix products is done once.

    Args:
      projection: hidden states `[B, T, D]`, vocabulary matrix `[V, D]` and its
        bias, if any. T is the number of positions that are predicted.
      labels: the right token at each position.
      weights: 0 where there is nothing to predict; the label is not looked at
        there. Not differentiated.
      label_smoothing: ε, at least 0 and below 1.
    """
    return _cross_entropy(
        label_smoothing, projection.hidden, projection.kernel, projection.bias, labels, weights
    )


def softmax_cross_entropy(
    logits: Float[Array, "*items L"], labels: Int[Array, "*items"], weights: Float[Array, "*items"]
) -> CrossEntropy:
    """Sums over items of weight · -log softmax(logits)[label], and of what was right.

    Args:
      logits: scores of the L labels: `[B, L]` of rows or choices, `[B, T, L]` of
        tokens, `[B, T]` of the places where a span may begin.
      labels: the right one of each item.
      weights: 0 where there is nothing to predict; the label, for example
        -100, is not looked at there.
    """
    sums, _ = _sums(logits.astype(jnp.float32), labels, weights, 0.0)
    return CrossEntropy(sums.loss, *map(jax.lax.stop_gradient, (sums.correct, sums.nll)))


def sigmoid_cross_entropy(
    logits: Float[Array, "B L"], labels: Float[Array, "B L"], weights: Float[Array, " B"]
) -> Float[Array, ""]:
    """Sum over rows of weight · the mean over L yes-or-no labels of their cross-entropy, in nats.

    Args:
      logits: of "yes" for each label.
      labels: 1 for those that are right, else 0.
      weights: 0 for rows that do not count.
    """
    x = logits.astype(jnp.float32)
    losses = jax.nn.softplus(x) - labels * x
    return jnp.sum(jnp.where(weights != 0, weights * jnp.mean(losses, axis=-1), 0))


def squared_error(
    predictions: Float[Array, " B"], labels: Float[Array, " B"], weights: Float[Array, " B"]
) -> Float[Array, ""]:
    """Sum over rows of weight · (prediction - label)²; weight 0 for rows that do not count."""
    errors = jnp.square(predictions.astype(jnp.float32) - labels)
    return jnp.sum(jnp.where(weights != 0, weights * errors, 0))


def _sums(
    logits: Array, labels: Array, weights: Array, smoothing: float
) -> tuple[CrossEntropy, Array]:
    """The sums, and each item's logarithm of the softmax's denominator."""
    highest = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    exponentials = jnp.exp(logits - highest[..., None])
    log_normaliser = highest + jnp.log(jnp.sum(exponentials, axis=-1))
    # A label that does not exist gives NaN, negative ones included.
    labels = jnp.where(weights != 0, jnp.where(labels < 0, logits.shape[-1], labels), 0)
    label_logit = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    correct = jnp.sum(weights * (label_logit >= highest))
    each = log_normaliser - label_logit
    nll = jnp.sum(weights * each)
    if not smoothing:
        return CrossEntropy(nll, correct, nll), log_normaliser
    others = logits.shape[-1] - 1
    mean_of_others = (jnp.sum(logits, axis=-1) - label_logit) / others
    negative_entropy = _x_log_x(1 - smoothing) + others * _x_log_x(smoothing / others)
    smoothed = each + smoothing * (label_logit - mean_of_others) + negative_entropy
    return CrossEntropy(jnp.sum(weights * smoothed), correct, nll), log_normaliser


def _x_log_x(x: float) -> float:
    return x * math.log(x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(smoothing, hidden, kernel, bias, labels, weights):
    def chunk(kernel, bias, h, label, weight):
        logits = Projection(h, kernel, bias).logits()
        return (_sums(logits, label, weight, smoothing)[0], None, None), None

    (total, _, _), _ = over_positions(chunk, hidden, kernel, bias, labels, weights)
    return total


def _forward(smoothing, hidden, kernel, bias, labels, weights):
    def chunk(kernel, bias, h, label, weight):
        logits = Projection(h, kernel, bias).logits()
        total, log_normaliser = _sums(logits, label, weight, smoothing)
        softmax = jnp.exp(logits - log_normaliser[..., None])
        is_label = label[..., None] == jnp.arange(kernel.shape[0])
        target = is_label
        if smoothing:
            target = jnp.where(is_label, 1 - smoothing, smoothing / (kernel.shape[0] - 1))
        exact = weight[..., None] * (softmax - target)
        gradient = exact.astype(h.dtype)
        hidden_gradient = jnp.einsum("BTV,VD->BTD", gradient, kernel)
        kernel_gradient = jax.lax.platform_dependent(
            h, gradient, cpu=_product_on_cpu, default=_product
        )
        bias_gradient = None if bias is None else jnp.sum(exact, axis=(0, 1))
        return (total, kernel_gradient, bias_gradient), hidden_gradient

    sums, hidden_gradient = over_positions(chunk, hidden, kernel, bias, labels, weights)
    total, kernel_gradient, bias_gradient = sums
    kernel_gradient = kernel_gradient.T.astype(kernel.dtype)
    bias_gradient = None if bias is None else bias_gradient.astype(bias.dtype)
    return total, (hidden_gradient, kernel_gradient, bias_gradient)


def _product(h: Array, gradient: Array) -> Array:
    """Over rows and positions: made one axis, a TPU's program moves 6% more (GPT-2, two layers)."""
    return jnp.einsum("BTD,BTV->DV", h, gradient, preferred_element_type=jnp.float32)


def _product_on_cpu(h: Array, gradient: Array) -> Array:
    """The same numbers: XLA's CPU has no bfloat16 product over two axes."""
    return _product(h.astype(jnp.float32), gradient.astype(jnp.float32))


def _backward(smoothing, residuals, cotangent):
    del smoothing  # it is in the residuals
    scaled = jax.tree.map(lambda g: (cotangent.loss * g).astype(g.dtype), residuals)
    return *scaled, None, None


_cross_entropy.defvjp(_forward, _backward)

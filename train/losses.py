"""Cross-entropy over a large vocabulary, a chunk of positions at a time.

Logits `[B, T, V]` are the largest array of a language model's step by far.
Here they exist for `CHUNK_LENGTH` positions at a time: each chunk's logits,
their softmax and their gradient are used up before the next chunk begins.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..models.heads import Projection

CHUNK_LENGTH = 128
"""Positions of each row whose logits exist at one time."""


def cross_entropy(
    projection: Projection, labels: Int[Array, "B T"], weights: Float[Array, "B T"]
) -> Float[Array, ""]:
    """Sum over positions of weight · -log softmax(h Wᵀ)[label], in nats, float32.

    The gradient is computed together with the loss, while a chunk's logits are
    at hand, so that each of the three matrix products is done once.

    Args:
      projection: hidden states `[B, T, D]` and vocabulary matrix `[V, D]`.
      labels: the right token at each position.
      weights: 0 where there is nothing to predict. Not differentiated.
    """
    length = labels.shape[1]
    chunk = min(CHUNK_LENGTH, length)
    padding = -length % chunk
    hidden = jnp.pad(projection.hidden, ((0, 0), (0, padding), (0, 0)))
    labels, weights = (jnp.pad(x, ((0, 0), (0, padding))) for x in (labels, weights))
    return _cross_entropy(hidden, projection.kernel, labels, weights, chunk)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _cross_entropy(hidden, kernel, labels, weights, chunk):
    def body(total, inputs):
        loss, _ = _chunk_loss(kernel, *inputs)
        return total + loss, None

    return jax.lax.scan(body, jnp.float32(0), _chunks(chunk, hidden, labels, weights))[0]


def _chunks(chunk: int, *arrays: Array) -> tuple[Array, ...]:
    """Cuts `[B, T, …]` into `[T / chunk, B, chunk, …]`."""
    return tuple(jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0) for x in arrays)


def _chunk_loss(kernel, hidden, labels, weights) -> tuple[Array, Any]:
    """The loss of one chunk, and what its gradient needs."""
    logits = Projection(hidden, kernel).logits()
    log_normaliser = jax.nn.logsumexp(logits, axis=-1)
    label_logit = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jnp.sum(weights * (log_normaliser - label_logit)), (logits, log_normaliser)


def _forward(hidden, kernel, labels, weights, chunk):
    def body(carry, inputs):
        total, kernel_gradient = carry
        h, label, weight = inputs
        loss, (logits, log_normaliser) = _chunk_loss(kernel, h, label, weight)
        softmax = jnp.exp(logits - log_normaliser[..., None])
        is_label = label[..., None] == jnp.arange(kernel.shape[0])
        gradient = (weight[..., None] * (softmax - is_label)).astype(h.dtype)
        hidden_gradient = jnp.einsum("BTV,VD->BTD", gradient, kernel)
        kernel_gradient += jnp.einsum(
            "BTD,BTV->DV", h, gradient, preferred_element_type=jnp.float32
        )
        return (total + loss, kernel_gradient), hidden_gradient

    zero = jnp.float32(0), jnp.zeros(kernel.shape[::-1], jnp.float32)
    inputs = _chunks(chunk, hidden, labels, weights)
    (total, kernel_gradient), hidden_gradient = jax.lax.scan(body, zero, inputs)
    hidden_gradient = jnp.moveaxis(hidden_gradient, 0, 1).reshape(hidden.shape)
    return total, (hidden_gradient, kernel_gradient.T.astype(kernel.dtype))


def _backward(chunk, residuals, cotangent):
    hidden_gradient, kernel_gradient = residuals
    scaled = ((cotangent * g).astype(g.dtype) for g in (hidden_gradient, kernel_gradient))
    return *scaled, None, None


_cross_entropy.defvjp(_forward, _backward)

"""The maximum logit of each vocabulary entry over a sequence, for sparse vectors (SPLADE).

As in `token_log_probs`, the logits of a chunk of positions are freed before the next chunk begins,
so that `[B, T, V]` is materialized neither in the forward nor in the backward pass.
"""

import jax
import jax.numpy as jnp

from .heads.outputs import Projection
from .nn.masks import AnyArray
from .nn.typing import Array, Float, Int, PyTree
from .token_log_probs import as_projection, chunk_length, gradients_of_chunk

Residuals = tuple[Projection, Array, Array]
"""The residuals of the backward pass: the projection, and each maximum's position and value."""
NEVER = -1e30
"""The maximum logit of a sequence without real tokens."""


def greatest_logits(projection: Projection, mask: Int[AnyArray, "B T"]) -> Float[Array, "B V"]:
    """Returns max_t logits[t] over each sequence's real tokens, without materializing `[B, T, V]`.

    The gradient of a maximum goes to the first position with the maximum, as in PyTorch. The
    backward pass needs only the position of each maximum, int32 `[B, V]`, and no logits.

    Args:
        projection: hidden states `[B, T, D]`, vocabulary matrix `[V, D]` and its bias, if any.
        mask: 1 for real tokens.

    Returns:
        The logits in float32; `NEVER` for a sequence without real tokens.
    """
    return _greatest(projection, jnp.asarray(mask != 0))


@jax.custom_vjp
def _greatest(projection: Projection, real: Array) -> Array:
    return _forward(projection, real)[0]


def _forward(projection: Projection, real: Array) -> tuple[Array, Residuals]:
    rows, vocabulary = projection.hidden.shape[0], projection.kernel.shape[0]

    def add(best: tuple[Array, Array], chunk: tuple[Array, ...]) -> tuple[PyTree, None]:
        hidden, is_real, first = chunk
        logits = _with_hidden(projection, hidden).logits()  # [B, T / chunks, V]
        logits = jnp.where(is_real[..., None], logits, NEVER)
        values, indices = jnp.max(logits, axis=1), jnp.argmax(logits, axis=1) + first
        # If the values are equal, keep the position from the earlier chunk.
        is_greater = values > best[0]
        merged = jnp.where(is_greater, values, best[0]), jnp.where(is_greater, indices, best[1])
        return merged, None

    # For each vocabulary entry, the maximum logit so far and its position, both [B, V].
    none = jnp.full((rows, vocabulary), NEVER), jnp.zeros((rows, vocabulary), jnp.int32)
    (values, indices), _ = jax.lax.scan(add, none, _chunks(projection.hidden, real))
    return values, (projection, indices, values)


def _backward(residuals: Residuals, gradient: Array) -> tuple[Projection, None]:
    projection, indices, values = residuals
    # A sequence without real tokens has no gradient.
    uncapped = projection.uncapped(gradient[:, None], values[:, None])[:, 0]
    gradient = jnp.where(values > NEVER, uncapped, 0.0)
    length = projection.hidden.shape[1]

    def add(total: PyTree, chunk: tuple[Array, ...]) -> tuple[PyTree, Array]:
        hidden, first = chunk
        # The positions of this chunk. Only the logits at the position of a maximum have a gradient,
        # [B, t, V].
        positions = first + jnp.arange(hidden.shape[1])
        exact = jnp.where(positions[:, None] == indices[:, None], gradient[:, None], 0.0)
        of_hidden, *others = gradients_of_chunk(exact, _with_hidden(projection, hidden))
        return jax.tree.map(jnp.add, total, tuple(others)), of_hidden

    bias = projection.bias
    zeros = (
        jnp.zeros(projection.kernel.shape[::-1], jnp.float32),
        None if bias is None else jnp.zeros(bias.shape, jnp.float32),
    )
    gradients, of_hidden = jax.lax.scan(add, zeros, _chunks(projection.hidden))
    # [num_chunks, B, t, D] to [B, T, D], with padding that the last line removes.
    of_hidden = jnp.moveaxis(of_hidden, 0, 1).reshape(len(indices), -1, of_hidden.shape[-1])
    return as_projection(of_hidden[:, :length], gradients, projection), None


_greatest.defvjp(_forward, _backward)


def _with_hidden(projection: Projection, hidden: Array) -> Projection:
    return Projection(hidden, projection.kernel, projection.bias, projection.cap)


def _chunks(*arrays: Array) -> tuple[Array, ...]:
    """Returns arrays `[B, T, …]` as chunks of positions, and the first position of each chunk."""
    rows, length = arrays[0].shape[:2]
    chunk = chunk_length(rows, length)
    num_chunks = -(-length // chunk)

    def split(x: Array) -> Array:  # [B, T, …] to [num_chunks, B, chunk, …]
        padding = ((0, 0), (0, num_chunks * chunk - length), *((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(
            jnp.pad(x, padding).reshape(rows, num_chunks, chunk, *x.shape[2:]), 1, 0
        )

    return (*map(split, arrays), jnp.arange(num_chunks) * chunk)

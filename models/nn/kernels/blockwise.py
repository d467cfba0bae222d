"""Blockwise attention in plain XLA, forward and backward; memory grows with T, not with T · S.

The forward pass follows Rabe and Staats 2021, "Self-attention does not need O(n²) memory", and the
backward pass follows Dao et al. 2022, "FlashAttention", algorithm 4. The forward pass saves the
output and the log-sum-exp of each query; the backward pass recomputes the weights of a block and
their dropout mask (`dropout.py`).

Ring attention over several devices calls `forward`, `merge` and `backward` for each shard of the
keys (`train.distributed.ring_attention`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.ad_checkpoint import checkpoint_name

from ..dropout import GROUP, HeadKeys, kept_elements
from ..masks import Segments
from ..typing import Array, Bool, Float, Int
from . import KERNEL_RESIDUALS

HIDDEN = -1e30
"""The score of a masked key, and the log-sum-exp of a query without visible keys. The value is
finite, so that `merge` does not give NaN for a query that has no visible keys in either operand.
"""
LARGEST_BLOCK = 512
SMALLEST_BLOCK = 64
"""Sequences longer than `LARGEST_BLOCK` are cut into blocks of at least this size."""
UNLIMITED = 2**30
"""A value that is larger than any distance between two tokens."""


Inputs = tuple[Array, Array, Array]
"""The queries, keys and values, or the three accumulators of a loop."""


@dataclasses.dataclass(frozen=True)
class Band:
    """A band of distances d = i + offset - j between query i and the keys j that it may attend to.

    The band contains the distances 0 ≤ d < window or, if it is not causal, |d| < window.
    """

    offset: int = 0
    """The index of the first query minus the index of the first key."""
    window: int | None = None
    """The number of distances on each side, including 0. If None, distances are not limited."""
    causal: bool = True
    """Whether later keys are hidden."""

    @property
    def limits(self) -> tuple[int, int]:
        """The smallest distance in the band, and the largest distance plus 1."""
        past = UNLIMITED if self.window is None else self.window
        return (0 if self.causal else 1 - past), past

    def contains(self, distance: np.ndarray | Array) -> np.ndarray | Array:
        """Returns whether each value of i - j is within the band."""
        distance = distance + self.offset
        least, past = self.limits
        return (distance >= least) & (distance < past)


@struct.dataclass
class DroppedWeights:
    """Determines which weights between some queries and some keys of each sequence are dropped."""

    head_keys: HeadKeys
    queries: Int[Array, "B T"]
    """The indices of the queries in their sequence."""
    keys: Int[Array, "B S"]
    """The indices of the keys in their sequence, in groups of `GROUP` consecutive indices. Each
    group starts at a multiple of `GROUP`.
    """
    rate: float = struct.field(pytree_node=False)
    """The probability that a weight is dropped."""


class Attended(NamedTuple):
    """The result of attention to some of the keys.

    `merge` combines the results of two sets of keys.
    """

    output: Float[Array, "B T N V"]
    """The weighted sum of the values, in float32; 0 for a query without keys."""
    log_sum: Float[Array, "B T N"]
    """log Σ exp(score), in float32; `HIDDEN` for a query without keys."""


class Gradients(NamedTuple):
    """Gradients with respect to queries, keys and values, in float32."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K V"]


def merge(a: Attended, b: Attended) -> Attended:
    """Combines the results of the same queries for two sets of keys."""
    # Each result is normalized separately: weight it by its share of the sum over all keys.
    log_sum = jnp.logaddexp(a.log_sum, b.log_sum)
    weights = (jnp.exp(x.log_sum - log_sum)[..., None] for x in (a, b))
    output = sum(w * x.output for w, x in zip(weights, (a, b), strict=True))
    return Attended(jnp.asarray(output), log_sum)


def block_size(length: int, *, dropping: bool = False) -> int | None:
    """Returns the block size for a sequence, or None if no block size divides its length.

    Args:
      length: length of the sequence, in tokens.
      dropping: whether the tokens are keys whose weights are dropped. If True, blocks begin at a
        multiple of `GROUP`.
    """
    if length <= LARGEST_BLOCK:
        return length
    step = GROUP if dropping else 1
    sizes = (s for s in range(LARGEST_BLOCK, SMALLEST_BLOCK - 1, -1) if s % step == 0)
    return next((size for size in sizes if length % size == 0), None)


def visible_blocks(
    num_queries: int, num_keys: int, band: Band | None, *, dropping: bool = False
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """Returns the pairs of a query block and a key block that are not fully hidden.

    Args:
      num_queries: T, a length that `block_size` supports.
      num_keys: S, a length that `block_size` supports.
      band: the distances of visible keys. If None, every pair is visible.
      dropping: the same as for `block_size`.
    """
    rows, columns = _blocks(num_queries), _blocks(num_keys, dropping=dropping)
    queries, keys = np.divmod(np.arange(len(rows) * len(columns)), len(columns))
    if band is None:
        return queries, keys
    # The distances between two blocks form an interval: keep the pair if the interval intersects
    # the band.
    least = rows[queries, 0] - columns[keys, 1] + band.offset
    most = rows[queries, 1] - columns[keys, 0] + band.offset
    first, past = band.limits
    seen = (most >= first) & (least < past)
    return queries[seen], keys[seen]


def _blocks(length: int, *, dropping: bool = False) -> Int[np.ndarray, "n 2"]:
    """Returns the first and the last index of each block."""
    size = block_size(length, dropping=dropping)
    assert size is not None, length
    starts = np.arange(0, length, size)
    return np.stack([starts, starts + size - 1], axis=1)


class _Blocks(NamedTuple):
    """The arrays of a call, with heads before tokens, and methods that read their blocks."""

    query: Float[Array, "B K G T H"]
    key: Float[Array, "B K S H"]
    value: Float[Array, "B K S V"]
    segments: Segments | None
    band: Band | None
    cap: float | None
    dropped: DroppedWeights | None

    def sizes(self) -> tuple[int, int]:
        """Returns the lengths of a block of queries and of keys."""
        rows = block_size(self.query.shape[3])
        columns = block_size(self.key.shape[2], dropping=self.dropped is not None)
        assert rows is not None
        assert columns is not None
        return rows, columns

    def scores(self, i: Array, j: Array) -> tuple[Float[Array, "B K G t s"], Bool[Array, "..."]]:
        """Returns the scores of query block i and key block j, and the mask of visible scores."""
        rows, columns = self.sizes()
        query, key = _take(self.query, i * rows, rows, 3), _take(self.key, j * columns, columns, 2)
        scores = jnp.einsum("BKGTH,BKSH->BKGTS", query, key, preferred_element_type=jnp.float32)
        if self.cap is not None:
            scores = self.cap * jnp.tanh(scores / self.cap)
        visible = jnp.ones((1, 1), bool)
        if self.band is not None:
            # Query position minus key position, [t, s].
            distance = i * rows + jnp.arange(rows)[:, None] - j * columns - jnp.arange(columns)
            visible = jnp.asarray(self.band.contains(distance))
        if self.segments is not None:
            queries, keys = self.segments
            queries, keys = _take(queries, i * rows, rows, 1), _take(keys, j * columns, columns, 1)
            # [B, t, s] to [B, 1, 1, t, s]: all heads have the same mask.
            visible &= (queries[:, :, None] == keys[:, None, :])[:, None, None]
        return jnp.where(visible, scores, HIDDEN), visible

    def drop(self, i: Array, j: Array) -> Callable[[Array], Array]:
        """Returns a function that drops weights between two blocks, or gradients of the weights.

        Weights and gradients have the shape `[B, K, G, t, s]`.
        """
        if self.dropped is None:
            return lambda weights: weights
        dropped, (rows, columns) = self.dropped, self.sizes()
        places = (
            _take(dropped.queries, i * rows, rows, 1),
            _take(dropped.keys, j * columns, columns, 1),
        )
        kept = kept_elements(dropped.head_keys, rows, columns, dropped.rate, places=places)
        # [B, N, t, s] to [B, K, G, t, s].
        kept = kept.reshape(*self.query.shape[:3], rows, columns)
        return lambda weights: jnp.where(kept, weights / (1 - dropped.rate), 0)


def _take(x: Array, start: Array, size: int, axis: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def _put(x: Array, part: Array, start: Array, axis: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, axis)


def _by_key_head(x: Array, num_key_heads: int) -> Array:
    """Converts `[B, T, N, …]` to `[B, K, G, T, …]`: query head n uses key head n // G."""
    # [B, T, K, G, …], then move the token axis after the head axes.
    x = x.reshape(*x.shape[:2], num_key_heads, -1, *x.shape[3:])
    return jnp.moveaxis(x, 1, 3)


def _by_token(x: Array) -> Array:
    """Converts `[B, K, G, T, …]` to `[B, T, N, …]`."""
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _prepared(
    query: Array,
    key: Array,
    value: Array,
    segments: Segments | None,
    *,
    band: Band | None,
    cap: float | None,
    dropped: DroppedWeights | None,
) -> _Blocks:
    grouped = _by_key_head(query, key.shape[2])
    key, value = (jnp.moveaxis(x, 1, 2) for x in (key, value))
    return _Blocks(grouped, key, value, segments, band, cap, dropped)


def forward(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    segments: Segments | None,
    *,
    band: Band | None,
    cap: float | None,
    dropped: DroppedWeights | None = None,
) -> Attended:
    """Computes attention of all queries to all keys, block by block.

    Args:
      query: the queries, which are already scaled.
      key: the keys, with the head size of the queries; K divides N.
      value: values of any size.
      segments: segment ids of queries and keys. A query attends to the keys with its segment id.
      band: the distances of visible keys. If None, all keys are visible.
      cap: if not None, scores s become cap · tanh(s / cap).
      dropped: the dropout of the weights. If None, no weight is dropped.
    """
    blocks = _prepared(query, key, value, segments, band=band, cap=cap, dropped=dropped)
    rows, columns = blocks.sizes()
    *leading, num_queries, _ = blocks.query.shape

    def attend(carry: Inputs, pair: tuple[Array, Array]) -> tuple[Inputs, None]:
        i, j = pair
        scores, visible = blocks.scores(i, j)
        # Online softmax: rescale the accumulators to the new maximum, then add this block.
        output, highest, total = (_take(x, i * rows, rows, 3) for x in carry)
        higher = jnp.maximum(highest, scores.max(axis=-1, keepdims=True))
        # Set the weights of hidden keys to 0: if all keys so far are hidden, exp(HIDDEN - HIDDEN)
        # is 1.
        weights = jnp.where(visible, jnp.exp(scores - higher), 0)
        rescale = jnp.exp(highest - higher)
        values = _take(blocks.value, j * columns, columns, 2)
        added = jnp.einsum(
            "BKGTS,BKSV->BKGTV",
            # Dropout affects only the values; the normalizer is the sum of all weights.
            blocks.drop(i, j)(weights).astype(values.dtype),
            values,
            preferred_element_type=jnp.float32,
        )
        parts = (
            rescale * output + added,
            higher,
            rescale * total + weights.sum(axis=-1, keepdims=True),
        )
        return jax.tree.map(lambda x, part: _put(x, part, i * rows, 3), carry, parts), None

    # For every query, the output, the highest score and the sum of weights so far.
    first = (
        jnp.zeros((*leading, num_queries, value.shape[-1]), jnp.float32),
        jnp.full((*leading, num_queries, 1), HIDDEN, jnp.float32),
        jnp.zeros((*leading, num_queries, 1), jnp.float32),
    )
    pairs = visible_blocks(num_queries, key.shape[1], band, dropping=dropped is not None)
    (output, highest, total), _ = jax.lax.scan(attend, first, jax.tree.map(jnp.asarray, pairs))
    # A query without keys has the output 0 and the log-sum-exp `HIDDEN`.
    has_keys = total > 0
    total = jnp.where(has_keys, total, 1)
    log_sum = jnp.where(has_keys, highest + jnp.log(total), HIDDEN)[..., 0]
    return Attended(_by_token(output / total), _by_token(log_sum))


def backward(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    segments: Segments | None,
    *,
    band: Band | None,
    cap: float | None,
    dropped: DroppedWeights | None = None,
    attended: Attended,
    gradient: Float[Array, "B T N V"],
) -> Gradients:
    """Returns the contribution of some or all keys to the gradients of attention.

    Args:
      query: as in `forward`.
      key: some or all of the keys.
      value: the values of these keys.
      segments: segment ids of the queries and of these keys.
      band: the distances of the visible keys among these keys.
      cap: as in `forward`.
      dropped: as in `forward`.
      attended: the result of attention to all keys, not only to these keys.
      gradient: gradient of the output of `attended`.
    """
    blocks = _prepared(query, key, value, segments, band=band, cap=cap, dropped=dropped)
    rows, columns = blocks.sizes()
    num_key_heads = key.shape[2]
    # The mean gradient of a query's weights, which the softmax subtracts (Dao et al., D).
    products = jnp.sum(gradient.astype(jnp.float32) * attended.output, axis=-1)
    log_sums, products = (_by_key_head(x, num_key_heads) for x in (attended.log_sum, products))
    gradients = _by_key_head(gradient.astype(value.dtype), num_key_heads)
    einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def attend(carry: Inputs, pair: tuple[Array, Array]) -> tuple[Inputs, None]:
        i, j = pair
        scores, visible = blocks.scores(i, j)
        # Read the blocks of this pair.
        of_queries = (_take(x, i * rows, rows, 3) for x in (log_sums, products, gradients))
        log_sum, product, gradient = of_queries
        query = _take(blocks.query, i * rows, rows, 3)
        key, value = (_take(x, j * columns, columns, 2) for x in (blocks.key, blocks.value))
        # Recompute the normalized weights from the log-sum-exp over all keys.
        weights = jnp.where(visible, jnp.exp(scores - log_sum[..., None]), 0)
        drop = blocks.drop(i, j)
        # The gradients of weights and scores, [B, K, G, t, s].
        of_weights = drop(einsum("BKGTV,BKSV->BKGTS", gradient, value))
        of_scores = weights * (of_weights - product[..., None])
        if cap is not None:
            # Multiply by the derivative of the cap. Replace masked scores to avoid an overflow.
            of_scores *= 1 - jnp.square(jnp.where(visible, scores, 0) / cap)
        of_scores = of_scores.astype(query.dtype)
        # For each accumulator, the start of this pair's block and the axis of tokens.
        starts = (i * rows, 3), (j * columns, 2), (j * columns, 2)
        parts = (
            einsum("BKGTS,BKSH->BKGTH", of_scores, key),
            einsum("BKGTS,BKGTH->BKSH", of_scores, query),
            einsum("BKGTS,BKGTV->BKSV", drop(weights).astype(value.dtype), gradient),
        )
        # Add the contributions of this pair to the gradients of its two blocks.
        of_query, of_key, of_value = (
            _put(total, _take(total, start, part.shape[axis], axis) + part, start, axis)
            for total, part, (start, axis) in zip(carry, parts, starts, strict=True)
        )
        return (of_query, of_key, of_value), None

    arrays = blocks.query, blocks.key, blocks.value
    first = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), arrays)
    pairs = visible_blocks(query.shape[1], key.shape[1], band, dropping=dropped is not None)
    sums, _ = jax.lax.scan(attend, first, jax.tree.map(jnp.asarray, pairs))
    of_query, of_key, of_value = sums
    return Gradients(_by_token(of_query), jnp.moveaxis(of_key, 2, 1), jnp.moveaxis(of_value, 2, 1))


_Order = tuple[Band | None, float | None]
"""The static band and cap of a call."""
_Residuals = tuple[Inputs, Segments | None, DroppedWeights | None, Attended]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attention(
    inputs: Inputs, segments: Segments | None, dropped: DroppedWeights | None, order: _Order
) -> Array:
    return _attention_forward(inputs, segments, dropped, order)[0]


def _attention_forward(
    inputs: Inputs, segments: Segments | None, dropped: DroppedWeights | None, order: _Order
) -> tuple[Array, _Residuals]:
    band, cap = order
    attended = forward(*inputs, segments, band=band, cap=cap, dropped=dropped)
    attended = attended._replace(output=attended.output.astype(inputs[2].dtype))
    attended = checkpoint_name(attended, KERNEL_RESIDUALS)
    return attended.output, (inputs, segments, dropped, attended)


def _attention_backward(
    order: _Order, residuals: _Residuals, gradient: Array
) -> tuple[Inputs, None, None]:
    inputs, segments, dropped, attended = residuals
    band, cap = order
    gradients = backward(
        *inputs,
        segments,
        band=band,
        cap=cap,
        dropped=dropped,
        attended=attended,
        gradient=gradient,
    )
    return jax.tree.map(lambda g, x: g.astype(x.dtype), tuple(gradients), inputs), None, None


_attention.defvjp(_attention_forward, _attention_backward)


def blockwise_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    segments: Segments | None,
    *,
    causal: bool,
    window: int | None,
    cap: float | None,
    keys: HeadKeys | None = None,
    rate: float = 0.0,
) -> Float[Array, "B T N V"]:
    """Computes attention block by block, on any device; scores are not scaled.

    Fully masked blocks are skipped. Without causal order, the window limits the keys on both sides.
    With `keys`, weights are dropped with probability `rate`; attention with XLA drops the same
    weights.
    """
    # With neither causal order nor a window, every key is visible.
    band = Band(window=window, causal=causal) if causal or window is not None else None
    dropped = None
    if keys is not None:
        places = (jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2]) for x in (query, key))
        dropped = DroppedWeights(keys, *places, rate=rate)
    return _attention((query, key, value), segments, dropped, (band, cap))

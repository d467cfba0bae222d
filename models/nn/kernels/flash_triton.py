"""Flash attention for NVIDIA GPUs with dropout of the attention weights, forward and backward.

This module implements algorithms 1 and 2 of Dao 2023, "FlashAttention-2": a program computes one
block of queries and loops over the blocks of keys. The backward pass has two kernels. One loops
over the blocks of keys and computes the gradients of queries. The other loops over the blocks of
queries and computes the gradients of keys and values. Programs therefore never add to the same
memory, and every sum has a fixed order. All three kernels draw the dropout mask of a block from its
counters (`dropout.py`). The mask is never stored in main memory.

One Threefry block contains the random bits for four keys that are 8 apart. The keys of a block are
loaded in an order (`key_order`) that assigns the scores of these four keys to one thread of a GPU's
matrix unit. The thread draws once for all four keys, without communication.

The kernels are written in Pallas and compiled by Triton, which jax deprecates from 0.11 on. The
successor, Mosaic GPU, needs a Hopper or Blackwell GPU, and its interface differs between the
versions of jax that this package supports.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ..dropout import GROUP, ROWS, HeadKeys, draws, dropped_below, threefry
from ..masks import Segments
from ..typing import Array, Bool, Float, Int
from . import KERNEL_RESIDUALS

QUERIES = 64
"""The number of queries per block in the forward pass and in the kernel for query gradients."""
INNER_QUERIES = 32
"""The number of queries per step in the kernel for key and value gradients, whose sums occupy most
registers."""
KEYS = (128, 64)
"""The block sizes for keys. `block_keys` selects one of them."""
HIDDEN = -1e30
"""The score of a masked key. The score is finite, so that a query without visible keys does not
give NaN.
"""
# Scores are multiplied by log2 e, because the hardware computes powers of 2 instead of e.
LOG2_E = math.log2(math.e)

Inputs = tuple[Array, Array, Array]
"""Queries [B, T, N, H], keys [B, S, K, H] and values [B, S, K, V]."""
Ids = tuple[Int[Array, "B T"], Int[Array, "B S"]]
Range = tuple[Int[Array, ""] | int, Int[Array, ""] | int]
"""The index of a loop's first block, and the index after its last block."""


def block_keys(num_keys: int, size: int) -> int:
    """Returns the number of keys per block, chosen so that a kernel's sums fit into registers.

    Args:
      num_keys: the number of keys, a multiple of 64.
      size: the size of a head.
    """
    largest = KEYS[0] if size <= 64 else KEYS[-1]
    return next(block for block in KEYS if block <= largest and num_keys % block == 0)


@dataclasses.dataclass(frozen=True)
class _Spec:
    """The static properties of a flash attention call."""

    causal: bool
    window: int | None
    rate: float
    """The dropout rate. If 0, no weight is dropped, and the dropout keys are not read."""
    has_ids: bool
    block_k: int
    num_queries: int
    num_keys: int
    group: int
    """Number of query heads that share a key head."""

    @property
    def kept_scale(self) -> float:
        """The factor that multiplies the kept weights."""
        return 1 / (1 - self.rate)

    def kernel_name(self, phase: str) -> str:
        """Returns a kernel's name, which shows the options in profiles and memory plans."""
        order = "_causal" if self.causal else ""
        window = "" if self.window is None else f"_window_{self.window}"
        return f"flash_triton_{phase}{order}{window}"

    def key_blocks(self, i: Int[Array, ""]) -> Range:
        """Returns the range of key blocks that the queries of block i attend to."""
        if not self.causal:
            return 0, self.num_keys // self.block_k
        after = jax.lax.div((i + 1) * QUERIES + self.block_k - 1, self.block_k)
        end = jnp.minimum(after, self.num_keys // self.block_k)
        if self.window is None:
            return 0, end
        earliest = jnp.maximum(i * QUERIES - self.window + 1, 0)
        return jax.lax.div(earliest, self.block_k), end

    def query_blocks(self, j: Int[Array, ""]) -> Range:
        """Returns the range of blocks of `INNER_QUERIES` queries that attend to keys of block j."""
        end = self.num_queries // INNER_QUERIES
        if not self.causal:
            return 0, end
        first = jax.lax.div(j * self.block_k, INNER_QUERIES)
        if self.window is None:
            return first, end
        farthest = (j + 1) * self.block_k + self.window - 2
        return first, jnp.minimum(jax.lax.div(farthest, INNER_QUERIES) + 1, end)


def key_order(block_k: int) -> Int[Array, " {block_k}"]:
    """Returns the loading order of the keys of a block, as offsets in the block.

    A thread of the matrix unit holds the scores for indices that differ only in bit 3 (value 8) or,
    in a block of more than 64 keys, in the highest bit. These two bits of an index therefore select
    one of the four keys that share a draw. The remaining bits of an index are the index of the
    draw.
    """
    index, half = jnp.arange(block_k, dtype=jnp.int32), block_k // 2
    upper, index = jax.lax.div(index, half), jax.lax.rem(index, half)
    group, index = jax.lax.div(index, 2 * ROWS), jax.lax.rem(index, 2 * ROWS)
    lower, row = jax.lax.div(index, ROWS), jax.lax.rem(index, ROWS)
    return GROUP * group + ROWS * (2 * upper + lower) + row


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A block of queries and a block of keys, with the matrix of their scores."""

    spec: _Spec
    queries: Int[Array, " Q"]
    """The consecutive indices of the queries in their sequence."""
    first_key: Int[Array, ""]
    keys: Int[Array, " block_k"]
    """The indices of the keys, in the order of `key_order`."""
    key_axis: int = 1
    """1 if the matrix has the shape [queries, keys], 0 if it has the shape [keys, queries]."""

    def outer(self, of_queries: Array, of_keys: Array) -> tuple[Array, Array]:
        """Reshapes per-query and per-key values so that they broadcast over the matrix."""
        query_axis = 1 - self.key_axis
        return jnp.expand_dims(of_queries, self.key_axis), jnp.expand_dims(of_keys, query_axis)

    def products(self, query: Array, key: Array) -> Float[Array, "_ _"]:
        """Returns the inner product of each query and each key, in float32."""
        return plgpu.dot(query, key.T) if self.key_axis == 1 else plgpu.dot(key, query.T)

    def scores(
        self, query: Array, key: Array, ids: tuple[Array, Array] | None
    ) -> Float[Array, "_ _"]:
        """Returns the scores times log2 e, with `HIDDEN` for masked keys."""
        scores = self.products(query, key) * LOG2_E
        if self.spec.causal:
            query_place, key_place = self.outer(self.queries, self.keys)
            seen = key_place <= query_place
            if self.spec.window is not None:
                seen &= query_place - key_place < self.spec.window
            scores = jnp.where(seen, scores, HIDDEN)
        if ids is not None:
            query_id, key_id = self.outer(*ids)
            scores = jnp.where(query_id == key_id, scores, HIDDEN)
        return scores

    def kept(self, key: tuple[Array, Array] | None) -> Bool[Array, "_ _"] | None:
        """Returns whether each weight is kept, or None if all weights are kept."""
        if key is None:
            return None
        count = self.spec.block_k // (GROUP // ROWS)
        # Draw once for each query and each group of four keys.
        counter = jax.lax.div(self.first_key, GROUP // ROWS) + jnp.arange(count, dtype=jnp.int32)
        query, counter = jnp.broadcast_arrays(*self.outer(self.queries, counter))
        words = threefry(key, (query.astype(jnp.uint32), counter.astype(jnp.uint32)))

        def split(upper: int, lower: int) -> tuple[int, ...]:
            """Returns the shape of a matrix whose key axis is split by the bits of the indices."""
            keys, queries = (upper, count // ROWS, lower, ROWS), self.queries.shape
            return queries + keys if self.key_axis == 1 else keys + queries

        # Broadcast each draw to its four keys: the upper bit selects the word, and the lower bit
        # selects half of the word.
        first, second = (word.reshape(split(1, 1)) for word in words)
        upper, lower = (
            jax.lax.broadcasted_iota(jnp.int32, split(2, 2), self.key_axis + axis)
            for axis in (0, 2)
        )
        word = jnp.where(upper == 0, first, second)
        low, high, *_ = draws((word, word))
        drawn = jnp.where(lower == 0, low, high).astype(jnp.int32)
        shape = jnp.broadcast_shapes(*(x.shape for x in self.outer(self.queries, self.keys)))
        return (drawn >= dropped_below(self.spec.rate)).reshape(shape)


def _drop(x: Float[Array, "_ _"], kept: Bool[Array, "_ _"] | None) -> Float[Array, "_ _"]:
    return x if kept is None else jnp.where(kept, x, 0)


def _head_key(spec: _Spec, keys: jax.Ref) -> tuple[Array, Array] | None:
    """Returns the two words of a head's key, or None if nothing is dropped."""
    if spec.rate == 0:
        return None
    return keys[0].astype(jnp.uint32), keys[1].astype(jnp.uint32)


def _forward_kernel(spec: _Spec, *refs: jax.Ref) -> None:
    """Computes the output [Q, V] and log2 Σ 2^score for a block of queries."""
    query_ref, key_ref, value_ref, keys_ref, *ids_refs, out, log_sum = refs
    i = pl.program_id(0)
    head_key = _head_key(spec, keys_ref)
    query, order = query_ref[...], key_order(spec.block_k)
    queries = i * QUERIES + jnp.arange(QUERIES, dtype=jnp.int32)
    query_ids = ids_refs[0][...] if spec.has_ids else None

    def step(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        sums, highest, total = carry
        tile = _Tile(spec, queries, j * spec.block_k, j * spec.block_k + order)
        ids = None if query_ids is None else (query_ids, ids_refs[1][tile.keys])
        scores = tile.scores(query, key_ref[tile.keys, :], ids)
        # Online softmax: rescale the sums to the new maximum, then add this block.
        higher = jnp.maximum(highest, scores.max(axis=1))
        weights = jnp.exp2(scores - higher[:, None])
        rescale = jnp.exp2(highest - higher)
        # The normalizer is the sum of all weights, including dropped weights.
        total = rescale * total + weights.sum(axis=1)
        value = value_ref[tile.keys, :]
        dropped = _drop(weights, tile.kept(head_key)).astype(value.dtype)
        return rescale[:, None] * sums + plgpu.dot(dropped, value), higher, total

    # The weighted values, the highest score and the normalizer of each query.
    first = (
        jnp.zeros(out.shape, jnp.float32),
        jnp.full((QUERIES,), -jnp.inf, jnp.float32),
        jnp.zeros((QUERIES,), jnp.float32),
    )
    sums, highest, total = jax.lax.fori_loop(*spec.key_blocks(i), step, first)
    # Normalize once after all keys, and keep the log-sum for the backward pass.
    out[...] = (sums * (spec.kept_scale / total)[:, None]).astype(out.dtype)
    log_sum[...] = highest + jnp.log2(total)


def _query_kernel(spec: _Spec, *refs: jax.Ref) -> None:
    """Computes the gradients of a block of queries [Q, H]."""
    query_ref, key_ref, value_ref, keys_ref, *ids_refs, out_gradient, log_sum, mean, to_query = refs
    i = pl.program_id(0)
    head_key = _head_key(spec, keys_ref)
    query, gradient, order = query_ref[...], out_gradient[...], key_order(spec.block_k)
    log_sums, means = log_sum[...][:, None], mean[...][:, None]
    queries = i * QUERIES + jnp.arange(QUERIES, dtype=jnp.int32)
    query_ids = ids_refs[0][...] if spec.has_ids else None

    def step(j: Array, sums: Array) -> Array:
        tile = _Tile(spec, queries, j * spec.block_k, j * spec.block_k + order)
        ids = None if query_ids is None else (query_ids, ids_refs[1][tile.keys])
        key = key_ref[tile.keys, :]
        # Recompute the weights from the log-sum of the forward pass.
        weights = jnp.exp2(tile.scores(query, key, ids) - log_sums)
        of_weights = tile.products(gradient, value_ref[tile.keys, :])
        of_weights = _drop(of_weights, tile.kept(head_key))
        # The gradient of the softmax, without `kept_scale`, which multiplies the final sums.
        of_scores = weights * (of_weights - means)
        return sums + plgpu.dot(of_scores.astype(key.dtype), key)

    sums = jnp.zeros(query.shape, jnp.float32)
    sums = jax.lax.fori_loop(*spec.key_blocks(i), step, sums)
    to_query[...] = (sums * spec.kept_scale).astype(to_query.dtype)


def _key_kernel(spec: _Spec, *refs: jax.Ref) -> None:
    """Computes the gradients of a block of keys [block_k, H] and of its values."""
    query_ref, key_ref, value_ref, keys_ref, *ids_refs, out_gradient, log_sum, mean = refs[:-2]
    key_out, value_out = refs[-2:]
    j = pl.program_id(0)
    head_key = _head_key(spec, keys_ref)
    order = key_order(spec.block_k)
    key, value = key_ref[order, :], value_ref[order, :]
    key_ids = ids_refs[1][order] if spec.has_ids else None

    def step(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        to_key, to_value = carry
        rows = pl.ds(i * INNER_QUERIES, INNER_QUERIES)
        queries = i * INNER_QUERIES + jnp.arange(INNER_QUERIES, dtype=jnp.int32)
        first = j * spec.block_k
        # The matrix is [keys, queries], so that both products below need no transpose.
        tile = _Tile(spec, queries, first, first + order, key_axis=0)
        ids = None if key_ids is None else (ids_refs[0][rows], key_ids)
        query, gradient = query_ref[rows, :], out_gradient[rows, :]
        weights = jnp.exp2(tile.scores(query, key, ids) - log_sum[rows][None])
        kept = tile.kept(head_key)
        of_scores = weights * (_drop(tile.products(gradient, value), kept) - mean[rows][None])
        dropped = _drop(weights, kept)
        return (
            to_key + plgpu.dot(of_scores.astype(query.dtype), query),
            to_value + plgpu.dot(dropped.astype(gradient.dtype), gradient),
        )

    sums = jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32)
    sums = jax.lax.fori_loop(*spec.query_blocks(j), step, sums)
    # `order` also restores the original order of the keys in the gradients.
    for ref, x in zip((key_out, value_out), sums, strict=True):
        ref[order, :] = (x * spec.kept_scale).astype(ref.dtype)


def _blocked(size: int, block: int, group: int = 1) -> pl.BlockSpec:
    """Returns the block spec for a block of an array [B, T, heads, size]."""
    return pl.BlockSpec((None, block, None, size), lambda i, n, b: (b, i, jax.lax.div(n, group), 0))


def _whole(size: int, length: int, group: int = 1) -> pl.BlockSpec:
    """Returns the block spec for all tokens of one head in an array [B, T, heads, size]."""
    return pl.BlockSpec(
        (None, length, None, size), lambda i, n, b: (b, 0, jax.lax.div(n, group), 0)
    )


def _per_head(block: int | None, length: int) -> pl.BlockSpec:
    """Returns the block spec for a block of an array [B, N, T], or for a whole row.

    If `block` is None, the spec covers the whole row of a head.
    """
    if block is None:
        return pl.BlockSpec((None, None, length), lambda i, n, b: (b, n, 0))
    return pl.BlockSpec((None, None, block), lambda i, n, b: (b, n, i))


def _ids(block: int | None, length: int) -> pl.BlockSpec:
    """Returns the block spec for an array [B, T]: a block, or a whole row if `block` is None."""
    if block is None:
        return pl.BlockSpec((None, length), lambda i, n, b: (b, 0))
    return pl.BlockSpec((None, block), lambda i, n, b: (b, i))


HEAD_KEY = pl.BlockSpec((None, None, 2), lambda i, n, b: (b, n, 0))
FEW_WARPS = plgpu.CompilerParams(num_warps=4, num_stages=2)
"""Four warps form a group that uses Hopper's matrix unit together. With eight warps, the scores
would not be distributed over threads as `key_order` assumes.
"""


def _forward(
    spec: _Spec, inputs: Inputs, keys: HeadKeys, ids: Ids | None
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N T"]]:
    """Returns the output, and log2 Σ 2^score of each query."""
    query, key, value = inputs
    (batch, length, heads, size), num_keys, value_size = query.shape, key.shape[1], value.shape[3]
    ids_specs = [_ids(QUERIES, length), _ids(None, num_keys)]
    # A program computes a block of queries of one head, and reads all keys of the head.
    return pl.pallas_call(
        functools.partial(_forward_kernel, spec),
        grid=(length // QUERIES, heads, batch),
        in_specs=[
            _blocked(size, QUERIES),
            _whole(size, num_keys, spec.group),
            _whole(value_size, num_keys, spec.group),
            HEAD_KEY,
            *(() if ids is None else ids_specs),
        ],
        out_specs=[_blocked(value_size, QUERIES), _per_head(QUERIES, length)],
        out_shape=[
            jax.ShapeDtypeStruct((batch, length, heads, value_size), query.dtype),
            jax.ShapeDtypeStruct((batch, heads, length), jnp.float32),
        ],
        compiler_params=FEW_WARPS,
        name=spec.kernel_name("fwd"),
    )(*inputs, keys, *(ids or ()))


def _backward(
    spec: _Spec,
    inputs: Inputs,
    keys: HeadKeys,
    ids: Ids | None,
    *,
    outputs: tuple[Array, Array],
    gradient: Float[Array, "B T N V"],
) -> Inputs:
    """Returns the gradients of queries and, for each query head, of keys and values."""
    query, key, value = inputs
    (batch, length, heads, size), num_keys, value_size = query.shape, key.shape[1], value.shape[3]
    out, log_sum = outputs
    # The mean gradient of the weights, which the softmax subtracts. The kernels apply `kept_scale`
    # to the final sums, so divide by it here.
    mean = jnp.einsum("BTNV,BTNV->BNT", out.astype(jnp.float32), gradient.astype(jnp.float32))
    arguments = (*inputs, keys, *(ids or ()), gradient, log_sum, mean / spec.kept_scale)
    # A program of the first kernel computes a block of queries and loops over all keys.
    ids_specs = [_ids(QUERIES, length), _ids(None, num_keys)]
    (to_query,) = pl.pallas_call(
        functools.partial(_query_kernel, spec),
        grid=(length // QUERIES, heads, batch),
        in_specs=[
            _blocked(size, QUERIES),
            _whole(size, num_keys, spec.group),
            _whole(value_size, num_keys, spec.group),
            HEAD_KEY,
            *(() if ids is None else ids_specs),
            _blocked(value_size, QUERIES),
            _per_head(QUERIES, length),
            _per_head(QUERIES, length),
        ],
        out_specs=[_blocked(size, QUERIES)],
        out_shape=[jax.ShapeDtypeStruct(query.shape, query.dtype)],
        compiler_params=FEW_WARPS,
        name=spec.kernel_name("dq"),
    )(*arguments)
    # A program of the second kernel computes a block of keys and loops over all queries.
    ids_specs = [_ids(None, length), _ids(spec.block_k, num_keys)]
    to_key, to_value = pl.pallas_call(
        functools.partial(_key_kernel, spec),
        grid=(num_keys // spec.block_k, heads, batch),
        in_specs=[
            _whole(size, length),
            _blocked(size, spec.block_k, spec.group),
            _blocked(value_size, spec.block_k, spec.group),
            HEAD_KEY,
            *(() if ids is None else ids_specs),
            _whole(value_size, length),
            _per_head(None, length),
            _per_head(None, length),
        ],
        out_specs=[_blocked(size, spec.block_k), _blocked(value_size, spec.block_k)],
        out_shape=[
            jax.ShapeDtypeStruct((batch, num_keys, heads, n), key.dtype) for n in (size, value_size)
        ],
        compiler_params=FEW_WARPS,
        name=spec.kernel_name("dkv"),
    )(*arguments)
    return to_query, to_key, to_value


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(spec: _Spec, inputs: Inputs, rest: tuple[HeadKeys, Ids | None]) -> Array:
    return _forward(spec, inputs, *rest)[0]


def _attend_forward(
    spec: _Spec, inputs: Inputs, rest: tuple[HeadKeys, Ids | None]
) -> tuple[Array, tuple[object, ...]]:
    out, log_sum = (checkpoint_name(x, KERNEL_RESIDUALS) for x in _forward(spec, inputs, *rest))
    return out, (inputs, rest, (out, log_sum))


def _attend_backward(spec: _Spec, residuals: tuple, gradient: Array) -> tuple[Inputs, None]:
    inputs, rest, outputs = residuals
    to_query, *others = _backward(spec, inputs, *rest, outputs=outputs, gradient=gradient)

    def over_group(x: Float[Array, "B S N _"]) -> Float[Array, "B S K _"]:
        grouped = x.reshape(*x.shape[:2], -1, spec.group, x.shape[3])
        return grouped.sum(axis=3, dtype=jnp.float32).astype(x.dtype)

    # Query heads that share a key head add their gradients.
    to_key, to_value = map(over_group, others) if spec.group > 1 else others
    return (to_query, to_key, to_value), None


_attend.defvjp(_attend_forward, _attend_backward)


def flash_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    segments: Segments | None,
    *,
    causal: bool,
    window: int | None,
    keys: HeadKeys | None = None,
    rate: float = 0.0,
) -> Float[Array, "B T N V"]:
    """Computes flash attention with dropout of the weights, for GPUs; scores are not scaled.

    Fully masked blocks are skipped.

    Args:
      query: the queries, which are already scaled; T is a multiple of 64, and H a power of two from
        16 to 128.
      key: S is a multiple of 64, and K divides N.
      value: V is a power of two from 16 to 128.
      segments: segment ids of queries and keys. A query attends to the keys with its segment id.
      causal: whether a query attends only to keys up to its own position.
      window: if not None, a query attends only to the last `window` of these keys.
      keys: dropout keys of the heads. If None, nothing is dropped.
      rate: probability that a weight is dropped.
    """
    batch, num_queries, heads, size = query.shape
    num_keys = key.shape[1]
    spec = _Spec(
        causal=causal,
        window=window,
        rate=0.0 if keys is None else rate,
        has_ids=segments is not None,
        block_k=block_keys(num_keys, max(size, value.shape[3])),
        num_queries=num_queries,
        num_keys=num_keys,
        group=heads // key.shape[2],
    )
    # The kernels always take dropout keys; without dropout they do not read them.
    words = jnp.zeros((batch, heads, 2), jnp.uint32) if keys is None else keys
    ids = None if segments is None else tuple(x.astype(jnp.int32) for x in segments)
    return _attend(spec, (query, key, value), (words, ids))

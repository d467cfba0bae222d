"""Flash attention for TPUs with dropout of the attention weights, forward and backward.

This module implements algorithms 1 and 4 of Dao et al. 2022, "FlashAttention", but saves the
log-sum-exp of the scores as the residual (Dao 2023, "FlashAttention-2", section 3.1). Both passes
draw the dropout mask of a block from its counters (`dropout.py`). The mask is never stored in main
memory.

In the kernels, the 128 columns of a register correspond to tokens, and the rows to features or
keys. Arrays are `[B, heads, features, tokens]`, so that heads of size 64 are not padded. A block of
scores has the shape `[keys, queries]`, so that the maximum and the sum over a query's keys are
reductions over rows.

The backward pass is one kernel, which computes the scores and the mask of a block once for all
gradients. The query gradients of a whole head stay in on-chip memory.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..dropout import GROUP, ROWS, HeadKeys, draws, dropped_below, threefry
from ..masks import Segments
from ..typing import Array, Float, Int
from . import KERNEL_RESIDUALS

BLOCKS = (512, 384, 256, 128)
"""Block sizes for queries and keys. A kernel uses the first size that divides the number of queries
or keys.
"""
HIDDEN = -1e30
"""The score of a masked key. The score is finite, so that a query without visible keys does not
give NaN.
"""


@dataclasses.dataclass(frozen=True)
class _Spec:
    """The static properties of a flash attention call."""

    causal: bool
    window: int | None
    rate: float
    """The dropout rate. If 0, no weight is dropped, and the dropout keys are not read."""
    block_q: int
    block_k: int
    num_q: int
    """Number of blocks of queries."""
    num_k: int
    group: int
    """Number of query heads that share a key head."""

    def computes(self, i: Int[Array, ""] | int, j: Int[Array, ""] | int) -> Array | bool:
        """Returns whether any query of block i attends to a key of block j."""
        if not self.causal:
            return True
        seen = j * self.block_k <= i * self.block_q + self.block_q - 1
        if self.window is None:
            return seen
        first_query, last_key = i * self.block_q, j * self.block_k + self.block_k - 1
        return seen & (first_query - last_key < self.window)

    def key_block(self, i: Int[Array, ""], j: Int[Array, ""]) -> Array:
        """Returns the key block nearest to block j that the queries of block i attend to."""
        if not self.causal:
            return j
        # Skipped steps of the grid repeat a neighboring block, so that nothing is copied for them.
        last = jax.lax.div(i * self.block_q + self.block_q - 1, self.block_k)
        first = 0
        if self.window is not None:
            first = jnp.maximum(i * self.block_q - self.window + 1, 0)
            first = jax.lax.div(first, self.block_k)
        return jnp.clip(j, first, jnp.minimum(last, self.num_k - 1))

    def query_block(self, i: Int[Array, ""], j: Int[Array, ""]) -> Array:
        """Returns the query block nearest to block i that attends to the keys of block j."""
        if not self.causal:
            return i
        first, last = jax.lax.div(j * self.block_k, self.block_q), self.num_q - 1
        if self.window is not None:
            farthest = j * self.block_k + self.block_k + self.window - 2
            last = jnp.minimum(jax.lax.div(farthest, self.block_q), last)
        return jnp.clip(i, jnp.minimum(first, last), last)

    @property
    def computed_blocks(self) -> int:
        """The number of block pairs that are computed for each head, used in the cost estimate."""
        grid = ((i, j) for i in range(self.num_q) for j in range(self.num_k))
        return sum(bool(self.computes(i, j)) for i, j in grid)


def _masked(
    spec: _Spec, scores: Array, ids: tuple[jax.Ref, jax.Ref] | None, ij: tuple[Array, Array]
) -> Array:
    """Returns the scores [keys, queries] of a block, with `HIDDEN` for masked keys."""
    i, j = ij
    if spec.causal:
        key = j * spec.block_k + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        query = i * spec.block_q + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        seen = key <= query
        if spec.window is not None:
            seen &= query - key < spec.window
        scores = jnp.where(seen, scores, HIDDEN)
    if ids is not None:
        query_ids, key_ids = ids[0][0], ids[1][0]  # [1, queries], [1, keys]
        # Transpose the key ids to a column, with a full register of 8 rows.
        column = jnp.swapaxes(jnp.broadcast_to(key_ids, (ROWS, spec.block_k)), 0, 1)[:, :1]
        scores = jnp.where(column == query_ids, scores, HIDDEN)
    return scores


def _kept(spec: _Spec, key: tuple[Array, Array], i: Array, first_key: Array) -> Array:
    """Returns which weights [32, queries] of the 32 keys from `first_key` on are kept."""
    shape = ROWS, spec.block_q
    row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    query = (column + i * spec.block_q).astype(jnp.uint32)
    counter = (row + jax.lax.div(first_key, GROUP // ROWS)).astype(jnp.uint32)
    drawn = draws(threefry(key, (query, counter)))
    # Each of the four arrays covers 8 consecutive keys.
    return jnp.concatenate([x.astype(jnp.int32) for x in drawn]) >= dropped_below(spec.rate)


def _head_key(spec: _Spec, keys: jax.Ref) -> tuple[Array, Array] | None:
    if spec.rate == 0:
        return None
    # The dropout keys form one flat array in scalar memory, with two words for each head of each
    # sequence.
    at = 2 * (pl.program_id(0) * pl.num_programs(1) + pl.program_id(1))
    return keys[at].astype(jnp.uint32), keys[at + 1].astype(jnp.uint32)


def _each_group(spec: _Spec, body: Callable[[Array], None]) -> None:
    """Calls `body` with the first index of each group of 32 keys, which fits into registers.

    Unrolling two steps leaves fewer gaps in the schedule. Unrolling more steps costs more compile
    time than it saves.
    """

    def step(i: Array, _: None) -> None:
        body(pl.multiple_of(i * GROUP, GROUP))

    jax.lax.fori_loop(0, spec.block_k // GROUP, step, None, unroll=2)


def _product(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    """Returns the product over one axis of each matrix, in float32."""
    dimensions = ((axes[0],), (axes[1],)), ((), ())
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _forward_kernel(spec: _Spec, has_ids: bool, keys: jax.Ref, *refs: jax.Ref) -> None:
    """Computes one block, from queries [H, queries], keys [H, keys] and values [V, keys]."""
    query, key, value, *others = refs
    ids = (others.pop(0), others.pop(0)) if has_ids else None
    # The arguments are two outputs, then scratch memory that persists over the key blocks j.
    out, lse, scores, weights, largest, total, sums = others
    i, j = pl.program_id(2), pl.program_id(3)
    head_key = _head_key(spec, keys)

    # Before the first block of keys, reset the sums of these queries.
    @pl.when(j == 0)
    def _start() -> None:
        largest[...] = jnp.full(largest.shape, -jnp.inf)
        total[...] = jnp.zeros(total.shape)
        sums[...] = jnp.zeros(sums.shape)

    @pl.when(spec.computes(i, j))
    def _block() -> None:
        # Online softmax: rescale the sums to the new maximum, then add this block.
        block_scores = _masked(spec, _product(key[0, 0], query[0, 0], (0, 0)), ids, (i, j))
        scores[...] = block_scores
        before = largest[...]
        now = jnp.maximum(before, block_scores.max(axis=0, keepdims=True))
        largest[...] = now
        shrunk = jnp.exp(before - now)
        total[...] *= shrunk
        sums[...] *= shrunk

        def group(first: Array) -> None:
            rows = pl.ds(first, GROUP)
            weight = jnp.exp(scores[rows, :] - now)
            # The normalizer is the sum of all weights, including dropped weights.
            total[...] += weight.sum(axis=0, keepdims=True)
            if head_key is not None:
                weight = jnp.where(_kept(spec, head_key, i, first + j * spec.block_k), weight, 0)
            weights[rows, :] = weight.astype(weights.dtype)

        _each_group(spec, group)
        sums[...] += _product(value[0, 0], weights[...], (1, 0))

    # After the last block of keys, normalize and write the output of these queries.
    @pl.when(j == spec.num_k - 1)
    def _end() -> None:
        out[0, 0] = (sums[...] / (total[...] * (1 - spec.rate))).astype(out.dtype)
        lse[0, 0] = largest[...] + jnp.log(total[...])


def _backward_kernel(spec: _Spec, has_ids: bool, keys: jax.Ref, *refs: jax.Ref) -> None:
    """Adds the contribution of one block to the gradients of its queries, keys and values."""
    query, key, value, *others = refs
    ids = (others.pop(0), others.pop(0)) if has_ids else None
    out, lse, out_gradient, to_query, to_key, to_value, *scratch = others
    # `key_sums` and `value_sums` persist over the loop of i, and `query_sums` over the loops of i
    # and j.
    scores, products, weights, gradients, query_sums, key_sums, value_sums = scratch
    # The outer loop is over blocks of keys j, and the inner loop over blocks of queries i.
    j, i = pl.program_id(2), pl.program_id(3)
    head_key = _head_key(spec, keys)
    kept_scale = 1 / (1 - spec.rate)

    @pl.when((i == 0) & (j == 0))
    def _start() -> None:
        query_sums[...] = jnp.zeros(query_sums.shape)

    @pl.when(i == 0)
    def _start_keys() -> None:
        key_sums[...] = jnp.zeros(key_sums.shape)
        value_sums[...] = jnp.zeros(value_sums.shape)

    @pl.when(spec.computes(i, j))
    def _block() -> None:
        q, k, d = query[0, 0], key[0, 0], out_gradient[0, 0]
        # Recompute the scores, and multiply the gradients by the values: both results have the
        # shape [keys, queries].
        scores[...] = _masked(spec, _product(k, q, (0, 0)), ids, (i, j))
        products[...] = _product(value[0, 0], d, (0, 0))
        # Σ weight · gradient over the keys of a query equals the product of output and gradient.
        mean = (d.astype(jnp.float32) * out[0, 0].astype(jnp.float32)).sum(axis=0, keepdims=True)
        normalizer = lse[0, 0]

        def group(first: Array) -> None:
            rows = pl.ds(first, GROUP)
            weight = jnp.exp(scores[rows, :] - normalizer)
            # A dropped weight passes no gradient; a kept weight was scaled by 1 / (1 - rate).
            gradient, dropped = products[rows, :], weight
            if head_key is not None:
                kept = _kept(spec, head_key, i, first + j * spec.block_k)
                gradient = jnp.where(kept, gradient * kept_scale, 0)
                dropped = jnp.where(kept, weight, 0)
            weights[rows, :] = dropped.astype(weights.dtype)
            gradients[rows, :] = (weight * (gradient - mean)).astype(gradients.dtype)

        _each_group(spec, group)
        # The query gradient of the whole head is kept: add to the columns of block i.
        columns = pl.ds(pl.multiple_of(i * spec.block_q, spec.block_q), spec.block_q)
        query_sums[:, columns] += _product(k, gradients[...], (1, 0))
        key_sums[...] += _product(q, gradients[...], (1, 1))
        value_sums[...] += _product(d, weights[...], (1, 1))

    @pl.when(i == spec.num_q - 1)
    def _end_keys() -> None:
        to_key[0, 0] = key_sums[...].astype(to_key.dtype)
        to_value[0, 0] = (value_sums[...] * kept_scale).astype(to_value.dtype)

    @pl.when((i == spec.num_q - 1) & (j == spec.num_k - 1))
    def _end() -> None:
        to_query[0, 0] = query_sums[...].astype(to_query.dtype)


def _block_specs(spec: _Spec, ij: Callable[..., tuple[Array, Array]]) -> tuple[Callable, Callable]:
    """Returns a function that makes block specs for query arrays, and one for key arrays.

    The arrays have the shape [B, heads, size, tokens].

    Args:
      spec: the static properties of the call.
      ij: maps a step of the grid to the indices of its query block and its key block.
    """

    def of_queries(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, size, spec.block_q), lambda b, n, *s: (b, n, 0, ij(*s)[0]))

    def of_keys(size: int, group: int = 1) -> pl.BlockSpec:
        return pl.BlockSpec(
            (1, 1, size, spec.block_k),
            lambda b, n, *s: (b, jax.lax.div(n, group), 0, ij(*s)[1]),
        )

    return of_queries, of_keys


def _ids_specs(spec: _Spec, ij: Callable[..., tuple[Array, Array]]) -> list[pl.BlockSpec]:
    return [
        pl.BlockSpec((1, 1, spec.block_q), lambda b, n, *s: (b, 0, ij(*s)[0])),
        pl.BlockSpec((1, 1, spec.block_k), lambda b, n, *s: (b, 0, ij(*s)[1])),
    ]


Ids = tuple[Int[Array, "B 1 T"], Int[Array, "B 1 S"]]


def _forward(
    spec: _Spec, inputs: tuple[Array, Array, Array], rest: tuple[Array, Ids | None]
) -> tuple[Array, Array]:
    """Returns the output [B, N, V, T] and the log-sum-exps [B, N, 1, T]."""
    (query, key, value), (keys, ids) = inputs, rest
    (batch, heads, size, num_queries), value_size = query.shape, value.shape[2]

    def ij(i: Array, j: Array, _: jax.Ref) -> tuple[Array, Array]:
        return i, spec.key_block(i, j)

    of_queries, of_keys = _block_specs(spec, ij)
    tile = spec.block_k, spec.block_q
    # In the order of `_forward_kernel`: scores, weights, maximum, normalizer, weighted values.
    scratch = [
        pltpu.VMEM(tile, jnp.float32),
        pltpu.VMEM(tile, value.dtype),
        pltpu.VMEM((1, spec.block_q), jnp.float32),
        pltpu.VMEM((1, spec.block_q), jnp.float32),
        pltpu.VMEM((value_size, spec.block_q), jnp.float32),
    ]
    # The cost estimate needs the number of computed scores.
    pairs = spec.computed_blocks * math.prod(tile) * batch * heads
    return pl.pallas_call(
        functools.partial(_forward_kernel, spec, ids is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, heads, spec.num_q, spec.num_k),
            in_specs=[
                of_queries(size),
                of_keys(size, spec.group),
                of_keys(value_size, spec.group),
                *(() if ids is None else _ids_specs(spec, ij)),
            ],
            out_specs=[of_queries(value_size), of_queries(1)],
            scratch_shapes=scratch,
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, value_size, num_queries), query.dtype),
            jax.ShapeDtypeStruct((batch, heads, 1, num_queries), jnp.float32),
        ],
        # All key blocks add to the sums of the same queries, so the steps over keys run in order.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        cost_estimate=_cost(2 * pairs * (size + value_size), pairs, (query, key, value, query)),
        name="flash_fwd",
    )(keys, query, key, value, *(() if ids is None else ids))


def _backward(
    spec: _Spec,
    inputs: tuple[Array, Array, Array],
    rest: tuple[Array, Ids | None],
    outputs: tuple[Array, Array, Array],
) -> tuple[Array, Array, Array]:
    """Returns the gradients of queries and, for each query head, of keys and values."""
    (query, key, value), (keys, ids) = inputs, rest
    (batch, heads, size, num_queries), (value_size, num_keys) = query.shape, value.shape[2:]

    def ij(j: Array, i: Array, _: jax.Ref) -> tuple[Array, Array]:
        return spec.query_block(i, j), j

    of_queries, of_keys = _block_specs(spec, ij)
    tile = spec.block_k, spec.block_q
    # In the order of `_backward_kernel`: four tiles, then the sums of queries, keys and values.
    scratch = [
        pltpu.VMEM(tile, jnp.float32),
        pltpu.VMEM(tile, jnp.float32),
        pltpu.VMEM(tile, value.dtype),
        pltpu.VMEM(tile, value.dtype),
        pltpu.VMEM((size, num_queries), jnp.float32),
        pltpu.VMEM((size, spec.block_k), jnp.float32),
        pltpu.VMEM((value_size, spec.block_k), jnp.float32),
    ]
    pairs = spec.computed_blocks * math.prod(tile) * batch * heads
    # The query gradient is written once per head: keep the whole gradient on the chip.
    whole = pl.BlockSpec((1, 1, size, num_queries), lambda b, n, *_: (b, n, 0, 0))
    return pl.pallas_call(
        functools.partial(_backward_kernel, spec, ids is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, heads, spec.num_k, spec.num_q),
            in_specs=[
                of_queries(size),
                of_keys(size, spec.group),
                of_keys(value_size, spec.group),
                *(() if ids is None else _ids_specs(spec, ij)),
                of_queries(value_size),
                of_queries(1),
                of_queries(value_size),
            ],
            out_specs=[whole, of_keys(size), of_keys(value_size)],
            scratch_shapes=scratch,
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, n, tokens), query.dtype)
            for n, tokens in ((size, num_queries), (size, num_keys), (value_size, num_keys))
        ],
        # The steps over keys and the steps over queries add to the same sums, so both run in order.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary")
        ),
        cost_estimate=_cost(
            2 * pairs * (3 * size + 2 * value_size),
            pairs,
            (*inputs, *inputs, outputs[0], outputs[2]),
        ),
        name="flash_bwd",
    )(keys, query, key, value, *(() if ids is None else ids), *outputs)


def _cost(flops: int, exponentials: int, arrays: tuple[Array, ...]) -> pl.CostEstimate:
    """Returns the cost of a kernel, which the compiler cannot estimate itself."""
    nbytes = sum(x.size * x.dtype.itemsize for x in arrays)
    return pl.CostEstimate(flops=flops, transcendentals=exponentials, bytes_accessed=nbytes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    spec: _Spec, inputs: tuple[Array, Array, Array], rest: tuple[Array, Ids | None]
) -> Array:
    return _forward(spec, inputs, rest)[0]


def _attend_forward(
    spec: _Spec, inputs: tuple[Array, Array, Array], rest: tuple[Array, Ids | None]
) -> tuple[Array, tuple[object, ...]]:
    out, lse = (checkpoint_name(x, KERNEL_RESIDUALS) for x in _forward(spec, inputs, rest))
    return out, (inputs, rest, out, lse)


def _attend_backward(
    spec: _Spec, residuals: tuple, gradient: Array
) -> tuple[tuple[Array, Array, Array], None]:
    inputs, rest, out, lse = residuals
    to_query, *others = _backward(spec, inputs, rest, (out, lse, gradient))

    def over_group(x: Array) -> Array:
        batch, heads, size, tokens = x.shape
        grouped = x.reshape(batch, heads // spec.group, spec.group, size, tokens)
        return grouped.sum(axis=2, dtype=jnp.float32).astype(x.dtype)

    # Query heads that share a key head add their gradients.
    if spec.group > 1:
        others = map(over_group, others)
    to_key, to_value = others
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
    """Computes flash attention with dropout of the weights, for TPUs; scores are not scaled.

    Fully masked blocks are skipped.

    Args:
      query: the queries, which are already scaled; T is a multiple of 128.
      key: S is a multiple of 128, and K divides N.
      value: values of any size.
      segments: segment ids of queries and keys. A query attends to the keys with its segment id.
      causal: whether a query attends only to keys up to its own position.
      window: if not None, a query attends only to the last `window` of these keys.
      keys: dropout keys of the heads. If None, nothing is dropped.
      rate: probability that a weight is dropped.
    """
    (_, num_queries, heads, _), num_keys = query.shape, key.shape[1]
    block_q, block_k = (next(b for b in BLOCKS if n % b == 0) for n in (num_queries, num_keys))
    spec = _Spec(
        causal=causal,
        window=window,
        rate=0.0 if keys is None else rate,
        block_q=block_q,
        block_k=block_k,
        num_q=num_queries // block_q,
        num_k=num_keys // block_k,
        group=heads // key.shape[2],
    )
    # The kernel always takes words of dropout keys; without dropout it does not read them.
    if keys is None:
        words = jnp.zeros(1, jnp.int32)
    else:
        words = jax.lax.bitcast_convert_type(keys, jnp.int32).reshape(-1)
    ids = None if segments is None else tuple(x[:, None].astype(jnp.int32) for x in segments)
    # Make tokens the last axis, which the kernel stores in the columns of registers.
    inputs = tuple(jnp.einsum("BTNH->BNHT", x) for x in (query, key, value))
    return jnp.einsum("BNVT->BTNV", _attend(spec, inputs, (words, ids)))

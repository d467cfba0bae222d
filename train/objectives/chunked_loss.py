"""Sums over the positions of a batch, a chunk of them after the other, on every device its own.

For what is too large to have at all positions at once: the logits over a vocabulary.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ...models.config import divisors
from ...models.nn.typing import Array
from ..distributed.sharding import BATCH_AXES, CONTEXT, MESH_AXES, MESH_AXIS_NAMES

MOST_POSITIONS = 1024
"""Of all rows of a device, whose logits exist at one time.

The kernel's gradient, in float32, is read and written once a chunk: with so many positions its
product takes 256 operations for each of those bytes, about what a v5e or an H200 can do beside it.
"""


def over_positions(
    function: Any, hidden: Array, kernel: Array, bias: Array | None, labels: Array, weights: Array
) -> Any:
    """`function(kernel, bias, hidden, labels, weights) -> (sums, own)`, chunk by chunk.

    Args:
      function: `sums` are the loss, the gradient `[D, V]` of the kernel and that of the bias,
        those that are asked for; `own` is what each position has, `[B, T, D]`.
      hidden: `[B, T, D]`, as labels and weights are `[B, T]`.
      kernel: `[V, D]`.
      bias: `[V]`, if there is one.
      labels: see `cross_entropy`.
      weights: likewise.

    Returns:
      The sums over all chunks and devices, and what each position has.
    """

    def over_chunks(kernel, bias, hidden, labels, weights):
        rows, length = labels.shape
        chunk = chunk_length(rows, length)
        padding = -length % chunk
        chunks = jax.tree.map(lambda x: _cut(_pad(x, padding), chunk), (hidden, labels, weights))
        sums, own = _over_chunks(lambda inputs: function(kernel, bias, *inputs), chunks)
        return sums, jax.tree.map(lambda x: _join(x)[:, :length], own)

    return _on_each_device(over_chunks, labels.shape[1])(kernel, bias, hidden, labels, weights)


def chunk_length(rows: int, length: int) -> int:
    """Positions of each of `rows` rows that are taken together, of `length`."""
    needed = -(-length // min(max(MOST_POSITIONS // rows, 1), length))
    even = next(number for number in divisors(length) if number >= needed)
    # Nothing is padded where that takes less than twice as many chunks.
    return -(-length // (even if even < 2 * needed else needed))


def _on_each_device(function: Any, length: int) -> Any:
    """`function(kernel, bias, *arrays)` on each device, for the positions that it has.

    On a mesh (`jax.sharding.use_abstract_mesh`) the compiler, left to itself, gathers the kernel
    for every chunk and sums its gradient over all devices after every chunk. Here a device gathers
    it once and sums over its own chunks first, in float32: it holds both as wide as they are, but
    for what is cut along `tensor`, which stays the compiler's.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.axis_names != MESH_AXIS_NAMES:  # none, or that of pmap
        return function
    positions = None if length % mesh.shape[CONTEXT] else CONTEXT
    axes = (*BATCH_AXES, positions) if positions else BATCH_AXES
    if math.prod(mesh.shape[axis] for axis in axes) == 1:
        return function
    width = MESH_AXES["model"]

    def on_one(kernel, *arrays):
        whole = jax.lax.all_gather(kernel, width, axis=1, tiled=True)
        (total, kernel_gradient, bias_gradient), own = function(whole, *arrays)
        others = tuple(axis for axis in axes if axis != width)
        if kernel_gradient is not None:
            part = jax.lax.psum_scatter(kernel_gradient, width, tiled=True)
            kernel_gradient = jax.lax.psum(part, others)
        return (*jax.lax.psum((total, bias_gradient), axes), kernel_gradient), own

    rows = PartitionSpec(BATCH_AXES, positions)
    manual = axes if mesh.shape[MESH_AXES["vocabulary"]] > 1 else mesh.axis_names

    def apart(*arrays):
        (total, bias_gradient, kernel_gradient), own = jax.shard_map(
            on_one,
            in_specs=(PartitionSpec(None, width), PartitionSpec(), rows, rows, rows),
            out_specs=((PartitionSpec(), PartitionSpec(), PartitionSpec(width)), rows),
            axis_names=set(manual),
            check_vma=False,  # for a scan its zeros would have to be said to differ
        )(*arrays)
        return (total, kernel_gradient, bias_gradient), own

    return apart


def _pad(x: Array, padding: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)))


def _cut(x: Array, chunk: int) -> Array:
    """Cuts `[B, T, …]` into `[T / chunk, B, chunk, …]`."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)


def _join(x: Array) -> Array:
    """The inverse of `_cut`."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])


def _over_chunks(function: Any, chunks: Any) -> Any:
    """(Σ sums, all that is the chunks' own) of `function(chunk) -> (sums, own)`, one by one.

    `chunks` and what is the chunks' own have a leading axis; of a length of 1
    nothing is summed, and no zeros are made to begin with.
    """
    first = jax.tree.map(lambda x: x[0], chunks)
    if jax.tree.leaves(chunks)[0].shape[0] == 1:
        sums, own = function(first)
        return sums, jax.tree.map(lambda x: x[None], own)

    def body(total, chunk):
        sums, own = function(chunk)
        return jax.tree.map(jnp.add, total, sums), own

    shapes, _ = jax.eval_shape(function, first)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.scan(body, zeros, chunks)

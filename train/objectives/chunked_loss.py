"""Functions of the positions of a batch, computed for a chunk of the positions at a time.

They are for what is too large to be held at all positions at once: the logits over a vocabulary.
On a mesh every device goes through its own positions.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ...models.nn.heads import Projection
from ...models.nn.typing import Array, PyTree
from ..distributed.sharding import BATCH_AXES, CONTEXT, MESH_AXES, MESH_AXIS_NAMES

MOST_POSITIONS = 1024
"""The positions, over all sequences of a device, whose logits exist at one time.

The kernel's gradient, in float32, is read and written once a chunk: with so many positions its
product takes 256 operations for each of those bytes, about what a v5e or an H200 can do meanwhile.
"""


Sums = tuple[PyTree, Array | None, Array | None]
"""Losses, the gradient `[D, V]` of the kernel and that of the bias; None for those not computed."""
ChunkFn = Callable[..., tuple[Sums, PyTree]]
"""`function(projection, *others) -> (sums, own)` of a chunk of positions."""
DeviceFn = Callable[[Array, Array | None, tuple[PyTree, ...]], tuple[Sums, PyTree]]
"""`function(kernel, bias, positions) -> (sums, own)` of the positions of a device."""


def over_positions(
    function: ChunkFn, projection: Projection, *others: PyTree
) -> tuple[Sums, PyTree]:
    """Applies `function(projection, *others) -> (sums, own)` chunk by chunk.

    Args:
      function: its `sums` are added up over chunks and devices; `own` is a tree of arrays
        `[B, T, …]` with an entry for each position.
      projection: hidden states `[B, T, D]`, of which the function gets a chunk, kernel and bias.
      others: trees of further arrays `[B, T, …]`, such as labels.

    Returns:
      The sums over all chunks and devices, and the entries of all positions.
    """

    def over_chunks(
        kernel: Array, bias: Array | None, positions: tuple[PyTree, ...]
    ) -> tuple[Sums, PyTree]:
        rows, length = jax.tree.leaves(positions)[0].shape[:2]
        chunk = chunk_length(rows, length)
        padding = -length % chunk
        chunks = jax.tree.map(lambda x: _split(_pad(x, padding), chunk), positions)
        sums, own = _over_chunks(
            lambda part: function(Projection(part[0], kernel, bias), *part[1:]), chunks
        )
        return sums, jax.tree.map(lambda x: _join(x)[:, :length], own)

    run = _on_each_device(over_chunks, projection.hidden.shape[1])
    return run(projection.kernel, projection.bias, (projection.hidden, *others))


def chunk_length(rows: int, length: int) -> int:
    """Returns how many positions of each of `rows` sequences of `length` are taken together."""
    needed = -(-length // min(max(MOST_POSITIONS // rows, 1), length))
    even = next(number for number in range(needed, length + 1) if length % number == 0)
    # Nothing is padded where that takes less than twice as many chunks.
    return -(-length // (even if even < 2 * needed else needed))


def _on_each_device(function: DeviceFn, length: int) -> DeviceFn:
    """Returns `function(kernel, bias, positions)` run on each device, for its own positions.

    On a mesh (`jax.sharding.use_abstract_mesh`) the compiler, left to itself, gathers the kernel
    for every chunk and sums its gradient over all devices after every chunk. Here a device gathers
    it once and sums over its own chunks first, in float32: it holds both at full width, except
    for what is sharded over `tensor`, which is left to the compiler.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.axis_names != MESH_AXIS_NAMES:  # none, or that of pmap
        return function
    positions = None if length % mesh.shape[CONTEXT] else CONTEXT
    axes = (*BATCH_AXES, positions) if positions else BATCH_AXES
    if math.prod(mesh.shape[axis] for axis in axes) == 1:
        return function
    width = MESH_AXES["model"]

    def on_one(
        kernel: Array, bias: Array | None, positions: tuple[PyTree, ...]
    ) -> tuple[Sums, PyTree]:
        whole = jax.lax.all_gather(kernel, width, axis=1, tiled=True)  # [V, D]
        (total, kernel_gradient, bias_gradient), own = function(whole, bias, positions)
        others = tuple(axis for axis in axes if axis != width)
        if kernel_gradient is not None:
            part = jax.lax.psum_scatter(kernel_gradient, width, tiled=True)
            kernel_gradient = jax.lax.psum(part, others)
        return (*jax.lax.psum((total, bias_gradient), axes), kernel_gradient), own

    rows = PartitionSpec(BATCH_AXES, positions)
    manual = axes if mesh.shape[MESH_AXES["vocabulary"]] > 1 else mesh.axis_names

    def on_mesh(
        kernel: Array, bias: Array | None, positions: tuple[PyTree, ...]
    ) -> tuple[Sums, PyTree]:
        (total, bias_gradient, kernel_gradient), own = jax.shard_map(
            on_one,
            in_specs=(PartitionSpec(None, width), PartitionSpec(), rows),
            out_specs=((PartitionSpec(), PartitionSpec(), PartitionSpec(width)), rows),
            axis_names=set(manual),
            check_vma=False,  # the zeros of a scan would have to be declared to vary
        )(kernel, bias, positions)
        return (total, kernel_gradient, bias_gradient), own

    return on_mesh


def _pad(x: Array, padding: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)))


def _split(x: Array, chunk: int) -> Array:
    """Splits `[B, T, …]` into `[T / chunk, B, chunk, …]`."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)


def _join(x: Array) -> Array:
    """Joins what `_split` has split."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])


def _over_chunks(
    function: Callable[[PyTree], tuple[Sums, PyTree]], chunks: PyTree
) -> tuple[Sums, PyTree]:
    """Returns Σ sums, and `own` of every chunk, of `function(chunk) -> (sums, own)`, one by one.

    `chunks` and the result's `own` have a leading axis of chunks. If there is one chunk only,
    nothing is summed, and no zeros are made to begin with.
    """
    first = jax.tree.map(lambda x: x[0], chunks)
    if jax.tree.leaves(chunks)[0].shape[0] == 1:
        sums, own = function(first)
        return sums, jax.tree.map(lambda x: x[None], own)

    def body(total: Sums, chunk: PyTree) -> tuple[Sums, PyTree]:
        sums, own = function(chunk)
        return jax.tree.map(jnp.add, total, sums), own

    shapes, _ = jax.eval_shape(function, first)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.scan(body, zeros, chunks)

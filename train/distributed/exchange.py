"""The exchange of gradients between the devices of a mesh, once a step.

Left to itself the compiler sums gradients over devices as soon as they exist: once in each
micro-batch. Here (`exchanged_once`) every device goes through the micro-batches of its own
sequences and sums their gradients by itself; the sums of all devices are added up once, when the
last micro-batch is done. A device needs the whole parameters for this. Those that are sharded over
`fsdp` are gathered once, and each device gets its shard of the summed gradients (a reduce-scatter):
(n - 1) / n of the parameters' bytes are sent twice in a step, whatever the number of micro-batches,
instead of three times in each micro-batch.
"""

import math
from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...models.nn.typing import Array, Params, PyTree
from ..state import TrainState
from .sharding import BATCH_AXES, automatic, current

Gather = Literal["step", "layer"]
"""Whether the parameters that are sharded over `fsdp` are gathered whole once a step, or layer by
layer whenever they are used."""
GradientFn: TypeAlias = Callable[
    [Params, Params | None, PyTree, PyTree, Array], tuple[Params, PyTree]
]
"""`function(params, frozen, counts, batch, keys) -> (gradients, sums)` of the rows of a batch."""
LARGEST_PART = 0.25
"""The part of a device's memory that whole parameters and gradients may take beside their shards,
if they are to be gathered once a step unasked."""


def whole_bytes(state: TrainState, mesh: Mesh, micro_batches: int) -> int:
    """Returns what a device holds beside its state if parameters are gathered once a step.

    These are the whole parameters, their gradients and, with several micro-batches, the sums of
    these.

    Args:
        state: shapes with shardings.
        mesh: the mesh; what is sharded over its other axes stays so.
        micro_batches: their number.
    """

    def size(tree: PyTree) -> int:
        return sum(
            x.size * x.dtype.itemsize // _num_parts(x.sharding.spec, mesh)
            for x in jax.tree.leaves(tree)
        )

    copies = 3 if micro_batches > 1 else 2
    return copies * size(state.params) + size(state.frozen)


def _num_parts(spec: PartitionSpec, mesh: Mesh) -> int:
    """Returns the number of parts that an array stays in if it is gathered over `fsdp`."""
    return math.prod(mesh.shape[a] for axes in spec for a in _names(axes) if a != "fsdp")


def choose_gather(needed: int, memory: int | None) -> Gather:
    """Returns how parameters are gathered if nobody says.

    Args:
        needed: from `whole_bytes`.
        memory: the memory of a device; None if unknown.
    """
    return "step" if memory is not None and needed <= LARGEST_PART * memory else "layer"


def axes_exchanged_once(mesh: Mesh, gather: Gather, micro_batches: int) -> tuple[str, ...]:
    """Returns the axes of the mesh over which each step sums gradients once, by its own code.

    There are none where the compiler does it by itself, without micro-batches, and on a mesh whose
    axes `expert`, `context` or `tensor` divide the layers: XLA's partitioner (of jaxlib 0.10) ends
    the process if a program is divided partly by hand and partly over several axes.
    """
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    if not sizes.keys() <= {"data", "fsdp"}:
        return ()
    axes = tuple(sizes) if gather == "step" else tuple(sizes.keys() & {"data"})
    return axes if len(axes) == len(sizes) or micro_batches > 1 else ()


def keep_sharded(params: Params, mesh: Mesh, shardings: Params) -> Params:
    """Returns parameters whose gradients keep their sharding: each device gets its shard of a sum.

    Left to itself the compiler sums some gradients whole on every device.
    """
    axes = automatic(mesh.axis_names)
    if all(mesh.shape[axis] == 1 for axis in axes):
        return params

    def constrain(x: Array, sharding: NamedSharding) -> Array:
        own = NamedSharding(current(mesh), _only(sharding, axes))
        return jax.lax.with_sharding_constraint(x, own)

    return jax.tree.map(constrain, params, shardings)


def exchanged_once(
    function: GradientFn, *, mesh: Mesh, shardings: TrainState, axes: tuple[str, ...]
) -> GradientFn:
    """Returns `function` run on each device for its own rows, its results summed over devices.

    Args:
        function: sums over the rows that it is given, one micro-batch after the other or at once.
        mesh: the mesh; it must be jax's current one where the result is traced.
        shardings: of the state; gradients get those of the parameters.
        axes: those to sum over, from `axes_exchanged_once`; none: `function` is left to the
          compiler. So are the other axes.
    """
    if not axes:
        return function
    specs = jax.tree.map(lambda s: _only(s, axes), (shardings.params, shardings.frozen))
    rows = PartitionSpec(tuple(axis for axis in BATCH_AXES if axis in axes))
    alone = math.prod(mesh.shape[axis] for axis in axes) == mesh.size

    def on_one(
        params: Params, frozen: Params | None, counts: PyTree, batch: PyTree, keys: Array
    ) -> tuple[Params, PyTree]:
        params, frozen = jax.tree.map(_gathered, (params, frozen), specs)
        gradients, sums = function(params, frozen, counts, batch, keys)
        gradients = jax.tree.map(lambda x, spec: _scattered(x, spec, axes), gradients, specs[0])
        return gradients, jax.lax.psum(sums, axes)

    return jax.shard_map(
        on_one,
        in_specs=(*specs, PartitionSpec(), rows, rows),
        out_specs=(specs[0], PartitionSpec()),
        axis_names=set(mesh.axis_names if alone else axes),
        check_vma=False,  # the zeros of a scan would have to be declared to vary
    )


def _only(sharding: NamedSharding, axes: tuple[str, ...]) -> PartitionSpec:
    """Returns the part of a sharding that is over some axes of the mesh."""
    return PartitionSpec(
        *(
            tuple(axis for axis in _names(dimension) if axis in axes) or None
            for dimension in sharding.spec
        )
    )


def _names(dimension: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (dimension,) if isinstance(dimension, str) else dimension or ()


def _sharded(spec: PartitionSpec) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yields each dimension that is sharded, and the axes that it is sharded over."""
    return ((number, _names(axes)) for number, axes in enumerate(spec) if axes)


def _gathered(x: Array, spec: PartitionSpec) -> Array:
    """Returns the whole of an array of which this device has a shard."""
    for dimension, axes in _sharded(spec):
        x = jax.lax.all_gather(x, axes, axis=dimension, tiled=True)
    return x


def _scattered(x: Array, spec: PartitionSpec, axes: tuple[str, ...]) -> Array:
    """Returns this device's shard of the sum of an array over some axes."""
    left = set(axes)
    for dimension, over in _sharded(spec):
        x = jax.lax.psum_scatter(x, over, scatter_dimension=dimension, tiled=True)
        left -= set(over)
    return jax.lax.psum(x, tuple(axis for axis in axes if axis in left)) if left else x

"""The exchange of gradients between the devices of a mesh, once a step.

Left to itself the compiler sums gradients over devices as soon as they exist: once in each
micro-batch. Here (`exchanged_once`) every device goes through the micro-batches of its own
sequences and sums their gradients by itself; the sums of all devices are added up once, when the
last micro-batch is done. A device needs the whole parameters for this. Those that are sharded over
`fsdp` are gathered once, and each device gets its shard of the summed gradients (a reduce-scatter):
(n - 1) / n of the parameters' bytes are sent twice in a step, whatever the number of micro-batches,
instead of three times in each micro-batch.

The TPU compiler makes an all-reduce of a reduce-scatter among all devices of a torus, which sends
the bytes twice, but not of one among groups of devices. On TPUs gradients are therefore scattered
in two stages (`scatter_stages`), which together send as many bytes as one reduce-scatter.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from ...data.errors import UserError
from ...models.nn.typing import Array, Params, PyTree
from ..config import Gather
from ..optim.parameters import map_named
from ..state import TrainState
from .sharding import BATCH_AXES

GradientFn: TypeAlias = Callable[[Params, Params | None, PyTree, PyTree], tuple[Params, PyTree]]
"""`function(params, frozen, counts, rows) -> (gradients, sums)`, of arrays `[B, …]`."""
ONCE = ("data", "fsdp")
"""The axes of the mesh over which gradients can be summed once a step."""
LARGEST_PART = 0.25
"""The part of a device's memory that whole parameters and gradients may take beside their shards,
if they are to be gathered once a step unasked."""
LINEAR = re.compile(r"(?:.*/)?(?:kernel|experts/(?:gate|up|down))")
"""The parameters of linear maps: models cast them to the dtype of their execution before anything
else, and their gradients are computed in it."""
EMBEDDING = re.compile(r"(?:.*/)?token_embedding/embedding")
"""Tables that models cast likewise, but use twice where embeddings are tied: for the tokens, and
for the logits. Their gradient is a sum in float32."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """How the devices of a mesh exchange gradients."""

    wrap: Callable[[GradientFn], GradientFn] | None = None
    """Takes the function that sums gradients over the rows of a batch, and returns that which sums
    them over devices too. None: there is one device."""
    description: str = ""
    """A clause for a message; empty where no gradients are exchanged."""


def choose_exchange(
    gather: Gather,
    mesh: Mesh,
    *,
    state: TrainState,
    shardings: TrainState,
    whole_batch: bool,
    micro_batches: int,
    dtype: DTypeLike | None,
    device_memory: int | None,
) -> Exchange:
    """Returns how the devices of a mesh exchange gradients.

    Args:
        gather: what a person chose.
        mesh: the mesh; its devices need not be at hand.
        state: arrays or their shapes.
        shardings: of the state.
        whole_batch: whether the loss of an example depends on the other examples of its batch.
        micro_batches: their number.
        dtype: see `exchanged_once`.
        device_memory: the bytes of a device's memory; None: unknown.

    Raises:
        UserError: "step" is not for the mesh or the objective.
    """
    whole = whole_bytes(state, micro_batches)
    gather = choose_gather(
        gather,
        mesh,
        whole_batch=whole_batch,
        fits=lambda: fits_whole(whole, device_memory),
    )
    axes = () if whole_batch else axes_exchanged_once(mesh, gather, micro_batches)
    return Exchange(
        functools.partial(
            exchanged_once,
            mesh=mesh,
            shardings=shardings,
            axes=axes,
            dtype=dtype,
            micro_batches=micro_batches,
        ),
        describe(mesh, gather, whole=whole, micro_batches=micro_batches, by_hand=bool(axes)),
    )


def whole_bytes(state: TrainState, micro_batches: int) -> int:
    """Returns what a device holds beside its state if parameters are gathered once a step.

    These are the whole parameters, their gradients and, with several micro-batches, the sums of
    these.

    Args:
        state: arrays or their shapes.
        micro_batches: their number.
    """

    def size(tree: PyTree) -> int:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    copies = 3 if micro_batches > 1 else 2
    return copies * size(state.params) + size(state.frozen)


def choose_gather(
    gather: Gather, mesh: Mesh, *, whole_batch: bool, fits: Callable[[], bool]
) -> Gather:
    """Returns "step" or "layer" for "auto", and the others as they are.

    Args:
        gather: what a person chose.
        mesh: the mesh.
        whole_batch: whether the loss of an example depends on the other examples of its batch.
        fits: whether whole parameters and gradients are a small part of a device's memory.

    Raises:
        UserError: "step" is not for the mesh or the objective.
    """
    others = [f"mesh.{axis} {n}" for axis, n in mesh.shape.items() if n > 1 and axis not in ONCE]
    if gather == "step" and (others or whole_batch):
        reason = "the loss of an example depends on its whole batch"
        raise UserError(
            "gather step lets each device compute the gradients of its own sequences from whole "
            f"parameters, but {f'here is {others[0]}' if others else reason}: choose gather layer"
        )
    if gather != "auto":
        return gather
    once = mesh.shape["fsdp"] > 1 and not others and not whole_batch
    return "step" if once and fits() else "layer"


def fits_whole(needed: int, memory: int | None) -> bool:
    """Returns whether bytes from `whole_bytes` are at most `LARGEST_PART` of a memory, if known."""
    return memory is not None and needed <= LARGEST_PART * memory


def describe(mesh: Mesh, gather: Gather, *, whole: int, micro_batches: int, by_hand: bool) -> str:
    """Describes the exchange of gradients in a clause.

    Args:
        mesh: the mesh, of several devices.
        gather: "step" or "layer".
        whole: from `whole_bytes`.
        micro_batches: their number.
        by_hand: whether `axes_exchanged_once` has any.
    """
    if all(size == 1 for axis, size in mesh.shape.items() if axis != "tensor"):
        return ""  # each device has all tokens, and gradients of its own part of the model
    once = by_hand or micro_batches == 1
    if mesh.shape["fsdp"] == 1:
        return f"gradients exchanged {'once a step' if once else 'in each micro-batch'}"
    if gather == "step":
        return (
            "gradients exchanged once a step; parameters gathered once a step, which takes "
            f"{whole / 1e9:,.1f} GB beside the state (--gather layer: less)"
        )
    among = " among the devices of fsdp" if by_hand else ""
    return (
        "parameters gathered layer by layer; gradients exchanged "
        f"{'once a step' if micro_batches == 1 else f'in each micro-batch{among}'}"
    )


def axes_exchanged_once(mesh: Mesh, gather: Gather, micro_batches: int) -> tuple[str, ...]:
    """Returns the axes of the mesh over which each step sums gradients once, by its own code.

    There are none where the compiler does it by itself, without micro-batches, and on a mesh whose
    axes `expert`, `context` or `tensor` divide the layers: XLA's partitioner (of jaxlib 0.10) ends
    the process if a program is divided partly by hand and partly over several axes.
    """
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    if not sizes.keys() <= set(ONCE):
        return ()
    axes = tuple(sizes) if gather == "step" else tuple(sizes.keys() & {"data"})
    return axes if len(axes) == len(sizes) or micro_batches > 1 else ()


def exchanged_once(
    function: GradientFn,
    *,
    mesh: Mesh,
    shardings: TrainState,
    axes: tuple[str, ...],
    dtype: DTypeLike | None = None,
    micro_batches: int = 1,
) -> GradientFn:
    """Returns `function` run on each device for its own rows, its results summed over devices.

    Args:
        function: sums over the rows that it is given, one micro-batch after the other or at once.
        mesh: the mesh; it must be jax's current one where the result is traced.
        shardings: of the state; gradients get those of the parameters.
        axes: those to sum over, from `axes_exchanged_once`; none: `function` is left to the
          compiler. So are the other axes.
        dtype: in which the model uses its linear maps, and in which they are therefore gathered;
          None: that of the parameters.
        micro_batches: their number. The gradients of a single one are exchanged in `dtype`, in
          which they were computed; sums over several have that of the parameters.
    """
    if not axes:
        return function
    specs = jax.tree.map(lambda s: _only(s, axes), (shardings.params, shardings.frozen))
    by_row = PartitionSpec(tuple(axis for axis in BATCH_AXES if axis in axes))
    alone = math.prod(mesh.shape[axis] for axis in axes) == mesh.size
    on_tpu = mesh.devices.flat[0].platform == "tpu"
    stages = scatter_stages(mesh.shape["fsdp"]) if on_tpu else ()

    def gathered(name: str, x: Array, spec: PartitionSpec) -> Array:
        cast = LINEAR.fullmatch(name) or EMBEDDING.fullmatch(name)
        sent_as = x.dtype if dtype is None or not cast else dtype
        with jax.named_scope(name):  # by which a plan tells apart what runs at the same time
            return _gathered(x, spec, sent_as)

    def scattered(name: str, x: Array, spec: PartitionSpec) -> Array:
        computed = micro_batches == 1 and LINEAR.fullmatch(name)
        sent_as = x.dtype if dtype is None or not computed else dtype
        with jax.named_scope(name):
            return _scattered(x.astype(sent_as), spec, axes, stages).astype(x.dtype)

    def on_one(
        params: Params, frozen: Params | None, counts: PyTree, rows: PyTree
    ) -> tuple[Params, PyTree]:
        params, frozen = map_named(gathered, (params, frozen), specs)
        gradients, sums = function(params, frozen, counts, rows)
        return map_named(scattered, gradients, specs[0]), jax.lax.psum(sums, axes)

    return jax.shard_map(
        on_one,
        in_specs=(*specs, PartitionSpec(), by_row),
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


def _gathered(x: Array, spec: PartitionSpec, dtype: DTypeLike) -> Array:
    """Returns the whole of an array of which this device has a shard, rounded to a dtype."""
    whole = x
    for dimension, axes in _sharded(spec):
        whole = jax.lax.all_gather(whole.astype(dtype), axes, axis=dimension, tiled=True)
    return whole.astype(x.dtype)  # the gradients of micro-batches are summed in it


def scatter_stages(num_devices: int) -> tuple[list[list[int]], ...]:
    """Returns the groups of devices that sum and scatter an array in each of two stages.

    Of a · b devices in order, the first stage leaves device i · b + j the i-th of a parts of the
    sum over the devices with the same j; the second one the j-th of b parts of that, summed over
    the devices with the same i. The two are the device's shard of the whole sum.

    Args:
        num_devices: their number along the axis of the mesh.

    Returns:
        The groups of both stages, by their places along the axis; empty if the number is a prime.
    """
    inner = max(n for n in range(1, math.isqrt(num_devices) + 1) if num_devices % n == 0)
    if inner == 1:
        return ()
    places = [list(range(first, first + inner)) for first in range(0, num_devices, inner)]
    return [list(group) for group in zip(*places, strict=True)], places


def _scattered(
    x: Array, spec: PartitionSpec, axes: tuple[str, ...], stages: tuple[list[list[int]], ...]
) -> Array:
    """Returns this device's shard of the sum of an array over some axes.

    Args:
        x: the whole array.
        spec: how it is sharded; only over `fsdp`.
        axes: those to sum over.
        stages: from `scatter_stages`; empty: at once.
    """
    left = set(axes)
    for dimension, over in _sharded(spec):
        if stages:
            x = _scattered_in_stages(x, dimension, over, stages)
        else:
            x = jax.lax.psum_scatter(x, over, scatter_dimension=dimension, tiled=True)
        left -= set(over)
    return jax.lax.psum(x, tuple(axis for axis in axes if axis in left)) if left else x


def _scattered_in_stages(
    x: Array, dimension: int, over: tuple[str, ...], stages: tuple[list[list[int]], ...]
) -> Array:
    """Returns this device's shard, along a dimension, of the sum of an array.

    The compiler scatters only what ends at the tiles of 8 × 128 numbers in which a TPU stores the
    last two dimensions. The shards are therefore moved to a dimension before these.
    """
    num_shards = math.prod(len(groups[0]) for groups in stages)
    x = jnp.moveaxis(x, dimension, 0)
    rest = x.shape[1:]
    x = x.reshape(num_shards, x.shape[0] // num_shards, math.prod(rest))
    for groups in stages:
        x = jax.lax.psum_scatter(x, over, tiled=True, axis_index_groups=groups)
    return jnp.moveaxis(x.reshape(-1, *rest), 0, dimension)

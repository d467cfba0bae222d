"""The exchange of parameters and gradients between the devices of a mesh.

Left to itself the compiler sums gradients over devices as soon as they exist, once in each
micro-batch, and gathers parameters and sums gradients as it sees fit. Here (`exchanged`) every
device goes through the micro-batches of its own sequences and sums their gradients by itself.
The parameters that are sharded over `fsdp` are gathered in one of two ways:

- "step": once a step. Each device gets its shard of the summed gradients (a reduce-scatter) when
  the last micro-batch is done: (n - 1) / n of the parameters' bytes are sent twice in a step,
  whatever the number of micro-batches. A device holds the whole parameters and gradients.
- "layer": those of a layer when it is computed, forward and backward, whose gradients are scattered
  at once (Zhao et al. 2023, "PyTorch FSDP"): the bytes of the layers are sent three times in each
  micro-batch, and those of embeddings and heads, which are gathered when the model begins, twice.
  Where layers are not rematerialized, or have adapters, it is left to the compiler.

Over `data` gradients are summed once a step.

The TPU compiler makes an all-reduce of a reduce-scatter among all devices of a torus, which sends
the bytes twice, but not of one among groups of devices. On TPUs gradients are therefore scattered
in two stages (`scatter_stages`), which together send as many bytes as one reduce-scatter.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from ...data.common.errors import UserError
from ...models.config import Execution
from ...models.mesh_axes import BATCH_AXES
from ...models.nn.stack import layers_read_by
from ...models.nn.typing import Array, Params, PyTree
from ..mesh import Gather
from ..optim.parameters import is_stacked, map_named, named, split_at_stack
from ..state import TrainState
from .activations import Apply

GradientFn: TypeAlias = Callable[[Params, Params | None, PyTree, PyTree], tuple[Params, PyTree]]
"""`function(params, frozen, counts, rows) -> (gradients, sums)`, of arrays `[B, …]`."""
ONCE = ("data", "fsdp")
"""The axes of the mesh over which gradients can be summed once a step."""
LARGEST_PART = 0.9
"""The part of a device's memory that the state and whole parameters and gradients may take, if a
step that gathers parameters once is tried by default. Activations take more."""
LINEAR = re.compile(r"(?:.*/)?(?:kernel|experts/(?:gate|up|down)|output_embedding/embedding)")
"""The parameters of linear maps, untied vocabulary matrices among them: models cast them to the
dtype of their execution before anything else, and their gradients are computed in it."""
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


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to gather parameters and to exchange gradients."""

    gather: Gather
    """When parameters are gathered, "step" or "layer"."""
    axes: tuple[str, ...]
    """The axes of the mesh to sum over here, from `manual_axes`. The others are left to the
    compiler."""
    per_layer: bool
    """Whether layers gather their parameters themselves, when they are computed."""
    dtype: DTypeLike | None
    """In which the model uses its linear maps, and in which they are therefore gathered; None: that
    of the parameters."""
    micro_batches: int
    """Their number. The gradients of a single one are exchanged in `dtype`, in which they were
    computed, like those of a layer; sums over several have that of the parameters."""


def choose_exchanges(
    gather: Gather,
    mesh: Mesh,
    *,
    state: TrainState,
    state_bytes: int,
    shardings: TrainState,
    whole_batch: bool,
    micro_batches: int,
    execution: Execution,
    device_memory: int | None,
    has_adapter: bool = False,
) -> tuple[Exchange, ...]:
    """Returns how the devices of a mesh exchange gradients: the ways to try, in order.

    Args:
        gather: when parameters are gathered, as in `TrainConfig`.
        mesh: the mesh; its devices need not be present.
        state: arrays or their shapes.
        state_bytes: the bytes of the state on a device.
        shardings: of the state.
        whole_batch: whether the loss of an example depends on the other examples of its batch.
        micro_batches: their number.
        execution: of the model.
        device_memory: the bytes of a device's memory; None: unknown.
        has_adapter: whether adapters to the layers are trained, which the layers do not know.

    Raises:
        UserError: "step" does not suit the mesh or the objective.
    """
    # An adapter adds to kernels before they are cast.
    dtype = None if has_adapter else execution.dtype
    whole = whole_bytes(state, dtype, micro_batches)
    needed = state_bytes + whole
    gathers = gather_candidates(
        gather,
        mesh,
        whole_batch=whole_batch,
        fits=device_memory is not None and needed <= LARGEST_PART * device_memory,
    )

    def exchange(gather: Gather) -> Exchange:
        # Without rematerialization the whole parameters of all layers would be kept for the
        # backward pass. The compiler gathers them once more.
        recomputed = execution.remat != "none"
        per_layer = gather == "layer" and mesh.shape["fsdp"] > 1 and recomputed and not has_adapter
        by_hand = manual_axes(mesh, gather, micro_batches, gather_per_layer=per_layer)
        way = Way(gather, () if whole_batch else by_hand, per_layer, dtype, micro_batches)
        wrap = functools.partial(exchanged, way=way, mesh=mesh, shardings=shardings)
        return Exchange(wrap, describe(way, mesh, whole))

    first, *others = map(exchange, gathers)
    why = "gathered once a step they do not fit"
    return first, *(Exchange(x.wrap, f"{x.description} ({why})") for x in others)


def whole_bytes(state: TrainState, dtype: DTypeLike | None, micro_batches: int) -> int:
    """Returns what a device holds besides its state if parameters are gathered once a step.

    These are the whole parameters, their gradients and, with several micro-batches, the sums of
    these.

    Args:
        state: arrays or their shapes.
        dtype: see `Way`.
        micro_batches: their number.
    """

    def size(tree: PyTree, dtype: DTypeLike | None) -> int:
        def size(name: str, x: Array) -> int:
            return x.size * jnp.dtype(compute_dtype(name, x.dtype, dtype)).itemsize

        return sum(jax.tree.leaves(map_named(size, tree)))

    sums = size(state.params, None) * (micro_batches > 1)
    return 2 * size(state.params, dtype) + sums + size(state.frozen, dtype)


def compute_dtype(name: str, own: DTypeLike, dtype: DTypeLike | None) -> DTypeLike:
    """Returns the dtype in which a gathered parameter is held, and its gradient computed."""
    return own if dtype is None or not LINEAR.fullmatch(name) else dtype


def gather_candidates(
    gather: Gather, mesh: Mesh, *, whole_batch: bool, fits: bool
) -> tuple[Gather, ...]:
    """Returns when parameters are gathered: "step", "layer", or "step" and then "layer".

    Args:
        gather: as in `TrainConfig`.
        mesh: the mesh.
        whole_batch: whether the loss of an example depends on the other examples of its batch.
        fits: whether state, whole parameters and gradients leave memory for activations. Only the
            compiled step can tell whether these fit too.

    Raises:
        UserError: "step" does not suit the mesh or the objective.
    """
    others = [f"mesh.{axis} {n}" for axis, n in mesh.shape.items() if n > 1 and axis not in ONCE]
    if gather == "step" and (others or whole_batch):
        reason = "the loss of an example depends on its whole batch"
        raise UserError(
            "gather step lets each device compute the gradients of its own sequences from whole "
            f"parameters, but {f'here is {others[0]}' if others else reason}: choose gather layer"
        )
    if gather != "auto":
        return (gather,)
    once = mesh.shape["fsdp"] > 1 and not others and not whole_batch
    return ("step", "layer") if once and fits else ("layer",)


def describe(way: Way, mesh: Mesh, whole: int) -> str:
    """Describes the exchange of gradients in a clause.

    Args:
        way: how they are exchanged.
        mesh: the mesh, of several devices.
        whole: from `whole_bytes`.
    """
    if mesh.size == mesh.shape["tensor"]:
        return ""  # each device has all tokens, and gradients of its own part of the model
    once = "once a step" if way.micro_batches == 1 else "in each micro-batch"
    if mesh.shape["fsdp"] == 1:
        return f"gradients exchanged {'once a step' if way.axes else once}"
    if way.gather == "step":
        size = f"{whole / 1e9:,.1f} GB" if whole >= 1e9 else f"{whole / 1e6:,.1f} MB"
        return (
            "gradients exchanged once a step; parameters gathered once a step, which takes "
            f"{size} beside the state (--gather layer: less)"
        )
    by = "" if way.per_layer and way.axes else " by the compiler"
    among = " among the devices of fsdp" if way.axes and way.micro_batches > 1 else ""
    return f"parameters gathered layer by layer{by}; gradients exchanged {once}{among}"


def manual_axes(
    mesh: Mesh, gather: Gather, micro_batches: int, *, gather_per_layer: bool
) -> tuple[str, ...]:
    """Returns the axes of the mesh over which this module exchanges, and not the compiler.

    There are none on a mesh whose axes `expert`, `context` or `tensor` divide the layers: XLA's
    partitioner (of jaxlib 0.10) ends the process if a program is divided partly by hand and partly
    over several axes.

    Args:
        mesh: the mesh.
        gather: "step" or "layer".
        micro_batches: their number.
        gather_per_layer: whether layers can gather their parameters themselves.
    """
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    if not sizes.keys() <= set(ONCE):
        return ()
    axes = tuple(sizes) if gather == "step" or gather_per_layer else tuple(sizes.keys() & {"data"})
    return axes if len(axes) == len(sizes) or micro_batches > 1 else ()


def exchanged(function: GradientFn, *, way: Way, mesh: Mesh, shardings: TrainState) -> GradientFn:
    """Returns `function` run on each device for its own rows, its results summed over devices.

    Args:
        function: sums over the rows that it is given, one micro-batch after the other or at once.
        way: how. Without axes `function` is left to the compiler.
        mesh: the mesh; it must be jax's current one where the result is traced.
        shardings: of the state; gradients get those of the parameters.
    """
    axes, dtype = way.axes, way.dtype
    if not axes:
        return function
    specs = jax.tree.map(lambda s: _only(s, axes), (shardings.params, shardings.frozen))
    by_row = PartitionSpec(tuple(axis for axis in BATCH_AXES if axis in axes))
    alone = math.prod(mesh.shape[axis] for axis in axes) == mesh.size
    on_tpu = mesh.devices.flat[0].platform == "tpu"
    stages = scatter_stages(mesh.shape["fsdp"]) if on_tpu else ()

    def gathered(name: str, x: Array, spec: PartitionSpec) -> Array:
        with jax.named_scope(name):  # by which a plan tells apart what runs at the same time
            return _gathered(name, x, spec, dtype)

    def scattered(name: str, x: Array, spec: PartitionSpec, param: Array) -> Array:
        left = axes
        if way.per_layer:  # layers scattered among the devices that share the parameter
            left = tuple(axis for axis in axes if axis not in _axes(spec))
            spec = PartitionSpec()
        sent_as = compute_dtype(name, x.dtype, dtype) if way.micro_batches == 1 else x.dtype
        with jax.named_scope(name):
            return _scattered(x.astype(sent_as), spec, left, stages).astype(param.dtype)

    def on_one(
        params: Params, frozen: Params | None, counts: PyTree, rows: PyTree
    ) -> tuple[Params, PyTree]:
        if way.per_layer:
            with _reading(specs, dtype, stages):
                gradients, sums = function(params, frozen, counts, rows)
        else:
            whole, frozen = map_named(gathered, (params, frozen), specs)
            gradients, sums = function(whole, frozen, counts, rows)
        return map_named(scattered, gradients, specs[0], params), jax.lax.psum(sums, axes)

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


def _axes(spec: PartitionSpec) -> set[str]:
    """Returns the axes that an array is sharded over."""
    return {axis for _, axes in _sharded(spec) for axis in axes}


def _sharded(spec: PartitionSpec) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yields each dimension that is sharded, and the axes that it is sharded over."""
    return ((number, _names(axes)) for number, axes in enumerate(spec) if axes)


def _gathered(name: str, x: Array, spec: PartitionSpec, dtype: DTypeLike | None) -> Array:
    """Returns the whole of a parameter of which this device has a shard.

    Linear maps and embeddings are sent in `dtype`, and only linear maps are held in it.
    """
    cast = LINEAR.fullmatch(name) or EMBEDDING.fullmatch(name)
    whole, sent_as = x, x.dtype if dtype is None or not cast else dtype
    for dimension, axes in _sharded(spec):
        whole = jax.lax.all_gather(whole.astype(sent_as), axes, axis=dimension, tiled=True)
    return whole.astype(compute_dtype(name, x.dtype, dtype))


@dataclasses.dataclass(frozen=True)
class _Readers:
    """How a model gets whole parameters from shards."""

    outside: Callable[[Params], Params]
    """Gathers those that lie outside of its layers."""
    of_layer: Callable[[Params], Params]
    """Gathers those of a layer, in its variables."""


_readers: ContextVar[_Readers | None] = ContextVar("readers", default=None)
"""The readers of the step that is traced, if it exchanges parameters layer by layer."""


def reading(apply_fn: Apply) -> Apply:
    """Wraps the `apply` of the model that is trained to gather its parameters.

    It does so within a step that exchanges them layer by layer only. Other models that an objective
    calls there, such as a teacher, have whole parameters.
    """

    def apply(variables: Params, *args: object, **kwargs: object) -> object:
        readers = _readers.get()
        if readers is None:
            return apply_fn(variables, *args, **kwargs)
        variables = {**variables, "params": readers.outside(variables["params"])}
        with layers_read_by(readers.of_layer):
            return apply_fn(variables, *args, **kwargs)

    return apply


@contextmanager
def _reading(
    specs: PyTree, dtype: DTypeLike | None, stages: tuple[list[list[int]], ...]
) -> Iterator[None]:
    """Lets the model that is traced meanwhile gather shards, and scatter gradients of the whole.

    Args:
        specs: of the parameters, and of frozen ones if there are any. All stacks of a model divide
          parameters of the same name within a layer alike.
        dtype: see `Way`.
        stages: from `scatter_stages`.
    """
    of_layer: dict[str, PartitionSpec] = {}
    outside: dict[str, PartitionSpec] = {}
    for name, spec in (pair for tree in specs for pair in named(tree)):
        assert isinstance(spec, PartitionSpec)
        known, key, own = outside, name, spec
        if is_stacked(name):
            known, key, own = of_layer, split_at_stack(name)[1], PartitionSpec(*spec[1:])
        assert known.setdefault(key, own) == own, f"{name}: {own} and {known[key]}"

    def read(name: str, x: Array, spec: PartitionSpec) -> Array:
        @jax.custom_vjp
        def gather(x: Array) -> Array:
            return _gathered(name, x, spec, dtype)

        def forward(x: Array) -> tuple[Array, None]:
            return gather(x), None

        def backward(_: None, gradient: Array) -> tuple[Array]:
            return (_scattered(gradient, spec, tuple(_axes(spec)), stages).astype(x.dtype),)

        gather.defvjp(forward, backward)
        with jax.named_scope(name):
            return gather(x) if any(_sharded(spec)) else x

    def read_layer(variables: Params) -> Params:
        return {"params": map_named(lambda n, x: read(n, x, of_layer[n]), variables["params"])}

    def read_outside(params: Params) -> Params:
        return map_named(lambda n, x: x if is_stacked(n) else read(n, x, outside[n]), params)

    token = _readers.set(_Readers(read_outside, read_layer))
    try:
        yield
    finally:
        _readers.reset(token)


def scatter_stages(num_devices: int) -> tuple[list[list[int]], ...]:
    """Returns the groups of devices that sum and scatter an array in each of two stages.

    Of a · b devices in order, the first stage leaves device i · b + j the i-th of a parts of the
    sum over the devices with the same j; the second one the j-th of b parts of that, summed over
    the devices with the same i. The two are the device's shard of the whole sum.

    Args:
        num_devices: their number along the axis of the mesh.

    Returns:
        The groups of both stages, as indices along the axis; empty if the number is a prime.
    """
    inner = max(n for n in range(1, math.isqrt(num_devices) + 1) if num_devices % n == 0)
    if inner == 1:
        return ()
    indices = [list(range(first, first + inner)) for first in range(0, num_devices, inner)]
    return [list(group) for group in zip(*indices, strict=True)], indices


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

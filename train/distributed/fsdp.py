"""FSDP: the exchange of parameters and gradients between the devices of a mesh.

By default the compiler decides when to gather parameters, and sums gradients over devices once per
micro-batch. Here (`exchanged`) each device accumulates the gradients of its sequences over all
micro-batches locally. Parameters that are sharded over `fsdp` are all-gathered in one of two ways:

- "step": once per step. Gradients are reduce-scattered after the last micro-batch. (n - 1) / n of
  the parameters' bytes are sent twice per step, for any number of micro-batches. Each device holds
  the full parameters and gradients.
- "layer": per layer, in its forward and its backward pass, and the layer's gradients are
  reduce-scattered at once (Zhao et al. 2023, "PyTorch FSDP"). The bytes of layers are sent three
  times per micro-batch. Embeddings and heads are gathered at the start of the model, so their bytes
  are sent twice. Without remat, or with adapters, the compiler does it.

Over `data` gradients are summed once per step.

The TPU compiler turns a reduce-scatter over all devices of a torus into an all-reduce, which sends
twice the bytes, but it keeps one over groups of devices. On TPUs gradients are therefore scattered
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
"""The mesh axes that allow summing gradients once per step."""
LARGEST_PART = 0.9
"""Fraction of a device's memory that the state and full parameters and gradients may take for
"step" to be tried by default. Activations need the rest."""
LINEAR = re.compile(r"(?:.*/)?(?:kernel|experts/(?:gate|up|down)|output_embedding/embedding)")
"""The parameters of linear maps, including untied vocabulary matrices. Models cast them to the
compute dtype before use, and their gradients are computed in it."""
EMBEDDING = re.compile(r"(?:.*/)?token_embedding/embedding")
"""Embedding tables. Models cast them too, but use tied ones twice, for the tokens and for the
logits. Their gradient is a sum in float32."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """How the devices of a mesh exchange gradients."""

    wrap: Callable[[GradientFn], GradientFn] | None = None
    """Wraps the function that sums gradients over the rows of a batch, so that it also sums over
    devices. None on a single device."""
    description: str = ""
    """A clause for a message; empty if no gradients are exchanged."""


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to gather parameters and to exchange gradients."""

    gather: Gather
    """When parameters are gathered, "step" or "layer"."""
    axes: tuple[str, ...]
    """The mesh axes to sum over here, from `manual_axes`. The compiler handles the others."""
    per_layer: bool
    """Whether each layer gathers its parameters when it is computed."""
    dtype: DTypeLike | None
    """The compute dtype, used to gather linear maps; None for the dtype of the parameters."""
    micro_batches: int
    """The number of micro-batches. With one, gradients are exchanged in `dtype`, as they are
    computed; sums over several have the dtype of the parameters."""


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
    """Returns the ways to exchange gradients over a mesh, in the order to try them.

    Args:
        gather: when parameters are gathered, as in `TrainConfig`.
        mesh: the mesh; its devices need not be present.
        state: arrays or their shapes.
        state_bytes: the bytes of the state per device.
        shardings: of the state.
        whole_batch: whether the loss of an example depends on the other examples of its batch.
        micro_batches: their number.
        execution: of the model.
        device_memory: the memory of a device in bytes; None if unknown.
        has_adapter: whether adapters to the layers are trained.

    Raises:
        UserError: "step" does not suit the mesh or the objective.
    """
    # An adapter adds to kernels before they are cast, so they are gathered in their dtype.
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
        # Without remat the backward pass would keep the full parameters of all layers. The compiler
        # gathers them again instead.
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
    """Returns the bytes per device, besides the state, of gathering parameters once per step.

    These are the full parameters, their gradients and, with several micro-batches, their sums.

    Args:
        state: arrays or their shapes.
        dtype: see `Way`.
        micro_batches: their number.
    """

    def size(tree: PyTree, dtype: DTypeLike | None) -> int:
        def size(name: str, x: Array) -> int:
            return x.size * jnp.dtype(compute_dtype(name, x.dtype, dtype)).itemsize

        return sum(jax.tree.leaves(map_named(size, tree)))

    # Sums over micro-batches have the dtype of the parameters.
    sums = size(state.params, None) * (micro_batches > 1)
    return 2 * size(state.params, dtype) + sums + size(state.frozen, dtype)


def compute_dtype(name: str, own: DTypeLike, dtype: DTypeLike | None) -> DTypeLike:
    """Returns the dtype of a gathered parameter and of its gradient."""
    return own if dtype is None or not LINEAR.fullmatch(name) else dtype


def gather_candidates(
    gather: Gather, mesh: Mesh, *, whole_batch: bool, fits: bool
) -> tuple[Gather, ...]:
    """Returns when parameters are gathered: "step", "layer", or "step" and then "layer".

    Args:
        gather: as in `TrainConfig`.
        mesh: the mesh.
        whole_batch: whether the loss of an example depends on the other examples of its batch.
        fits: whether state, full parameters and gradients leave memory for activations. Only the
            compiled step shows whether the activations fit.

    Raises:
        UserError: "step" does not suit the mesh or the objective.
    """
    # Gathering once per step needs full parameters on each device, and a loss that is a sum over
    # examples.
    others = [f"mesh.{axis} {n}" for axis, n in mesh.shape.items() if n > 1 and axis not in ONCE]
    if gather == "step" and (others or whole_batch):
        reason = "the loss of an example depends on its whole batch"
        raise UserError(
            "gather step lets each device compute the gradients of its own sequences from whole "
            f"parameters, but {f'here is {others[0]}' if others else reason}: choose gather layer"
        )
    if gather != "auto":
        return (gather,)
    # auto: try "step" first if it is supported and may fit into memory.
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
        return ""  # each device has all tokens, and the gradients of its part of the model
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
    """Returns the mesh axes whose exchange is done here and not by the compiler.

    There are none if `expert`, `context` or `tensor` divide the layers: XLA's partitioner (jaxlib
    0.10) crashes on programs that are partly manual and partly divided over several axes.

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
    # With one micro-batch, a partly manual exchange saves nothing over the compiler's.
    return axes if len(axes) == len(sizes) or micro_batches > 1 else ()


def exchanged(function: GradientFn, *, way: Way, mesh: Mesh, shardings: TrainState) -> GradientFn:
    """Returns `function` run on each device for its rows, with results summed over devices.

    Args:
        function: sums gradients over given rows, in one or several micro-batches.
        way: how to exchange. Without axes, `function` is left to the compiler.
        mesh: the mesh; it must be jax's current mesh when the result is traced.
        shardings: of the state; gradients are sharded like the parameters.
    """
    axes, dtype = way.axes, way.dtype
    if not axes:
        return function
    # The specs of a manual program name the manual axes only.
    specs = jax.tree.map(lambda s: _only(s, axes), (shardings.params, shardings.frozen))
    by_row = PartitionSpec(tuple(axis for axis in BATCH_AXES if axis in axes))
    alone = math.prod(mesh.shape[axis] for axis in axes) == mesh.size
    on_tpu = mesh.devices.flat[0].platform == "tpu"
    stages = scatter_stages(mesh.shape["fsdp"]) if on_tpu else ()

    def gathered(name: str, x: Array, spec: PartitionSpec) -> Array:
        with jax.named_scope(name):  # lets a plan tell concurrent collectives apart
            return _gathered(name, x, spec, dtype)

    def scattered(name: str, x: Array, spec: PartitionSpec, param: Array) -> Array:
        left = axes
        if way.per_layer:  # the backward pass has already scattered over the axes of the shards
            left = tuple(axis for axis in axes if axis not in _axes(spec))
            spec = PartitionSpec()
        # A sum over micro-batches keeps its higher precision on the wire.
        sent_as = compute_dtype(name, x.dtype, dtype) if way.micro_batches == 1 else x.dtype
        with jax.named_scope(name):
            return _scattered(x.astype(sent_as), spec, left, stages).astype(param.dtype)

    def on_one(
        params: Params, frozen: Params | None, counts: PyTree, rows: PyTree
    ) -> tuple[Params, PyTree]:
        if way.per_layer:
            # Parameters stay sharded here, and each layer gathers its part.
            with _reading(specs, dtype, stages):
                gradients, sums = function(params, frozen, counts, rows)
        else:
            # Gather all parameters before the first micro-batch.
            whole, frozen = map_named(gathered, (params, frozen), specs)
            gradients, sums = function(whole, frozen, counts, rows)
        return map_named(scattered, gradients, specs[0], params), jax.lax.psum(sums, axes)

    return jax.shard_map(
        on_one,
        in_specs=(*specs, PartitionSpec(), by_row),
        out_specs=(specs[0], PartitionSpec()),
        axis_names=set(mesh.axis_names if alone else axes),
        check_vma=False,  # else the zeros that start a scan would need varying types
    )


def _only(sharding: NamedSharding, axes: tuple[str, ...]) -> PartitionSpec:
    """Restricts a sharding to some axes of the mesh."""
    return PartitionSpec(
        *(
            tuple(axis for axis in _names(dimension) if axis in axes) or None
            for dimension in sharding.spec
        )
    )


def _names(dimension: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (dimension,) if isinstance(dimension, str) else dimension or ()


def _axes(spec: PartitionSpec) -> set[str]:
    """Returns the mesh axes that shard an array."""
    return {axis for _, axes in _sharded(spec) for axis in axes}


def _sharded(spec: PartitionSpec) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yields each sharded dimension with its mesh axes."""
    return ((number, _names(axes)) for number, axes in enumerate(spec) if axes)


def _gathered(name: str, x: Array, spec: PartitionSpec, dtype: DTypeLike | None) -> Array:
    """Returns the full parameter, all-gathered from the shards.

    Linear maps and embeddings are sent in `dtype`; only linear maps are kept in it.
    """
    # Cast before sending: bfloat16 has half of the bytes of float32.
    cast = LINEAR.fullmatch(name) or EMBEDDING.fullmatch(name)
    whole, sent_as = x, x.dtype if dtype is None or not cast else dtype
    for dimension, axes in _sharded(spec):
        whole = jax.lax.all_gather(whole.astype(sent_as), axes, axis=dimension, tiled=True)
    return whole.astype(compute_dtype(name, x.dtype, dtype))


@dataclasses.dataclass(frozen=True)
class _Readers:
    """How a model gets full parameters from shards."""

    outside: Callable[[Params], Params]
    """Gathers the parameters outside of the layers."""
    of_layer: Callable[[Params], Params]
    """Gathers the parameters in the variables of a layer."""


_readers: ContextVar[_Readers | None] = ContextVar("readers", default=None)
"""The readers of the step being traced, if it gathers parameters per layer."""


def reading(apply_fn: Apply) -> Apply:
    """Wraps the `apply` of the trained model to gather its parameters.

    It gathers only in a step that does so per layer. Other models of the objective, such as a
    teacher, have full parameters.
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
    """Makes the model traced in this context gather shards and scatter gradients.

    Args:
        specs: of the parameters, and of the frozen ones if any. All stacks of a model shard
          parameters of the same name within a layer alike.
        dtype: see `Way`.
        stages: from `scatter_stages`.
    """
    # A layer sees its variables without the path of its stack, so specs are keyed by the rest.
    of_layer: dict[str, PartitionSpec] = {}
    outside: dict[str, PartitionSpec] = {}
    for name, spec in (pair for tree in specs for pair in named(tree)):
        assert isinstance(spec, PartitionSpec)
        known, key, own = outside, name, spec
        if is_stacked(name):
            known, key, own = of_layer, split_at_stack(name)[1], PartitionSpec(*spec[1:])
        assert known.setdefault(key, own) == own, f"{name}: {own} and {known[key]}"

    def read(name: str, x: Array, spec: PartitionSpec) -> Array:
        # The transpose of a gather is a scatter; here it runs in stages and in the gradient's
        # dtype.
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
    """Returns the device groups of a two-stage reduce-scatter.

    With a · b devices in order, after the first stage device i · b + j has part i of a of the sum
    over the devices with the same j. The second stage sums part j of b of that over the devices
    with the same i. The result is the device's shard of the full sum.

    Args:
        num_devices: the number of devices along the mesh axis.

    Returns:
        The groups of both stages, as indices along the axis; empty for a prime number.
    """
    # The most balanced factors of the number.
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
        axes: the axes to sum over.
        stages: from `scatter_stages`; empty for a single stage.
    """
    left = set(axes)
    for dimension, over in _sharded(spec):
        if stages:
            x = _scattered_in_stages(x, dimension, over, stages)
        else:
            x = jax.lax.psum_scatter(x, over, scatter_dimension=dimension, tiled=True)
        # A scatter also sums over its axes; the others remain for an all-reduce.
        left -= set(over)
    return jax.lax.psum(x, tuple(axis for axis in axes if axis in left)) if left else x


def _scattered_in_stages(
    x: Array, dimension: int, over: tuple[str, ...], stages: tuple[list[list[int]], ...]
) -> Array:
    """Returns this device's shard of the sum of an array along a dimension.

    A TPU stores the last two dimensions in tiles of 8 × 128, and the compiler scatters only
    multiples of a tile. The shards are therefore moved to a leading dimension.
    """
    num_shards = math.prod(len(groups[0]) for groups in stages)
    x = jnp.moveaxis(x, dimension, 0)
    rest = x.shape[1:]
    # [shards, rows of a shard, rest]: each stage scatters the first axis.
    x = x.reshape(num_shards, x.shape[0] // num_shards, math.prod(rest))
    for groups in stages:
        x = jax.lax.psum_scatter(x, over, tiled=True, axis_index_groups=groups)
    return jnp.moveaxis(x.reshape(-1, *rest), 0, dimension)

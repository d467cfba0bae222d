"""FSDP: the exchange of parameters and gradients between the devices of a mesh.

By default, the compiler chooses when to gather parameters, and sums gradients over devices once per
micro-batch. With `exchanged`, each device accumulates the gradients of its sequences over all
micro-batches locally. Parameters that are sharded over `fsdp` are all-gathered in one of two ways:

- "step": Parameters are gathered once per step, and gradients are reduce-scattered after the last
  micro-batch. With n devices along `fsdp`, (n - 1) / n of the parameter bytes are sent twice per
  step, regardless of the number of micro-batches. Each device stores the full parameters and
  gradients.
- "layer": Each layer gathers its parameters in its forward and its backward pass, and immediately
  reduce-scatters its gradients (Zhao et al. 2023, "PyTorch FSDP"). The bytes of a layer's
  parameters are therefore sent three times per micro-batch. Embeddings and heads are gathered only
  once, at the start of the model, so their bytes are sent twice. If the run uses no remat, or
  trains adapters, the compiler inserts the gathers and scatters instead.

In both ways, gradients are summed over the axis `data` once per step.

The TPU compiler turns a reduce-scatter over all devices of a torus into an all-reduce, which sends
twice the bytes, but it keeps a reduce-scatter over groups of devices. On TPUs gradients are
therefore scattered in two stages (`scatter_stages`), which together send as many bytes as a single
reduce-scatter.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar, copy_context
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from ...models.mesh_axes import BATCH_AXES, num_shards
from ...models.nn.stack import layers_read_by
from ...models.nn.typing import Array, Params, PyTree
from ..mesh import Gather
from ..optim.parameters import is_stacked, map_named, named, split_at_stack
from ..state import TrainState
from .activations import Apply
from .sharding import axes_of

GradientFn: TypeAlias = Callable[[Params, Params | None, PyTree, PyTree], tuple[Params, PyTree]]
"""`function(params, frozen, scales, rows) -> (gradients, sums)`, where rows are arrays `[B, …]`."""
LINEAR = re.compile(r"(?:.*/)?(?:kernel|experts/(?:gate|up|down)|output_embedding/embedding)")
"""Matches the parameters of linear maps, including untied vocabulary matrices. Models cast these
parameters to the compute dtype before use, and compute their gradients in this dtype."""
CAST = re.compile(rf"{LINEAR.pattern}|(?:.*/)?token_embedding/embedding")
"""Matches all parameters that models cast. A tied embedding table is used twice, for the tokens and
for the logits, so its gradient is a sum of two gradients, in float32."""


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to gather parameters and to exchange gradients."""

    gather: Gather
    """Whether parameters are gathered once per step ("step") or in each layer ("layer")."""
    axes: tuple[str, ...]
    """The mesh axes that `exchanged` sums over. The compiler sums over all other axes."""
    per_layer: bool
    """Whether this module gathers the parameters of each layer when the layer is computed."""
    dtype: DTypeLike | None
    """The compute dtype, or None for the dtype of the parameters. The parameters of linear maps are
    gathered in the compute dtype."""
    micro_batches: int
    """The number of micro-batches. With one micro-batch, gradients are computed and exchanged in
    `dtype`. With several micro-batches, the sums of the gradients are exchanged in the dtype of the
    parameters."""


def compute_dtype(
    name: str, own: DTypeLike, dtype: DTypeLike | None, cast: re.Pattern[str] = LINEAR
) -> DTypeLike:
    """Returns the dtype in which a parameter is gathered and its gradient is computed."""
    return own if dtype is None or not cast.fullmatch(name) else dtype


def exchanged(function: GradientFn, *, way: Way, mesh: Mesh, shardings: TrainState) -> GradientFn:
    """Wraps `function` to run on each device with the device's rows, and sums the results.

    Args:
        function: sums gradients over the given rows, in one or several micro-batches.
        way: the way to exchange gradients. If `way` has no axes, returns `function` unchanged.
        mesh: the mesh; it must be jax's current mesh when the result is traced.
        shardings: the shardings of the state; gradients are sharded like the parameters.
    """
    axes = way.axes
    if not axes:
        return function
    # The specs for `shard_map` must name only its manual axes.
    specs = jax.tree.map(lambda s: _only(s, axes), (shardings.params, shardings.frozen))
    # Each device gets its rows; the compiler divides these rows over the other axes.
    by_row = PartitionSpec(tuple(filter(axes.__contains__, BATCH_AXES)))
    # Whether the mesh has only a single device along every other axis.
    alone = num_shards(mesh, axes) == mesh.size
    on_tpu = mesh.devices.flat[0].platform == "tpu"
    wire = Wire(way.dtype, scatter_stages(mesh.shape["fsdp"]) if on_tpu else ())
    gathering = _gathering_per_layer if way.per_layer else _gathering_first
    # Send a sum over several micro-batches in the dtype of the sum, which has a higher precision.
    sent_dtype = way.dtype if way.micro_batches == 1 else None

    def scattered(name: str, x: Array, spec: PartitionSpec, param: Array) -> Array:
        x = x.astype(compute_dtype(name, x.dtype, sent_dtype))
        with jax.named_scope(name):
            if way.per_layer:  # the backward pass has already scattered over the shards' axes
                x = wire.scatter(x, PartitionSpec(), set(axes) - _axes(spec))
            else:
                x = wire.scatter(x, spec, set(axes))
        return x.astype(param.dtype)

    def on_one(
        params: Params, frozen: Params | None, scales: PyTree, rows: PyTree
    ) -> tuple[Params, PyTree]:
        gradients, sums = gathering(function, specs, wire)(params, frozen, scales, rows)
        # So far, gradients are sums over the rows of one device; now sum them over the devices.
        return map_named(scattered, gradients, specs[0], params), jax.lax.psum(sums, axes)

    return jax.shard_map(
        on_one,
        in_specs=(*specs, PartitionSpec(), by_row),
        out_specs=(specs[0], PartitionSpec()),
        axis_names=set(mesh.axis_names if alone else axes),
        check_vma=False,  # this check would reject the initial zeros of a scan
    )


def _only(sharding: NamedSharding, axes: tuple[str, ...]) -> PartitionSpec:
    """Returns the spec of a sharding, restricted to the given mesh axes."""
    kept = (tuple(filter(axes.__contains__, axes_of(over))) for over in sharding.spec)
    return PartitionSpec(*kept)


def _axes(spec: PartitionSpec) -> set[str]:
    """Returns all mesh axes that a spec names."""
    return set().union(*(axes for _, axes in _sharded(spec)))


def _sharded(spec: PartitionSpec) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yields the index and the mesh axes of each sharded dimension."""
    return ((number, axes_of(over)) for number, over in enumerate(spec) if over)


@dataclasses.dataclass(frozen=True)
class Wire:
    """Gathers parameters from shards, and scatters gradients to the shards."""

    dtype: DTypeLike | None
    """See `Way`."""
    stages: tuple[list[list[int]], ...] = ()
    """The device groups of each stage of a scatter, from `scatter_stages`; empty if there is a
    single stage."""

    def gather(self, name: str, x: Array, spec: PartitionSpec) -> Array:
        """Returns the full parameter, all-gathered from the shards.

        The parameters of linear maps and embeddings are sent in `dtype`. Embeddings are then cast
        back to their own dtype.
        """
        # Cast before sending, because bfloat16 takes half as many bytes as float32.
        sent, full = compute_dtype(name, x.dtype, self.dtype, CAST), x
        for dimension, axes in _sharded(spec):
            full = jax.lax.all_gather(full.astype(sent), axes, axis=dimension, tiled=True)
        return full.astype(compute_dtype(name, x.dtype, self.dtype))

    def scatter(self, x: Array, spec: PartitionSpec, axes: set[str]) -> Array:
        """Returns this device's shard of the sum of an array over some axes.

        Args:
            x: the full array.
            spec: the sharding of the result, which may name only the axis `fsdp`.
            axes: the axes to sum over.
        """
        for dimension, over in _sharded(spec):
            if self.stages:
                x = _scattered_in_stages(x, dimension, over, self.stages)
            else:
                x = jax.lax.psum_scatter(x, over, scatter_dimension=dimension, tiled=True)
        # The scatters have already summed over their axes, so all-reduce over the remaining axes.
        left = tuple(sorted(axes - _axes(spec)))
        return jax.lax.psum(x, left) if left else x


def scatter_stages(num_devices: int) -> tuple[list[list[int]], ...]:
    """Returns the device groups of a two-stage reduce-scatter.

    Let there be a · b devices, and let device (i, j) have the index i · b + j. The first stage sums
    over the devices with the same j, and gives device (i, j) the i-th of a equal parts. The second
    stage sums these parts over the devices with the same i, and gives device (i, j) the j-th of `b`
    equal parts of the sum. Each device then has its shard of the full sum.

    Args:
        num_devices: the number of devices along the mesh axis.

    Returns:
        The groups of devices in both stages, as indices along the axis; empty if the number of
        devices is prime.
    """
    # Find two factors of the number of devices that are as equal as possible.
    inner = max(n for n in range(1, math.isqrt(num_devices) + 1) if num_devices % n == 0)
    if inner == 1:
        return ()
    # Row i of `indices` has the devices (i, 0) to (i, b - 1). The groups of the first stage are the
    # columns.
    indices = [list(range(first, first + inner)) for first in range(0, num_devices, inner)]
    return list(map(list, zip(*indices, strict=True))), indices


def _scattered_in_stages(
    x: Array, dimension: int, over: tuple[str, ...], stages: tuple[list[list[int]], ...]
) -> Array:
    """Returns this device's shard of the sum of an array along a dimension.

    A TPU stores the last two dimensions in tiles of 8 × 128, and the compiler scatters only
    multiples of a tile. The dimension to scatter is therefore moved to the front.
    """
    num_shards = math.prod(len(groups[0]) for groups in stages)
    x = jnp.moveaxis(x, dimension, 0)
    others = x.shape[1:]
    # Reshape to [shards, rows of a shard, others]; each stage scatters the first dimension.
    x = x.reshape(num_shards, x.shape[0] // num_shards, math.prod(others))
    for groups in stages:
        x = jax.lax.psum_scatter(x, over, tiled=True, axis_index_groups=groups)
    # Restore the order of the dimensions: [rows of a shard, others] with the rows at `dimension`.
    return jnp.moveaxis(x.reshape(-1, *others), 0, dimension)


def _gathering_first(function: GradientFn, specs: PyTree, wire: Wire) -> GradientFn:
    """Makes `function` accept shards, and gathers all parameters before the first micro-batch."""

    def gathered(name: str, x: Array, spec: PartitionSpec) -> Array:
        with jax.named_scope(name):  # `flaxzoo plan` tells collectives apart by this name
            return wire.gather(name, x, spec)

    def gathering(
        params: Params, frozen: Params | None, scales: PyTree, rows: PyTree
    ) -> tuple[Params, PyTree]:
        params, frozen = map_named(gathered, (params, frozen), specs)
        return function(params, frozen, scales, rows)

    return gathering


def _gathering_per_layer(function: GradientFn, specs: PyTree, wire: Wire) -> GradientFn:
    """Makes `function` accept shards, and gathers each layer's parameters when it is computed."""
    # The model is traced in this context, where `reading` looks up the reader.
    context = copy_context()
    context.run(_reader.set, _ShardReader(specs, wire))

    def gathering(*args: PyTree) -> tuple[Params, PyTree]:
        return context.run(function, *args)

    return gathering


class _ShardReader:
    """Gathers the parameters that a model reads, and scatters their gradients."""

    def __init__(self, specs: PyTree, wire: Wire) -> None:
        """Creates the reader.

        Args:
            specs: the specs of the parameters, including any frozen ones. If a model has several
              stacks, parameters with the same name within a layer must have the same sharding in
              all stacks.
            wire: gathers the parameters and scatters the gradients.
        """
        self._wire = wire
        # The variable names within a layer do not include the path of the stack, so the keys of the
        # specs do not include it either.
        self._of_layer: dict[str, PartitionSpec] = {}
        self._outside: dict[str, PartitionSpec] = {}
        for name, leaf in itertools.chain(*map(named, specs)):
            spec = cast(PartitionSpec, leaf)
            if is_stacked(name):
                self._of_layer[split_at_stack(name)[1]] = PartitionSpec(*spec[1:])
            else:
                self._outside[name] = spec

    def read_layer(self, variables: Params) -> Params:
        """Gathers the parameters of a layer."""
        return {"params": map_named(self._read(self._of_layer), variables["params"])}

    def read_outside(self, params: Params) -> Params:
        """Gathers the parameters that do not belong to layers."""
        return map_named(self._read(self._outside), params)

    def _read(self, specs: dict[str, PartitionSpec]) -> Callable[[str, Array], Array]:
        """Returns a function that gathers a parameter if `specs` contains its sharding."""

        def read(name: str, x: Array) -> Array:
            spec = specs.get(name, PartitionSpec())
            if not any(_sharded(spec)):
                return x
            # The backward pass of a gather is a scatter. Define it explicitly, so that it runs in
            # stages and in the gradient's dtype.
            gather = jax.custom_vjp(lambda x: self._wire.gather(name, x, spec))

            def forward(x: Array) -> tuple[Array, None]:
                return gather(x), None

            def backward(_: None, gradient: Array) -> tuple[Array]:
                return (self._wire.scatter(gradient, spec, _axes(spec)).astype(x.dtype),)

            gather.defvjp(forward, backward)
            with jax.named_scope(name):
                return gather(x)

        return read


_reader: ContextVar[_ShardReader | None] = ContextVar("reader", default=None)
"""The reader of the step being traced, if it gathers parameters per layer."""


def reading(apply_fn: Apply) -> Apply:
    """Wraps the `apply` of the trained model, so that it can gather its own parameters.

    The model gathers its parameters only in a step that gathers per layer. The parameters of other
    models of the objective, such as a teacher, are not sharded.
    """

    def apply(variables: Params, *args: object, **kwargs: object) -> object:
        reader = _reader.get()
        if reader is None:
            return apply_fn(variables, *args, **kwargs)
        variables = {**variables, "params": reader.read_outside(variables["params"])}
        with layers_read_by(reader.read_layer):
            return apply_fn(variables, *args, **kwargs)

    return apply

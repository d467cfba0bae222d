"""The mesh, and how parameters and batches are sharded over it.

The rules of the families (`models.registry.Family.parameter_axes`) name the logical axis of each
dimension of a parameter; `MESH_AXES` says over which axis of the mesh a logical axis is sharded.
Models know nothing of the mesh.

Of a batch rows are cut along `BATCH_AXES` and tokens along `CONTEXT`: the
compiler then gathers the keys and values of a row, layer by layer, for the
queries of each part, and nothing else of a row is whole anywhere.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ...data.errors import UserError
from ...models.config import divisors
from ...models.nn.fused_attention import FusedAttention
from ...models.nn.stack import Layer
from ...models.registry import families
from ..config import MeshConfig
from ..state import TrainState
from ..tree import path_name

BATCH_AXES = ("data", "fsdp")
"""Rows of a batch are cut along both."""
CONTEXT = "context"
"""Tokens of a row are cut along it."""
MESH_AXIS_NAMES = (*BATCH_AXES, CONTEXT, "tensor")

MESH_AXES: dict[str | None, str | None] = {
    "model": "fsdp",
    "vocabulary": "tensor",
    "heads": "tensor",
    "feed_forward": "tensor",
    "layers": None,
    None: None,
}


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Lays out all devices (or those given) as `config` says.

    Raises:
      UserError: the sizes do not multiply to the number of devices.
    """
    # Those of a process side by side, so that it reads rows that follow each other.
    in_order = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    devices = in_order if devices is None else devices
    sizes = {name: getattr(config, name) for name in MESH_AXIS_NAMES}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) == 1 and fixed > 0 and len(devices) % fixed == 0:
        sizes[free[0]] = len(devices) // fixed
    shape = tuple(sizes.values())
    if math.prod(shape) != len(devices) or min(shape) < 1:
        asked = ", ".join(f"mesh.{name} {size}" for name, size in sizes.items())
        raise UserError(
            f"{asked} do not multiply to the {len(devices)} devices: "
            "give sizes that do, at most one of them -1 (all that are left)"
        )
    kinds = (AxisType.Auto,) * len(MESH_AXIS_NAMES)
    return Mesh(np.asarray(devices).reshape(shape), MESH_AXIS_NAMES, axis_types=kinds)


def parameter_spec(name: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """How one parameter lies on the mesh.

    Raises:
      UserError: not exactly one rule matches the path, or a dimension cannot
        be cut evenly.
    """
    rules = {rule for family in families().values() for rule in family.parameter_axes.items()}
    matches = [axes for pattern, axes in rules if re.fullmatch(pattern, name)]
    if len(matches) != 1 or len(matches[0]) != len(shape):
        raise UserError(
            f"parameter {name} {shape} matches {len(matches)} rules in the parameter_axes of the "
            "families: exactly one must name its dimensions"
        )
    spec = [MESH_AXES[axis] for axis in matches[0]]
    for size, axis in zip(shape, spec, strict=True):
        if axis is not None and size % mesh.shape[axis]:
            choices = ", ".join(map(str, divisors(size)))
            raise UserError(
                f"parameter {name} {shape}: dimension {size} cannot be cut along mesh.{axis} "
                f"{mesh.shape[axis]}: choose it from {choices}, or change the dimension"
            )
    return PartitionSpec(*spec)


def parameter_shardings(params: Any, mesh: Mesh) -> Any:
    """Where each parameter (or its shape) lies.

    Raises:
      UserError: one cannot be cut as the mesh asks for.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, x: NamedSharding(mesh, parameter_spec(path_name(path), x.shape, mesh)), params
    )


def state_shardings(state: TrainState, tx: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Where each array of a state (or of its shapes) lies; moments lie as their parameter."""
    replicated = NamedSharding(mesh, PartitionSpec())
    params = parameter_shardings(state.params, mesh)
    opt_state = optax.tree_utils.tree_map_params(
        tx,
        lambda _, sharding: sharding,
        state.opt_state,
        params,
        transform_non_params=lambda _: replicated,
    )
    return TrainState(replicated, params, opt_state)


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Where whole rows of a batch lie."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def rows_apart(mesh: Mesh) -> int:
    """Into how many parts the rows of a batch are cut."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def check_batch(mesh: Mesh, batch_size: int, length: int, micro_batches: int = 1) -> None:
    """Raises ValueError if rows, or the tokens of a row, cannot be dealt out evenly."""
    check_batch_divides(batch_size, rows_apart(mesh), micro_batches)
    if length % mesh.shape[CONTEXT]:
        choices = ", ".join(map(str, divisors(length)))
        raise UserError(
            f"data.length {length} cannot be cut along mesh.{CONTEXT} {mesh.shape[CONTEXT]}: "
            f"choose it from {choices}, or change the length"
        )


def batch_sharding(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """Where an array lies: cut along its rows, and along its last axis, tokens, if they divide."""
    tokens = (None,) * (len(shape) - 2)
    if len(shape) > 1 and shape[-1] % mesh.shape[CONTEXT] == 0:
        tokens = (*tokens, CONTEXT)
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES, *tokens))


def rows_stay_apart(apply_fn: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """A model's `apply` with the residual stream cut along its rows, before and after each layer.

    Left to itself the compiler follows the parameters, whose width is cut along `fsdp`: every
    device then computes attention for the rows of all, and sums of whole activations are
    exchanged in each layer.  Held to the rows, it gathers a layer's parameters when they are due.
    """
    lies = NamedSharding(mesh, PartitionSpec(BATCH_AXES, PartitionSpec.UNCONSTRAINED))

    def around_layer(layer: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        if not isinstance(context.module, Layer) or context.method_name != "__call__":
            return layer(*args, **kwargs)
        x, *rest = args
        x, out = layer(jax.lax.with_sharding_constraint(x, lies), *rest, **kwargs)
        return jax.lax.with_sharding_constraint(x, lies), out

    def apply(*args: Any, **kwargs: Any) -> Any:
        with nn.intercept_methods(around_layer):
            return apply_fn(*args, **kwargs)

    return apply


def kernels_apart(apply_fn: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """A model's `apply` whose attention kernels run on each device, for its rows and heads.

    The compiler cannot cut a kernel: left to itself it gathers what lies apart.
    """

    def lies(x: jax.Array) -> PartitionSpec:
        if x.ndim == 4:
            return PartitionSpec(BATCH_AXES, None, MESH_AXES["heads"])
        return PartitionSpec(BATCH_AXES) if x.ndim == 2 else PartitionSpec()

    def around_kernel(kernel: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        if not isinstance(context.module, FusedAttention) or context.method_name != "__call__":
            return kernel(*args, **kwargs)
        query, *_ = args
        apart = jax.shard_map(
            kernel,
            mesh=mesh,
            in_specs=jax.tree.map(lies, args),
            out_specs=lies(query),
            check_vma=False,  # of kernels nobody has said along which axes they differ
        )
        return apart(*args)

    def apply(*args: Any, **kwargs: Any) -> Any:
        with nn.intercept_methods(around_kernel):
            return apply_fn(*args, **kwargs)

    return apply


@functools.cache
def process_part(mesh: Mesh) -> tuple[int, int]:
    """Which part of each batch the devices of this process hold, and of how many parts.

    Processes that share rows, cut along `context` or `tensor`, read the same part.

    Raises:
      UserError: the rows of some process are not one of equal parts.
    """
    number = rows_apart(mesh)
    lies = row_sharding(mesh).devices_indices_map((number,))
    held: dict[int, set[int]] = {}
    for device, (rows,) in lies.items():
        held.setdefault(device.process_index, set()).add(rows.indices(number)[0])
    wide = len(held[jax.process_index()])
    for process, rows in held.items():
        first = min(rows)
        if first % wide or rows != set(range(first, first + wide)):
            sizes = ", ".join(f"mesh.{name} {size}" for name, size in mesh.shape.items())
            raise UserError(
                f"{sizes}: process {process} of {len(held)} would hold rows that are not one of "
                f"equal parts of a batch: choose mesh.{CONTEXT} × mesh.tensor to divide the "
                f"{mesh.size // len(held)} devices of a process, or to be a multiple of them"
            )
    return min(held[jax.process_index()]) // wide, number // wide


def check_batch_divides(batch_size: int, devices: int, micro_batches: int = 1) -> None:
    """Raises ValueError if not every device gets equally many rows of every micro-batch."""
    parts = devices * micro_batches
    if batch_size % parts:
        cut = f" in {micro_batches} micro-batches" if micro_batches > 1 else ""
        raise UserError(
            f"batch_size {batch_size} cannot be dealt out to {devices} devices{cut}: "
            f"choose a multiple of {parts}"
        )


def shard_batch(batch: dict[str, Any], mesh: Mesh) -> dict[str, jax.Array]:
    """Places this process's rows; together the processes hold the global batch."""
    parts = process_part(mesh)[1]

    def place(rows: Any) -> jax.Array:
        shape = (parts * rows.shape[0], *rows.shape[1:])
        return jax.make_array_from_process_local_data(batch_sharding(mesh, shape), rows, shape)

    return {name: place(rows) for name, rows in batch.items()}

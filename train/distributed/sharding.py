"""The mesh, and how parameters and batches are sharded over it.

The rules of a model's family (`models.registry.Family.parameter_axes`) name the logical axis of
each dimension of a parameter, and `MESH_AXES` maps logical axes to mesh axes. The code of the
models is independent of the mesh.

The sequences of a batch are sharded over `BATCH_AXES`, and their tokens over `CONTEXT`. If tokens
are sharded, attention kernels rotate keys and values around a ring (`ring_attention`). With XLA's
attention, the compiler all-gathers keys and values in each layer, but keeps all other arrays
sharded over the tokens.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ...data.common.errors import UserError, counted
from ...data.common.fields import require
from ...models.adapters.lora import A, B
from ...models.config import TransformerConfig, divisors_of
from ...models.mesh_axes import BATCH_AXES, CONTEXT, MESH_AXES, MESH_AXIS_NAMES, num_shards
from ...models.nn.typing import PyTree
from ...models.registry import families_of
from ..mesh import MeshConfig
from ..optim.parameters import MatrixAxes, map_named, matrix_axes, named
from ..state import TrainState

LogicalAxes = tuple[str | None, ...]
"""The logical axis of each dimension of a parameter."""


def make_mesh(
    config: MeshConfig,
    devices: Sequence[object] | None = None,
    *,
    stored_in: Path | None = None,
) -> Mesh:
    """Makes a mesh of the given devices (by default, all devices) with the sizes in `config`.

    Args:
        config: the sizes. If another size is -1, a size `data` of -1 means 1.
        devices: the devices. Defaults to all devices.
        stored_in: the file of a run that contains the sizes, for the error message.

    Raises:
        UserError: the product of the sizes is not the number of devices.
    """
    # Order devices by process, so that each process reads consecutive sequences of a batch.
    in_order = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    devices = in_order if devices is None else devices
    data, *others = (getattr(config, name) for name in MESH_AXIS_NAMES)
    # The default of `data` is -1, which must not conflict with another size of -1.
    data = 1 if data == -1 and -1 in others else data
    try:
        grid = np.asarray(devices).reshape([data, *others])  # -1: all remaining devices
    except ValueError:
        default = dataclasses.asdict(MeshConfig())
        given = dataclasses.asdict(config).items() - default.items()
        shown = " × ".join(f"mesh.{name} {size}" for name, size in sorted(given))
        remedy = " ".join(f"mesh.{name} {default[name]}" for name, _ in sorted(given))
        require(
            stored_in is None,
            f"the mesh of the run ({shown.replace('mesh.', '')}) does not fit the "
            f"{counted(len(devices), 'device')}: give {remedy} (sizes without an option are from "
            f"{stored_in})",
        )
        raise UserError(
            f"{shown}: the sizes do not multiply to the {counted(len(devices), 'device')}: "
            "give sizes whose product is the number of devices; at most one size may be -1, which "
            "means all remaining devices"
        ) from None
    kinds = (AxisType.Auto,) * len(MESH_AXIS_NAMES)
    return Mesh(grid, MESH_AXIS_NAMES, axis_types=kinds)


def divided_axes(mesh: Mesh) -> dict[str, int]:
    """Returns the sizes of the mesh axes that have several devices."""
    return {axis: size for axis, size in mesh.shape.items() if size > 1}


def parameter_spec(
    name: str, shape: tuple[int, ...], mesh: Mesh, model: TransformerConfig | None = None
) -> PartitionSpec:
    """Returns the mesh axes that a parameter's dimensions are sharded over.

    The two factors of an adapter are sharded like the kernel that it adapts; the rank is not
    sharded.

    Args:
        name: the parameter's path.
        shape: the parameter's shape.
        mesh: from `make_mesh`.
        model: the configuration of the model, whose family defines the rules. If None, the rules of
          all families apply.

    Raises:
        UserError: no rule or several rules match the path, or a dimension cannot be divided evenly.
    """
    if name.startswith("auxiliary/"):  # an auxiliary model of the objective, which is replicated
        return PartitionSpec()
    several = set(divided_axes(mesh))
    spec: list[tuple[str, ...]] = []
    for size, logical in zip(shape, _logical_axes(name, shape, model), strict=True):
        # If several dimensions map to the same mesh axis, only the first is sharded over it.
        axes = tuple(filter(several.__contains__, MESH_AXES[logical]))
        several -= {*axes}
        over = " × ".join(f"mesh.{axis} {mesh.shape[axis]}" for axis in axes)
        require(
            size % num_shards(mesh, axes) == 0,
            f"parameter {name} {shape}: dimension {size} cannot be sharded over {over}: choose a "
            f"value from {divisors_of(size)}, or change the dimension",
        )
        spec.append(axes)
    return PartitionSpec(*spec)


def _logical_axes(
    name: str, shape: tuple[int, ...], model: TransformerConfig | None
) -> LogicalAxes:
    """Returns the logical axis of each dimension of a parameter, according to family rules."""
    # If the model is unknown, exactly one of the rules of all families must match.
    rules = {rule for family in families_of(model) for rule in family.parameter_axes.items()}
    parent, slash, leaf = name.rpartition("/")
    # The factors of an adapter use the rule for the kernel that it adapts, but have different axes.
    stored = f"{parent}{slash}kernel" if leaf in (A, B) else name
    candidates = (
        _factor_axes(leaf, axes, len(shape))
        for pattern, axes in rules
        if re.fullmatch(pattern, stored)
    )
    # The scale of the query normalization covers one head in some families and all heads in others,
    # so choose the rule that has the right number of axes.
    matches = [axes for axes in candidates if len(axes) == len(shape)]
    where = "all families" if model is None else "its family"
    require(
        len(matches) == 1,
        f"parameter {name} {shape} matches {len(matches)} rules in the parameter_axes of {where}: "
        "exactly one rule must match; change the patterns of the model's FAMILY, or give the "
        "model's configuration, which names the family",
    )
    return matches[0]


def _factor_axes(leaf: str, axes: LogicalAxes, ndim: int) -> LogicalAxes:
    """Returns the logical axes of an adapter's factor, given its kernel's; for others, `axes`."""
    if leaf == A:  # [L, *inputs, r]
        return (*axes[: ndim - 1], None)
    if leaf == B:  # [L, r, *outputs]
        first = axes.count("layers")
        return (*axes[:first], None, *axes[first + 1 - ndim :])
    return axes


def axes_of(over: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the mesh axes that an entry of a PartitionSpec names."""
    return (over,) if isinstance(over, str) else over or ()


def parameter_shardings(
    params: PyTree, mesh: Mesh, model: TransformerConfig | None = None
) -> PyTree:
    """Returns the sharding of each parameter.

    Args:
        params: the parameters, or their shapes; None if there are none.
        mesh: from `make_mesh`.
        model: the configuration of the model, whose family defines the rules that name the axes of
          each parameter. If None, exactly one of the rules of all families must match each
          parameter.

    Raises:
        UserError: a parameter cannot be divided over the mesh.
    """
    return map_named(
        lambda name, x: NamedSharding(mesh, parameter_spec(name, x.shape, mesh, model)), params
    )


def moment_spec(
    field: str,
    shape: tuple[int, ...],
    whole: PartitionSpec,
    *,
    mesh: Mesh,
    axes: MatrixAxes | None,
) -> PartitionSpec:
    """Returns the partition spec of an array that belongs to a moment of the optimizer.

    Args:
        field: the kind of array: "" or "codes" for an array of the parameter's shape; "scales" for
          the scales of blocks along the last axis; "rows" or "columns" for means over the output or
          the input axes.
        shape: the array's shape.
        whole: the spec of the parameter that the moment belongs to.
        mesh: from `make_mesh`.
        axes: the axes of the parameter's matrix; None if it is not a matrix.

    Returns:
        The parameter's spec, without the dimensions that the array does not have. The last
        dimension of scales is replicated if the shards would divide a block.
    """
    # Means have only the axes that remain after averaging, which are sharded like the parameter's
    # axes. Only matrices have such means.
    if field in ("rows", "columns"):
        matrix = cast(MatrixAxes, axes)
        removed = matrix.outputs if field == "rows" else matrix.inputs
        return PartitionSpec(*(over for axis, over in enumerate(whole) if axis not in removed))
    if field != "scales":
        return whole
    *leading, last = whole
    # Each block must lie within one shard.
    shards = num_shards(mesh, axes_of(last))
    return PartitionSpec(*leading, last if shape[-1] % shards == 0 else None)


def state_shardings(
    state: TrainState, mesh: Mesh, model: TransformerConfig | None = None
) -> TrainState:
    """Returns the sharding of each array of a train state.

    Moments, quantized or not, are sharded like their parameters (`moment_spec`), and frozen
    parameters are sharded by the same rules as trained parameters. The path of an array in the
    optimizer state shows whether it is a moment, and names its parameter.

    Args:
        state: the state, as arrays or their shapes.
        mesh: from `make_mesh`.
        model: the configuration of the model; see `parameter_shardings`.

    Raises:
        UserError: a parameter cannot be divided over the mesh.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    params = parameter_shardings(state.params, mesh, model)
    frozen = parameter_shardings(state.frozen, mesh, model)
    shapes = {name: x.shape for name, x in named(state.params)}
    # The path of a moment ends with the path of its parameter, followed by the name of a field,
    # such as `codes`, if the moment consists of several arrays.
    moment = re.compile(rf"(?:.*?/)??({'|'.join(map(re.escape, shapes))})(?:/(\w+))?")

    def sharding(path: str, x: jax.Array | jax.ShapeDtypeStruct) -> NamedSharding:
        match = moment.fullmatch(path)
        if match is None:
            return replicated
        name, field = match.groups(default="")
        if not field and x.shape != shapes[name]:
            return replicated
        whole = parameter_spec(name, shapes[name], mesh, model)
        axes = matrix_axes(name, len(shapes[name]))
        return NamedSharding(mesh, moment_spec(field, x.shape, whole, mesh=mesh, axes=axes))

    opt_state = map_named(sharding, state.opt_state)
    # Auxiliary models may belong to any family, so they are replicated.
    auxiliary = jax.tree.map(lambda _: replicated, state.auxiliary)
    return TrainState(replicated, params, opt_state, frozen, auxiliary)


def has_virtual_devices() -> bool:
    """Returns whether the devices are virtual devices of a CPU, which share its threads.

    A device of XLA's CPU client runs a limited number of programs at once, including programs that
    wait for a collective. If many programs are queued, the collective itself may never start. A
    caller that starts several programs must therefore wait for each one before it starts the next.
    """
    return jax.default_backend() == "cpu" and jax.local_device_count() > 1


def num_batch_shards(mesh: Mesh) -> int:
    """Returns the number of shards into which the sequences of a batch are divided."""
    return num_shards(mesh, BATCH_AXES)


def check_batch(mesh: Mesh, batch_size: int, length: int, micro_batches: int = 1) -> None:
    """Raises UserError if the mesh cannot evenly divide a batch or the tokens of a sequence."""
    devices, context = num_batch_shards(mesh), mesh.shape[CONTEXT]
    parts = devices * micro_batches
    require(
        batch_size % parts == 0,
        f"batch_size {batch_size} cannot be divided over {devices} devices in micro_batches "
        f"{micro_batches}: choose a multiple of {parts}",
    )
    require(
        length % context == 0,
        f"data.length {length} cannot be sharded over mesh.{CONTEXT} {context}: choose a value "
        f"from {divisors_of(length)}, or change the length",
    )


def batch_sharding(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """Returns the sharding of an array of a batch: its first axis over `BATCH_AXES`.

    The last axis (tokens) is sharded over `CONTEXT` if its size is a multiple of the size of that
    mesh axis.
    """
    # Axes between the row axis and the token axis, such as choices, are not sharded.
    tokens = (None,) * (len(shape) - 2)
    if len(shape) > 1 and shape[-1] % mesh.shape[CONTEXT] == 0:
        tokens = (*tokens, CONTEXT)
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES, *tokens))


@functools.cache
def process_shard(mesh: Mesh) -> tuple[int, int]:
    """Returns the index of this process's share of each batch, and the number of shares.

    Processes read the same share if their devices work on the same sequences, which `context` or
    `tensor` shards.

    Raises:
        UserError: the processes would need shares of different sizes.
    """
    number = num_batch_shards(mesh)
    by_sequence = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    # Find the shards of a batch that are on the devices of each process.
    shards: dict[int, set[int]] = {}  # process → the shards on its devices
    for device, (rows,) in by_sequence.devices_indices_map((number,)).items():
        shards.setdefault(device.process_index, set()).add(rows.indices(number)[0])
    local = shards[jax.process_index()]
    size = len(local)
    # The `size` shards of a process must be consecutive, and the index of the first must be a
    # multiple of `size`.
    aligned = [set(range(first, first + size)) for first in range(0, number, size)]
    sizes = ", ".join(f"mesh.{name} {length}" for name, length in mesh.shape.items())
    require(
        all(part in aligned for part in shards.values()),
        f"{sizes}: a batch cannot be divided equally over {len(shards)} processes: the "
        f"{mesh.size // len(shards)} devices of a process must be a multiple or a divisor of "
        f"mesh.{CONTEXT} × mesh.tensor; change these sizes",
    )
    return min(local) // size, number // size


def shard_batch(batch: Mapping[str, np.ndarray | jax.Array], mesh: Mesh) -> dict[str, jax.Array]:
    """Places this process's share of a batch on its devices, and returns the global batch."""
    parts = process_shard(mesh)[1]

    def put(rows: np.ndarray | jax.Array) -> jax.Array:
        # All processes have shares of the same size.
        shape = (parts * rows.shape[0], *rows.shape[1:])
        return jax.make_array_from_process_local_data(batch_sharding(mesh, shape), rows, shape)

    return {name: put(rows) for name, rows in batch.items()}

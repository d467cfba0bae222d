"""The mesh, and the one table that says how parameters lie on it.

A parameter's path is matched against `PARAMETER_AXES`, which names the logical
axis of each of its dimensions; `MESH_AXES` says along which axis of the mesh a
logical axis is cut.  Models know nothing of this.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..models.config import divisors
from .config import MeshConfig
from .optimizer import path_name
from .state import TrainState

MESH_AXIS_NAMES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")
"""Rows of a batch are cut along both."""

_STACK = r"((encoder|decoder)/)?layers"
_ATTENTION = rf"{_STACK}/(cross_)?attention"

PARAMETER_AXES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"(token|source|output)_embedding/embedding", ("vocabulary", "model")),
    (r"((encoder|decoder)/)?(position|token_type)_embedding/embedding", (None, "model")),
    (rf"{_ATTENTION}/(query|key|value)/kernel", ("layers", "model", "heads", None)),
    (rf"{_ATTENTION}/(query|key|value)/bias", ("layers", "heads", None)),
    (rf"{_ATTENTION}/output/kernel", ("layers", "heads", None, "model")),
    (rf"{_STACK}/feed_forward/up/kernel", ("layers", "model", "feed_forward")),
    (rf"{_STACK}/feed_forward/up/bias", ("layers", "feed_forward")),
    (rf"{_STACK}/feed_forward/down/kernel", ("layers", "feed_forward", "model")),
    (rf"{_STACK}/((cross_)?attention/output|feed_forward/down)/bias", ("layers", None)),
    (rf"{_STACK}/((cross_)?attention|feed_forward)_norm/(scale|bias)", ("layers", None)),
    (r"((encoder|decoder)/)?final_norm/(scale|bias)", (None,)),
    (r"(embedding_norm|head/transform_norm)/(scale|bias)", (None,)),
    (r"(pooler|head/(transform|next_sentence|classifier|span))/kernel", ("model", None)),
    (r"(pooler|head/(transform|next_sentence|classifier|span))/bias", (None,)),
    (r"(head/|output_)bias", ("vocabulary",)),
)

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
      ValueError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {name: getattr(config, name) for name in MESH_AXIS_NAMES}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) == 1 and fixed > 0 and len(devices) % fixed == 0:
        sizes[free[0]] = len(devices) // fixed
    shape = tuple(sizes.values())
    if math.prod(shape) != len(devices) or min(shape) < 1:
        asked = ", ".join(f"mesh.{name} {size}" for name, size in sizes.items())
        raise ValueError(
            f"{asked} do not multiply to the {len(devices)} devices here: "
            "give sizes that do, at most one of them -1 (all that are left)"
        )
    return Mesh(
        np.asarray(devices).reshape(shape), MESH_AXIS_NAMES, axis_types=(AxisType.Auto,) * 3
    )


def parameter_spec(name: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """How one parameter lies on the mesh.

    Raises:
      ValueError: not exactly one row of the table fits, or a dimension cannot
        be cut evenly.
    """
    rows = [axes for pattern, axes in PARAMETER_AXES if re.fullmatch(pattern, name)]
    if len(rows) != 1 or len(rows[0]) != len(shape):
        raise ValueError(
            f"parameter {name} {shape} fits {len(rows)} rows of PARAMETER_AXES: exactly one "
            "must name its dimensions"
        )
    spec = [MESH_AXES[axis] for axis in rows[0]]
    for size, axis in zip(shape, spec, strict=True):
        if axis is not None and size % mesh.shape[axis]:
            choices = ", ".join(map(str, divisors(size)))
            raise ValueError(
                f"parameter {name} {shape}: dimension {size} cannot be cut along mesh.{axis} "
                f"{mesh.shape[axis]}: choose it from {choices}, or change the dimension"
            )
    return PartitionSpec(*spec)


def parameter_shardings(params: Any, mesh: Mesh) -> Any:
    """Where each parameter (or its shape) lies.

    Raises:
      ValueError: one cannot be cut as the mesh asks for.
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


def batch_sharding(mesh: Mesh, batch_size: int, micro_batches: int = 1) -> NamedSharding:
    """Where the rows of a batch lie.

    Raises:
      ValueError: the rows cannot be dealt out evenly.
    """
    parts = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    check_batch_divides(batch_size, parts, micro_batches)
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def check_batch_divides(batch_size: int, devices: int, micro_batches: int = 1) -> None:
    """Raises ValueError if not every device gets equally many rows of every micro-batch."""
    parts = devices * micro_batches
    if batch_size % parts:
        cut = f" in {micro_batches} micro-batches" if micro_batches > 1 else ""
        raise ValueError(
            f"batch_size {batch_size} cannot be dealt out to {devices} devices{cut}: "
            f"choose a multiple of {parts}"
        )


def shard_batch(batch: dict[str, Any], sharding: NamedSharding) -> dict[str, jax.Array]:
    """Places this process's rows; together the processes hold the global batch."""
    return {
        name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()
    }

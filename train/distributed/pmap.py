"""Data parallelism by `pmap`: each device has a copy of the model and a share of each batch.

This module wraps the function that sums gradients. The result is the same as with `jit` over the
mesh axis `data`. Prefer `jit`, because `pmap` is an older interface of jax.
"""

import functools

import jax
from jax.sharding import AbstractMesh, Mesh

from ...data.common.fields import require
from ...models.mesh_axes import MESH_AXIS_NAMES
from ...models.nn.typing import Array, Params, PyTree
from ..config import TrainConfig
from .fsdp import GradientFn
from .gradient_exchange import Exchange

AXIS = "devices"


def pmap_exchange(mesh: Mesh, *, whole_batch: bool) -> Exchange:
    """Returns the exchange that sums gradients by `pmap` over the devices of a mesh.

    Args:
        mesh: a mesh of one process whose axes, except for `data`, have size 1.
        whole_batch: whether the loss of an example depends on the other examples of its batch.

    Raises:
        UserError: `whole_batch` is True, but each device would see only a part of the batch.
    """
    require(
        not whole_batch,
        "the objective compares the examples of a batch with each other, but under pmap each "
        "device would see only a part of the batch: choose parallel jit",
    )
    return Exchange(functools.partial(_pmapped, mesh=mesh))


def _pmapped(function: GradientFn, *, mesh: Mesh) -> GradientFn:
    """Wraps `function` to run by `pmap` on each device for its rows, and sums the results."""

    def summed(
        params: Params, frozen: Params | None, scales: PyTree, rows: tuple[PyTree, Array]
    ) -> tuple[Params, PyTree]:
        batch, keys = rows

        def on_one(
            params: Params, frozen: Params | None, scales: PyTree, batch: PyTree, data: Array
        ) -> tuple[Params, PyTree]:
            # Convert the raw key data back to typed keys.
            rows = batch, jax.random.wrap_key_data(data, impl=jax.random.key_impl(keys))
            return jax.lax.psum(function(params, frozen, scales, rows), AXIS)

        mapped = jax.pmap(
            on_one,
            AXIS,
            in_axes=(None, None, None, 0, 0),
            out_axes=None,
            devices=mesh.devices.flatten().tolist(),
        )
        # [B, …] → [devices, B / devices, …]. pmap cannot split typed keys, so pass their raw data.
        parts = jax.tree.map(
            lambda x: x.reshape(mesh.size, -1, *x.shape[1:]), (batch, jax.random.key_data(keys))
        )
        # pmap makes its own mesh with a different axis, so unset the step's mesh during the call.
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return mapped(params, frozen, scales, *parts)

    return summed


def check_pmap(config: TrainConfig) -> None:
    """Checks that a pmap run uses no feature that needs `jit`.

    Raises:
        UserError: the run uses a feature that pmap does not support.
    """
    if config.parallel != "pmap":
        return
    require(
        jax.process_count() == 1,
        f"parallel pmap requires a single process, got {jax.process_count()}: leave it out "
        f"(--parallel jit)",
    )
    sizes = {f"mesh.{name}": getattr(config.mesh, name) for name in MESH_AXIS_NAMES[1:]}
    defaults = {**dict.fromkeys(sizes, 1), "gather": "auto"}
    for name, value in {**sizes, "gather": config.gather}.items():
        require(
            value == defaults[name],
            f"{name} {value} requires --parallel jit, because under pmap every device has "
            f"the whole model: leave one of them out",
        )

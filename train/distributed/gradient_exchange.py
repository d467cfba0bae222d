"""Chooses how the devices of a mesh exchange gradients and gather parameters (`fsdp`)."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from ...data.common.fields import require
from ...models.config import Execution
from ...models.nn.typing import Array, PyTree
from ..mesh import Gather
from ..optim.parameters import map_named
from ..state import TrainState, in_units
from .fsdp import GradientFn, Way, compute_dtype, exchanged

ONCE = ("data", "fsdp")
"""The mesh axes that allow summing gradients once per step."""
LARGEST_PART = 0.9
"""By default, "step" is tried only if the state, the full parameters and the gradients take at most
this fraction of a device's memory. Activations need the remaining memory."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The method that the devices of a mesh use to exchange gradients."""

    wrap: Callable[[GradientFn], GradientFn] | None = None
    """Wraps the function that sums gradients over the rows of a batch, so that it also sums over
    devices. None on a single device."""
    description: str = ""
    """A clause for a message; empty if no gradients are exchanged."""


def choose_exchanges(
    gather: Gather,
    mesh: Mesh,
    *,
    state: TrainState,
    state_bytes: int,
    shardings: TrainState,
    whole_batch: bool,
    by_rows: bool,
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
        shardings: the shardings of the state.
        whole_batch: whether the loss of an example depends on the other examples of the batch.
        by_rows: whether the exchanged gradients are nevertheless sums over the rows of the devices,
          as the gradients of `cached_gradient` are.
        micro_batches: the number of micro-batches.
        execution: how the model is run.
        device_memory: the memory of a device in bytes; None if unknown.
        has_adapter: whether adapters to the layers are trained.

    Raises:
        UserError: "step" does not suit the mesh or the objective.
    """
    # An adapter adds to kernels before kernels are cast, so gather kernels in their own dtype.
    dtype = None if has_adapter else execution.dtype
    full = full_bytes(state, dtype, micro_batches)
    fits = state_bytes + full <= LARGEST_PART * (device_memory or 0)
    # Without remat the backward pass would keep the full parameters of all layers. Let the compiler
    # gather the parameters again instead.
    layers_can = execution.remat != "none" and not has_adapter and mesh.shape["fsdp"] > 1

    def exchange(gather: Gather) -> Exchange:
        per_layer = gather == "layer" and layers_can
        axes = manual_axes(mesh, micro_batches, shards=gather == "step" or per_layer)
        way = Way(gather, axes if by_rows else (), per_layer, dtype, micro_batches)
        wrap = functools.partial(exchanged, way=way, mesh=mesh, shardings=shardings)
        return Exchange(wrap, describe(way, mesh, full))

    # Later candidates are tried only if the first candidate does not fit into memory.
    gathers = gather_candidates(gather, mesh, whole_batch=whole_batch, fits=fits)
    first, *others = map(exchange, gathers)
    why = "gathered once a step they do not fit"
    return first, *(Exchange(x.wrap, f"{x.description} ({why})") for x in others)


def full_bytes(state: TrainState, dtype: DTypeLike | None, micro_batches: int) -> int:
    """Returns the bytes per device, besides the state, of gathering parameters once per step.

    These bytes are the full parameters, their gradients and, with several micro-batches, their
    sums.

    Args:
        state: arrays or their shapes.
        dtype: see `Way`.
        micro_batches: the number of micro-batches.
    """

    def size(tree: PyTree, dtype: DTypeLike | None) -> int:
        def of_array(name: str, x: Array) -> int:
            return x.size * jnp.dtype(compute_dtype(name, x.dtype, dtype)).itemsize

        return sum(jax.tree.leaves(map_named(of_array, tree)))

    # Sums over micro-batches have the dtype of the parameters.
    sums = size(state.params, None) * (micro_batches > 1)
    return 2 * size(state.params, dtype) + sums + size(state.frozen, dtype)


def gather_candidates(
    gather: Gather, mesh: Mesh, *, whole_batch: bool, fits: bool
) -> tuple[Gather, ...]:
    """Returns the candidates for `gather` in order: "step", "layer", or "step" and then "layer".

    Args:
        gather: as in `TrainConfig`.
        mesh: the mesh.
        whole_batch: as in `choose_exchanges`.
        fits: whether state, full parameters and gradients leave memory for activations. Only the
            compiled step shows whether the activations fit.

    Raises:
        UserError: "step" does not suit the mesh or the objective.
    """
    # "step" needs full parameters on each device, and a loss that is a sum over examples.
    problems = [f"mesh.{axis} is {mesh.shape[axis]}" for axis in _sizes(mesh).keys() - set(ONCE)]
    if whole_batch:
        problems.append("the objective needs the whole batch or runs further models")
    if gather == "step":
        require(
            not problems,
            "gather step lets each device compute the gradients of its own sequences from full "
            f"parameters, but {' and '.join(sorted(problems))}: choose gather layer",
        )
    if gather != "auto":
        return (gather,)
    # Gathering once sends fewer bytes; gathering per layer always fits.
    return ("step", "layer") if mesh.shape["fsdp"] > 1 and fits and not problems else ("layer",)


def manual_axes(mesh: Mesh, micro_batches: int, *, shards: bool) -> tuple[str, ...]:
    """Returns the mesh axes whose exchange is done by `fsdp` and not by the compiler.

    The result is empty if `expert`, `context` or `tensor` divide the layers, because XLA's
    partitioner (jaxlib 0.10) crashes on programs that are partly manual and partly divided over
    several axes.

    Args:
        mesh: the mesh.
        micro_batches: the number of micro-batches.
        shards: whether `fsdp` can be one of the axes.
    """
    sizes = _sizes(mesh)
    axes = tuple(sizes) if shards else tuple(sizes.keys() & {"data"})
    # With one micro-batch, a partly manual exchange sends as many bytes as the compiler's exchange.
    is_useful = len(axes) == len(sizes) or micro_batches > 1
    return axes if is_useful and sizes.keys() <= set(ONCE) else ()


def describe(way: Way, mesh: Mesh, full: int) -> str:
    """Describes the exchange of gradients in a clause.

    Args:
        way: the way to exchange gradients.
        mesh: the mesh, of several devices.
        full: from `full_bytes`.
    """
    if mesh.size == mesh.shape["tensor"]:
        return ""  # each device has all tokens, and the gradients of its part of the model
    once_per_step = way.micro_batches == 1
    often = "once a step" if once_per_step else "in each micro-batch"
    # With data parallelism alone, no parameters are gathered.
    if mesh.shape["fsdp"] == 1:
        return f"gradients exchanged {'once a step' if way.axes else often}"
    if way.gather == "step":
        return (
            "gradients exchanged once a step; parameters gathered once a step, which takes "
            f"{in_units(full)} in addition to the state (less with --gather layer)"
        )
    by = "" if way.per_layer and way.axes else " by the compiler"
    among = " among the devices of fsdp" if way.axes and not once_per_step else ""
    return f"parameters gathered layer by layer{by}; gradients exchanged {often}{among}"


def _sizes(mesh: Mesh) -> dict[str, int]:
    """Returns the axes of a mesh that have several devices."""
    return {axis: size for axis, size in mesh.shape.items() if size > 1}
